"""A run within a loop that somebody else drives: its choices, its hooks, its folder, its record and its display."""

import atexit
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..checkpoints import state_for_rank, sync_path
from ..console import RunConsole
from ..data import Batch
from ..errors import RankLostError, RunNotice, UnsuitableError, UsageError, notice, require
from ..firing import Driver, HookManager, unmet
from ..hooks import ENDLESS, RunInfo, StatePart, treatments
from ..isolation import borrowed_modes
from ..loops import NoProgress, Progress
from ..preserved_streams import preserved_streams
from ..runs import ATTACHED, RunFolder, RunRecord, environment, load_reference, build_summary
from ..state import RandomStreams, TrainingState, copy_of_batch, gathered_for_a_while
from ..training import Ranks, TrainingTask
from .attach_options import AttachOptions, GivenLoader, Loss, no_loss
from .model_wrappers import check_trained, kept, past, trainers_of

STATE = {"loop", "hooks", "metrics", "errors", "left_out", "sinks", "place", "folder"}
RUNS = "loopscope-runs"
"""The folder of runs for which no other is chosen; its name is no identifier, so that no import can find it."""
_TRAINED: "WeakSet[Optimizer]" = WeakSet()
"""Optimizers to which a run is attached."""
_OPEN: "dict[Path, AttachedRun]" = {}
"""Runs of this process that have begun and are not over, by folder."""


def _free_folders(parent: Path) -> Iterator[Path]:
    """Yield the folders ``run_N`` in ``parent`` that do not exist, from the number after the highest one on."""
    try:
        names = [path.name for path in parent.iterdir()]
    except OSError:  # it does not exist yet; one that cannot be written is refused when the run starts
        names = []
    taken = [int(name.removeprefix("run_")) for name in names if re.fullmatch(r"run_\d+", name)]
    yield from (parent / f"run_{number}" for number in count(max(taken, default=-1) + 1))


class AttachedRun:
    """A run of hooks in a loop that somebody else drives, from the choices to the summary.

    Args:
        choices: what was chosen.
        lacks: what the loop cannot give, by the need of a hook.
        trained_in: the folder of the trainer, in which the run's lies where none is chosen.
        bar: show the progress, which a trainer has its own display for.
    """

    manager: HookManager
    driver: Driver

    def __init__(
        self, choices: AttachOptions, lacks: Mapping[str, str], trained_in: Path | None = None, *, bar: bool = True
    ) -> None:
        self.choices, self._lacks = choices, lacks
        self._hooks, self._required, self._left_out = choices.wanted()
        for item in self._hooks:
            if item.hook.name in self._required and (sentence := unmet(item.hook, lacks)):
                raise UnsuitableError(sentence)
        self.treatments = treatments(item.hook for item in self._hooks)
        self._trained_in = trained_in
        numbered_in = (trained_in or Path()) / RUNS
        self._numbered_in = None if choices.out else numbered_in
        self.folder = self._folder_at(Path(choices.out or next(_free_folders(numbered_in))))
        self._bar = bar
        self._progress: Progress = NoProgress()
        self._held = ExitStack()
        self._stored: Mapping[str, Any] | None = None
        self._reference: Mapping[str, Tensor] | None = None
        self._at_exit: Callable[[str], None] = self.end
        self.is_built = self.is_started = self.is_over = False
        self.place: dict[str, Any] = {}
        """Where the loop stands, as the integration that drives it says it; kept in the state."""

    def _folder_at(self, path: Path) -> RunFolder:
        """Return a folder of this run, which is named after it, or after the trainer's folder that it is in."""
        named = path if self.choices.out or self._trained_in is None else self._trained_in
        return RunFolder(path, named.absolute().name)

    @preserved_streams()
    def build(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        loss: Loss | None = None,
        replica: DistributedDataParallel | None = None,
        ranks: Ranks | None = None,
        accumulate: int = 1,
        length: int | None = None,
        **parts: Any,
    ) -> None:
        """Put the hooks around what is trained; raises :class:`UsageError` for what cannot be.

        ``parts`` are further ones of the :class:`.TrainingTask`, such as its scheduler. Of ranks that train together
        the main one alone has a folder, sinks and a display.
        """
        self._ranks = ranks = trainers_of(model, replica) if ranks is None else ranks
        if ranks.are_many:
            self._agree(accumulate)
        check_trained(model, optimizer)
        twice = f"A run is attached to this {type(optimizer).__name__} already; close it first: scope.close()."
        require(optimizer not in _TRAINED, twice)
        choices = self.choices
        self._loader = loader = GivenLoader(choices.loader, choices.seed)
        task = TrainingTask(
            model,
            optimizer,
            loader,
            past(replica, loss or choices.loss or no_loss),
            evaluate=choices.evaluate or (lambda model: {}),
            length=choices.length or length or ENDLESS,
            snapshot_every=choices.due_every,
            log_every=choices.log_every,
            config=choices.config,
            replica=replica,
            ranks=ranks,
            **parts,
        )
        streams = RandomStreams(choices.seed, loader.generators())
        state = TrainingState(model, optimizer, streams, scheduler=task.scheduler, scaler=task.scaler)
        self.manager = self._managed(task, state)
        self.driver = Driver(task, self.manager)
        self._optimizer = optimizer
        _TRAINED.add(optimizer)
        self.is_built = True

    def _managed(self, task: TrainingTask, state: TrainingState) -> HookManager:
        """Make the manager of the hooks, with the display and the reference solution."""
        choices, keeping = self.choices, any(sink.keeps for sink in self.choices.made_sinks())
        self._console = RunConsole(choices.display, recorded=keeping, warnings=RunNotice)
        if choices.reference is not None:
            self._reference = load_reference(Path(choices.reference), task.model).weights
        return HookManager(
            [item.hook for item in self._hooks],
            task,
            state,
            loop=choices.loop,
            required=self._required,
            left_out=self._left_out,
            sinks=[*choices.made_sinks(), *self._console.sinks()],
            on_error=choices.on_hook_error,
            audit=choices.audit,
            reference_weights=self._reference,
        )

    def _agree(self, accumulate: int) -> None:
        """Go by the folder of the main rank, which alone writes and shows; refuse what differs between the ranks."""
        ranks, choices = self._ranks, self.choices
        try:
            path, strategy = ranks.gather((str(self.folder.path), self.folder.strategy))[0]
        except RankLostError as error:
            raise RankLostError(f"{error} Call attach on every rank of the training.") from error
        self.folder = RunFolder(Path(path), strategy)
        ranks.check_equal({"accumulate": accumulate, "on_hook_error": choices.on_hook_error, "audit": choices.audit})
        if not ranks.is_main:
            self.choices = replace(choices, sinks=(), display="none")

    @preserved_streams()
    def start(self, first: Batch | None, steps: int | None, at_exit: Callable[[str], None] | None = None) -> None:
        """Start the hooks before the first step, on its batch; ``steps`` are those of an epoch, if they are known.

        ``at_exit`` is called with a status where the program ends and the run does not.
        """
        self._loader.steps = steps
        self._at_exit = at_exit or self.end
        if self.choices.overwrite and (earlier := _OPEN.get(self.folder.path.resolve())):
            earlier._at_exit("interrupted")  # a cell that runs again has lost the scope, and nobody else can close it
        self._ranks.check_equal({"Whether a state was loaded": self._stored is not None})
        try:
            self._ranks.together(self._take_folder)
            self._share_folder()
            self._held.enter_context(self._console)
            info = self._start_hooks(first)
        except BaseException:
            self.is_over = True
            self._leave()
            self.manager.end("failed")
            self.folder.remove_created()
            raise
        self.is_started, _OPEN[self.folder.path.resolve()] = True, self
        progress = self._console.strategy_started(info, self.manager.task, [*self.manager.hooks])
        self._progress = progress if self._bar else NoProgress()
        self._begin = perf_counter()
        atexit.register(self._forgotten)

    def _take_folder(self) -> None:
        if self._ranks.is_main:
            if self._numbered_in is not None and self._stored is None:
                folders = map(self._folder_at, _free_folders(self._numbered_in))
                self.folder = next(folder for folder in folders if folder.make_new())
            advice = "give attach another folder, out=, or overwrite=True"
            self.folder.refuse_to_overwrite(allowed=self.choices.overwrite or self._stored is not None, advice=advice)
            self.folder.enter(self._held)

    def _share_folder(self) -> None:
        """Let all ranks know the folder that the main one has taken."""
        if self._ranks.are_many:
            path = Path(self._ranks.gather(str(self.folder.path))[0])
            self.folder = self.folder if self._ranks.is_main else self._folder_at(path)

    def _start_hooks(self, first: Batch | None) -> RunInfo:
        manager, stored = self.manager, self._stored
        record, path = self._record(), self.folder.path
        if not self._ranks.is_main:
            path = Path(self._held.enter_context(TemporaryDirectory()))
        info = manager.run_info(record.experiment, record.strategy, path)
        info = replace(info, treatments=self.treatments, lacks=self._lacks)
        if stored is not None:
            vars(manager.state.loop).update(deepcopy(stored["loop"]))
            # first the metrics, which tell which hooks had reported: what these raise is raised
            manager.dispatch.load_state_dict(stored["metrics"], {hook.name: hook for hook in manager.hooks})
            manager.hooks.load_state_dict(stored["hooks"])
            manager.hooks.failures.before = stored["errors"], stored["left_out"]
        manager.start_hooks(info, first)
        if first is not None:
            manager.hooks.see_first(first)
        info = replace(info, metric_infos=manager.hooks.metric_infos())
        if stored is not None:
            manager.hooks.goes_on()
        self._ranks.together(partial(self._begin_record, record, info))
        return info

    def _begin_record(self, record: RunRecord, info: RunInfo) -> None:
        if self._stored is None and self._ranks.is_main:
            self.folder.claim()
            self.folder.write_record(record)
        self.manager.dispatch.start(info, self._stored and self._stored["sinks"])

    def _record(self) -> RunRecord:
        choices = self.choices
        known = {"experiment": ATTACHED, "strategy": self.folder.strategy, "config": dict(choices.config)}
        known["environment"] = environment(self.manager.task.model, self._ranks)
        return RunRecord.planned(self._hooks, choices.on_hook_error, choices.audit, choices.reference, **known)

    def after_step(self) -> None:
        """Do what is due between two steps; raises what a hook raised in the one that is over."""
        driver, choices = self.driver, self.choices
        step, in_steps = driver.loop.step, choices.loop == "step"
        self._progress.step(driver.loop)
        if in_steps and (step % choices.log_every == 0 or step == choices.length):
            driver.end_interval()
        elif step % choices.log_every == 0:
            self.manager.dispatch.flush_steps(driver.loop.epoch)
        if in_steps and choices.is_due(step):
            driver.snapshot()
        self.manager.settle()

    def after_epoch(self, numbers: Mapping[str, float]) -> None:
        """End an epoch, whose evaluation gave these numbers, if there was one."""
        driver, loop = self.driver, self.driver.loop
        driver.end_batches()
        if self.choices.loop == "epoch":
            driver.end_interval()
        if numbers:
            driver.evaluated(numbers)
        self._progress.evaluated(loop)
        driver.end_epoch()
        if self.choices.loop == "epoch" and self.choices.is_due(loop.epoch + 1):
            driver.snapshot()
        loop.epoch += 1
        self.manager.settle()

    @property
    def keeps_gradients(self) -> bool:
        """Whether a hook changes the gradients that the loop goes on with."""
        return any(StatePart.GRADIENTS.value in parts for parts in self.treatments.values())

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """Let a trainer's own evaluation draw and set modes and buffers as it likes; these are put back after it.

        What its code keeps elsewhere, such as the best number so far, is its own affair and stays.
        """
        buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        with ExitStack() as stack:
            if self.is_started and not self.is_over:
                stack.enter_context(self.manager.between_steps())
                self.manager.state.streams.derive("evaluation", "the trainer", self.driver.loop.step)
            else:
                stack.enter_context(RandomStreams(self.choices.seed).isolated())
            stack.enter_context(borrowed_modes(model, train=None))
            stack.enter_context(gathered_for_a_while(model))
            stack.enter_context(kept(self.driver.task.replica if self.is_built else None))
            try:
                yield
            finally:
                with torch.no_grad():
                    for buffer, before in buffers:
                        buffer.copy_(before)

    def state_dict(self) -> dict[str, Any]:
        """Return what the hooks, the sinks and the loop know, as copies: tensors and plain values."""
        manager = self.manager
        with manager.between_steps():
            positions, files = manager.dispatch.positions(), manager.dispatch.files()
            content = {
                "loop": manager.state.loop.state_dict(),
                "hooks": manager.hooks.state_dict(),
                "metrics": manager.dispatch.state_dict(),
                "errors": manager.hooks.failures.errors,
                "left_out": manager.hooks.failures.left_out,
                "sinks": positions,
                "place": self.place,
                "folder": self.folder.path.name,
            }
        for path in files:
            sync_path(path)
        copied: dict[str, Any] = copy_of_batch(content)
        return copied

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on, at the first step, from what :meth:`state_dict` returned, or what was made of that for several ranks.

        All ranks call it, once the run is built.
        """
        require(not self.is_started, "The state of a scope is loaded before its first step: right after attach.")
        if self._ranks.are_many or (isinstance(state, Mapping) and "rank 0" in state):
            state = state_for_rank(state, self.driver.task.model, self._ranks)
        if not isinstance(state, Mapping) or state.keys() != STATE:
            raise UsageError("This is not what scope.state_dict() returned, so no run can go on from it.")
        self._stored, self.place = state, dict(state["place"])
        if self._numbered_in is not None:
            self.folder = self._folder_at(self._numbered_in / Path(str(state["folder"])).name)

    @property
    def stored_epoch(self) -> int:
        """The epoch in which the state that was loaded was taken."""
        return 0 if self._stored is None else int(self._stored["loop"]["epoch"])

    @preserved_streams()
    def end(self, status: str = "completed", error: BaseException | None = None) -> None:
        """Deliver everything, write the summary and let go of the folder; called again it does nothing."""
        if self.is_over:
            return
        self.is_over = True
        try:
            self.manager.end(status)
        except BaseException as raised:
            status, error = "failed", raised
            raise
        finally:
            try:
                if self.is_started and self._ranks.is_main:
                    self._summarise(status, error)
            finally:  # whatever the disk says to the summary
                self._leave()

    def _summarise(self, status: str, error: BaseException | None) -> None:
        record, path, final = self._record(), self.folder.path, self.driver.loop.evaluation
        seconds = dict.fromkeys(("total", "training"), perf_counter() - self._begin)
        summary = build_summary(self.manager, record, path, status=status, error=error, seconds=seconds, final=final)
        self.folder.write_summary(summary)
        self._console.strategy_ended(summary)
        self._console.ended([summary])

    def _leave(self) -> None:
        _TRAINED.discard(self._optimizer)
        if _OPEN.get(self.folder.path.resolve()) is self:
            del _OPEN[self.folder.path.resolve()]
        atexit.unregister(self._forgotten)
        self._held.close()

    def _forgotten(self) -> None:
        """Close the run that its program has not closed; one that ends with an error is closed as failed."""
        if vars(sys).get("last_value") is not None or not self._ranks.is_main:
            self._at_exit("failed")
            return
        notice(
            f"The run in {self.folder.path} was not closed, and is closed as the program ends: call scope.close() "
            "after the loop, or write with loopscope.attach(...) as scope."
        )
        self._at_exit("interrupted" if self._ranks.are_many else "completed")  # other ranks may be gone
