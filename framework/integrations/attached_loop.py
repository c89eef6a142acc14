"""The transitions of a loop that is not loopscope's own: its hooks, its :class:`.Run`, and the end of its epochs."""

import atexit
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from numbers import Real
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from weakref import WeakSet

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..checkpoints import DigestLog, state_for_rank
from ..combined_optimizers import separate_optimizers, single_scheduler
from ..console import RunConsole, make_console
from ..data import Batch, MicroBatches
from ..engine import Driver, HookManager, unmet_need
from ..errors import (
    HookError,
    HookMisuseError,
    LoopscopeError,
    RankLostError,
    RunNotice,
    StateMutationError,
    UnsuitableError,
    notice,
    require,
    short_path,
    warn,
    with_lines,
)
from ..hooks import ENDLESS, HookPoint, TrainingHook, treatments
from ..isolation import undone_in_modules, undone_pass
from ..loops import NoProgress, Progress
from ..observing import scaler_in_use, schedulers_of, stop_timing, time_loaders
from ..preserved_streams import preserved_streams
from ..runs import (
    ATTACHED,
    Run,
    RunRecord,
    attempt,
    budget_of,
    create_manager,
    environment,
    load_reference,
    planned_record,
    read_provenance,
    status_of_script,
)
from ..state import RandomStreams, TrainingState
from ..state.generators import generators_of
from ..training import EVALUATION, Ranks, StepClock, TrainingTask, no_evaluation
from .attach_options import AttachOptions, Loss, OptionalLoader, missing_loss
from .attached_folder import FolderChoice
from .attached_state import StoredState, state_of
from .epoch_plan import EpochPlan
from .loop_settings import loop_settings, name_without_seed, seed_of
from .model_wrappers import check_optimizer, find_ranks, install_output_capturing, loss_for_hooks, unchanged_replica
from .other_modules import given_modules, modules_of_loss
from .reported_numbers import REPORTED, of_evaluation

Result = TypeVar("Result")
Ending = Callable[[str, BaseException | None], None]
"""Ends a run with a status, and the error that has ended it, if any."""
STOPPED = 3
"""The exit status of a program that ``stop_on`` has ended."""
UNSEEDED = ("generators/python", "generators/numpy")
"""Entries without a digest: many scripts neither seed nor use these generators, and draws show in batch and weights."""
_TRAINED: "WeakSet[Optimizer]" = WeakSet()
"""Optimizers with an attached loop."""
END_OF_PROCESS: list[Callable[[], tuple[str, BaseException | None]]] = []
"""Under ``loopscope watch``, a function that returns the status, and the error if any, with which the process ends."""
_OPEN: "dict[Path, AttachedLoop]" = {}
"""Loops of this process whose runs have started and are not closed, by folder."""


def as_number(value: Any) -> float | None:
    """Return a number or the element of a tensor with one element, ``None`` for other values."""
    if isinstance(value, Tensor):
        return None if value.numel() != 1 or value.is_complex() or value.is_meta else value.item()
    if isinstance(value, (int, float)):
        return value
    return float(value) if isinstance(value, Real) else None  # such as numpy.float32


def parameters_of(optimizer: Any) -> list[Any]:
    """Return all parameters of an optimizer."""
    return [item for group in optimizer.param_groups for item in group["params"]]


def is_attached(optimizer: Optimizer) -> bool:
    """Return whether an open run is attached to an optimizer."""
    return optimizer in _TRAINED


def _do_nothing() -> None:
    """Note nothing, in a loop whose evaluations are calls."""


class AttachedLoop:
    """A loop that is not loopscope's own, from the options of :func:`.attach` to the end of its run.

    Args:
        options: the options of :func:`.attach`.
        lacks: the needs of hooks that the loop does not meet, each with advice.
        trained_in: the output folder of the Trainer, which contains the default folder of the run.
        bar: show a progress bar; a Trainer has its own.
    """

    manager: HookManager
    driver: Driver
    run: Run
    ranks: Ranks
    """The ranks that train together, known once the run is built."""

    def __init__(
        self, options: AttachOptions, lacks: Mapping[str, str], trained_in: Path | None = None, *, bar: bool = True
    ) -> None:
        self._given = partial(AttachedLoop, options, lacks, trained_in, bar=bar)
        self._training = 1
        """The number of this training among those of one Trainer."""
        self.options, self.lacks = options, dict[str, str]()
        self._hooks, self._required, self._left_out = options.create_hooks()
        self.add_lacks(lacks)
        self.treatments = treatments(item.hook for item in self._hooks)
        self._folder_choice = FolderChoice(options.out or None, trained_in)
        self._bar = bar
        self._progress: Progress = NoProgress()
        self._contexts = ExitStack()
        self._stored: StoredState | None = None
        self._at_exit: Ending = self.end
        self.is_built = self.is_started = self.is_closed = self._has_ended_training = False
        self.quiet_until = 0
        """The first step after which :meth:`after_step` may have work, besides failures of hooks."""
        self._has_noticed_draws = self._has_noticed_unnamed = False
        self._inner_results = list[Any]()
        """The results of evaluations within the one in progress."""
        self.is_evaluating = False
        """Whether an evaluation of a custom loop is in progress."""
        self._digests: DigestLog | None = None
        self._digested = -1, -1  # the epoch and the step of the newest digest
        self.origin: Mapping[str, Any] = {}
        """How ``loopscope watch`` has started this training, as a part of the record's provenance."""
        self.settings: Mapping[str, Any] = {}
        """Further settings for the record, such as the arguments of a Trainer."""
        self._accumulate = 1
        self.hook_calls: AbstractContextManager[object] = nullcontext()
        """Marks calls of the optimizer as those of a hook, in a loop that observes its optimizer."""
        self.is_in_step: Callable[[], bool] = bool
        """Whether a step is open; it returns that none is in a loop that does not know its steps."""
        self.on_evaluation_numbers: Callable[[], None] = _do_nothing
        """Called when the script has logged numbers of an evaluation."""
        self.place: dict[str, Any] = {}
        """The position of the loop, in a form of the integration; part of the state."""

    def successor(self) -> "AttachedLoop":
        """Return a loop with the same options for the next training of a Trainer, which has a separate folder."""
        for hook in self.options.hooks:
            if isinstance(hook, TrainingHook):
                hook.reset()
        following = self._given()
        following._training = self._training + 1
        following._folder_choice.advance(following._training, overwrite=self.options.overwrite)
        return following

    def add_lacks(self, lacks: Mapping[str, str]) -> None:
        """Add needs of hooks that the loop does not meet, each with advice, before the run is built.

        Raises:
            UnsuitableError: if a hook that the caller named has such a need; those of a group are left out later.
        """
        self.lacks |= lacks
        for item in self._hooks:
            if item.hook.name in self._required and (sentence := unmet_need(item.hook, lacks)):
                raise UnsuitableError(sentence)

    @property
    def clock(self) -> StepClock:
        """The time of the run by phase."""
        return self.manager.profiler.clock

    @property
    def path(self) -> Path:
        """The folder of the run, which all ranks know."""
        return self._folder_choice.folder.path

    @preserved_streams()
    def build(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        loss: Loss | None = None,
        replica: DistributedDataParallel | None = None,
        ranks: Ranks | None = None,
        accumulate: int = 1,
        length: int | None = None,
        **parts: Any,
    ) -> None:
        """Create the hook manager around the model and the optimizer.

        ``parts`` are further fields of the :class:`.TrainingTask`, such as its scheduler. Of ranks that train together
        only the main one has a folder, sinks and a display.

        Raises:
            UsageError: if the optimizer does not train the model, or already has an attached run.
        """
        self.ranks = ranks = find_ranks(model, replica) if ranks is None else ranks
        if ranks.are_many:
            self._synchronise_options(accumulate)
        check_optimizer(model, optimizer)
        if ranks.is_main:
            self._folder_choice.folder.refuse_to_overwrite(allowed=True)  # whether it has a run depends on a resume
        for item in separate_optimizers(optimizer):
            attached = f"A run is already attached to this {type(item).__name__}; close it first: scope.close()."
            require(item not in _TRAINED, attached)
        self._loss = loss or self.options.loss or missing_loss
        self._given_parts = model, optimizer, replica, length
        self._assemble(self._left_out, **parts)
        self._parts = parts
        self._accumulate = accumulate
        self._seed = seed_of({**self.settings, **self.options.config}, self.options.seed)
        _TRAINED.update(separate_optimizers(optimizer))
        self.is_built = True

    def _assemble(self, left_out: Mapping[str, str], **parts: Any) -> None:
        """Create task, state, manager and driver; hooks that could not be created, ``left_out``, are reported."""
        options, (model, optimizer, replica, length) = self.options, self._given_parts
        self._loader = loader = OptionalLoader(options.loader, options.seed)
        task = TrainingTask(
            model,
            optimizer,
            loader,
            loss_for_hooks(self._loss, replica),
            evaluate=options.evaluate or no_evaluation,
            length=options.length or length or ENDLESS,
            snapshot_every=options.snapshot_interval,
            log_every=options.log_every,
            config=options.config,
            replica=replica,
            ranks=self.ranks,
            **parts,
        )
        functions = generators_of(self._loss, options.evaluate)
        streams = RandomStreams(options.seed, (*loader.generators(), *functions))
        state = TrainingState(
            model,
            optimizer,
            streams,
            scheduler=task.scheduler,
            scaler=task.scaler,
            also=given_modules(options.also, model),
        )
        self.manager = self._create_manager(task, state, left_out)
        self.driver = Driver(task, self.manager)

    def use_found_parts(self) -> None:
        """Before the first step of a loop that reports no batches: count steps, with its scheduler and scaler.

        They are those of the script, unless they were given.
        """
        found, optimizer = dict(self._parts), self.manager.task.optimizer
        if found.get("scaler") is None:
            found["scaler"] = scaler_in_use()
        if found.get("scheduler") is None:
            schedulers = [item for one in separate_optimizers(optimizer) for item in schedulers_of(one)]
            found["scheduler"] = single_scheduler(schedulers)
        loop = self.options.loop or "step"
        if found != self._parts or loop != self.options.loop:
            self.options = replace(self.options, loop=loop)
            left_out, place = self.manager.hooks.failures.left_out, self.manager.state.loop
            self._assemble({}, **found)
            self.begin_at(place.epoch, place.step)
            self.manager.hooks.failures.left_out.update(left_out)

    def _create_manager(self, task: TrainingTask, state: TrainingState, left_out: Mapping[str, str]) -> HookManager:
        """Create the manager of the hooks, the display, and the reference solution."""
        options, is_recorded = self.options, any(sink.keeps for sink in self.options.create_sinks())
        # Under ``loopscope watch``, standard output is that of the command alone.
        console = make_console(sys.stderr if END_OF_PROCESS else sys.stdout)
        self._console = RunConsole(
            options.display,
            recorded=is_recorded,
            bar=self._bar,
            warnings=RunNotice,
            alerts_of=self._required,
            console=console,
        )
        reference = None if options.reference is None else load_reference(options.reference, task.model).weights
        return create_manager(
            options,
            self._hooks,
            task,
            state,
            loop=options.loop or "epoch",
            required=[*self._required],
            left_out=left_out,
            sinks=[*options.create_sinks(), *self._console.sinks()],
            reference_weights=reference,
            scheduled=[] if isinstance(budget_of(options.budget), Path) else [*options.schedules],
        )

    def _synchronise_options(self, accumulate: int) -> None:
        """Use the folder of the main rank, the only one that writes or displays; refuse options that differ."""
        ranks, options = self.ranks, self.options
        try:
            self._folder_choice.share(ranks)
        except RankLostError as error:
            raise RankLostError(f"{error} Call attach on every rank of the training.") from error
        ranks.check_equal(
            {"accumulate": accumulate, "on_hook_error": options.on_hook_error, "audit": options.audit_hooks}
        )
        if not ranks.is_main:
            self.options = replace(options, sinks=(), display="none")

    @preserved_streams()
    def start(self, first: Batch | None, steps: int | None, at_exit: Ending | None = None) -> None:
        """Start the hooks before the first step, with its batch; ``steps`` is the number of steps per epoch, if known.

        ``at_exit`` is called with a status, and the error if any, if the program ends while the run is open.
        """
        loop, plan = self.manager.state.loop, self._loader.plan
        if "plan" in self.place:
            plan.load_state_dict(self.place["plan"])
        else:
            plan.begin_epoch(loop.epoch, loop.step, steps)
        self._at_exit = at_exit or self.end
        if self.options.overwrite and (earlier := _OPEN.get(self.path.resolve())):
            # A notebook cell that runs again has lost the scope, so it is closed here.
            earlier._at_exit("interrupted", None)
        self.ranks.check_equal({"Whether a state was loaded": self._stored is not None})
        self._continues_record = self._has_record_of_state()
        try:
            self.ranks.call_on_all(self._create_folder)
            self._folder_choice.share(self.ranks)
            self._contexts.enter_context(self._console)
            install_output_capturing(self.manager.task.model)
            self._include_modules_of_loss(first)
            self.run = self._create_run(first)
            self._start_run(first)
        except BaseException:
            self.is_closed = True
            end = partial(self.manager.end, "failed")
            for action in (self._release, end, self._folder_choice.folder.remove_created):
                attempt(action)  # so that the first error is reported
            raise
        self.is_started, _OPEN[self.path.resolve()] = True, self
        self._progress = self.run.show_progress()
        if self.options.loop == "step" and self._stored is None:
            self.driver.begin_interval()
        self.run.begin_training()
        time_loaders(self.clock)
        atexit.register(self._close_at_exit)

    def _include_modules_of_loss(self, first: Batch | None) -> None:
        """Protect the modules outside of the model that the loss uses, if any hook computes it."""
        task, state = self.manager.task, self.manager.state
        has_loss = first is not None and "needs_loss" not in self.lacks
        if has_loss and any(hook.needs_loss for hook in self.manager.hooks):
            modules, self.manager.observed_first_pass = modules_of_loss(task, state, first, self._loss)
            if modules:
                self.manager.isolation.include(modules)

    def _has_record_of_state(self) -> bool:
        """Return whether the folder has the record that the loaded state, if any, continues; report that it has not."""
        if self._stored is None:
            return False
        choice = self._folder_choice
        is_held = choice.holds_run_of(self._stored.sinks, overwrite=self.options.overwrite)
        if not self.ranks.gather(is_held)[0]:
            if self.ranks.is_main:
                notice(
                    f"{short_path(self.path)} does not hold the run of the loaded checkpoint, so a new record starts "
                    f"after step {self._stored.loop['step']}, with the restored state of the hooks."
                )
            return False
        return True

    def _create_folder(self) -> None:
        if self.ranks.is_main:
            self._folder_choice.create(overwrite=self.options.overwrite, is_resumed=self._continues_record)

    def _create_run(self, first: Batch | None) -> Run:
        """Create the run; all ranks but the main one have a temporary folder."""
        manager, folder, record = self.manager, self._folder_choice.folder, self._record(first)
        if not self.ranks.is_main:
            folder = replace(folder, path=Path(self._contexts.enter_context(TemporaryDirectory())))
        info = manager.run_info(record.experiment, record.strategy, folder.path)
        info = replace(info, treatments=self.treatments, lacks=self.lacks)
        run = Run(manager, folder, record, info, self._console, self._stored, continues_record=self._continues_record)
        self._contexts.callback(run.release)
        return run

    def _start_run(self, first: Batch | None) -> None:
        """Lock the folder, start or resume the hooks, and start the sinks."""
        run, ranks = self.run, self.ranks
        with run.undone_after_errors():
            ranks.call_on_all(run.enter_folder)
            checks = [] if first is None else [partial(self.manager.hooks.check_first_batch, first)]
            run.start_hooks(*checks, first=first)
            if self._stored is not None:
                self.manager.disable_dropped_hooks()
            ranks.call_on_all(self._start_record)
            self._start_digests()

    def _start_record(self) -> None:
        if not self._continues_record:
            self.run.claim(self.options.reference)
        self.run.start_sinks()

    def _start_digests(self) -> None:
        """Prepare the digests of a run that is recorded; all ranks compute them, also those without sinks."""
        is_recorded = any(sink.keeps for sink in self.options.create_sinks())
        if self.options.digest_every != 0 and self.ranks.agree(is_recorded):
            self._digests = DigestLog(self.run.folder.path, self.manager, left_out=UNSEEDED)
            if self._continues_record:
                self._digests.keep_until(self.manager.state.loop.step)

    def _record(self, first: Batch | None) -> RunRecord:
        options = self.options
        task, seed, also = self.manager.task, self._seed, self.manager.state.also
        batch = first[0] if isinstance(first, MicroBatches) else first
        fields = {
            "experiment": ATTACHED,
            "strategy": self._folder_choice.folder.strategy,
            "config": dict(options.config),
            "environment": environment(task.model, self.ranks),
            "training": {
                **loop_settings(task, batch, self._accumulate, seed),
                **self.settings,
                "name": name_without_seed(self._folder_choice.named_after, seed),
                **({"also": {name: type(module).__qualname__ for name, module in also.items()}} if also else {}),
            },
            "provenance": {**read_provenance(), **self.origin} if self.ranks.is_main else {},
        }
        return planned_record(self._hooks, options, options.reference, **fields)

    @property
    def plan(self) -> EpochPlan:
        """The numbers of steps of the epochs."""
        return self._loader.plan

    def begin_at(self, epoch: int, step: int) -> None:
        """Continue the numbers of a training without hooks, unless a state is loaded; called before the first step."""
        if self._stored is None:
            loop = self.manager.state.loop
            loop.epoch, loop.step = epoch, step

    @cached_property
    def _is_quiet(self) -> bool:
        """Whether only planned work follows steps: no display, no other rank, and nothing that may end the program."""
        options = self.options
        may_end = options.stop_after is not None or options.stop_on is not None or bool(self._hooks_that_finish)
        return not (may_end or self.ranks.are_many) and type(self._progress) is NoProgress

    def after_step(self) -> None:
        """Run the work that is due between two steps, then raise the first hook error of the completed step."""
        driver, options = self.driver, self.options
        step, in_steps = driver.loop.step, options.loop == "step"
        self._progress.step(driver.loop)
        if options.is_digest_due(step):
            self._write_digest()
        if in_steps and options.is_due(step):
            self._end_interval()
        elif step % options.log_every == 0:
            driver.flush_steps()
        self.manager.raise_failures()
        self._stop_if_asked(step)
        self.quiet_until = options.next_work(step + 1) if self._is_quiet else 0

    def _stop_if_asked(self, step: int) -> None:
        """End the program between two steps: after ``stop_after`` steps, or at a finding that ``stop_on`` names.

        Raises:
            SystemExit: with status 0 after the given steps, and 3 at a finding.
        """
        options = self.options
        if options.stop_after is not None and step >= options.stop_after:
            raise SystemExit(0)
        if self._hooks_that_finish and self.ranks.agree(all(hook.is_finished for hook in self._hooks_that_finish)):
            raise SystemExit(0)
        if options.stop_on is not None and self.ranks.agree(self.run.diagnosis.has_critical_of(options.stop_on)):
            raise SystemExit(STOPPED)

    @cached_property
    def _hooks_that_finish(self) -> list[TrainingHook]:
        return [hook for hook in self.manager.hooks if type(hook).is_finished is not TrainingHook.is_finished]

    def report_numbers(self, numbers: Mapping[str, Any], *, evaluates: bool = True) -> None:
        """Record numbers that the script reports, at the newest step.

        Those of an evaluation, by their names, are also one for hooks if the loop ``evaluates`` outside of calls.
        """
        named = {str(name): as_number(value) for name, value in numbers.items() if not isinstance(value, bool)}
        plain = {name: value for name, value in named.items() if value is not None}
        if not plain or not self.is_started or self.is_closed:
            return
        with self.hook_calls:
            self.manager.delivery.add(REPORTED, HookPoint.POST_STEP, self.driver.loop.step, dict(plain))
            if evaluates and (evaluation := of_evaluation(plain)):
                self.driver.record_evaluation(evaluation)
                self.on_evaluation_numbers()

    def _end_interval(self) -> None:
        """End an interval of the step loop, with SNAPSHOT."""
        if self.options.digest_every is None:
            self._write_digest()
        self.driver.end_interval()
        self.driver.snapshot()
        self.driver.begin_interval()

    def _write_digest(self) -> None:
        """Write the digest of the state at this moment, unless it has been written."""
        loop = self.driver.loop
        moment = loop.epoch, loop.step
        if self._digests is None or moment == self._digested:
            return
        self._digested = moment
        try:
            self._digests.write(loop)
        except Exception as error:  # an unusual state must not end the training
            self._digests = None
            warn(f"The state has no digest: {with_lines(error)}. The run continues without digests.")

    def end_training(self) -> None:
        """Fire SNAPSHOT after the last step, unless it has just been fired there; further calls do nothing."""
        loop, options = self.driver.loop, self.options
        if self._has_ended_training:
            return
        self._has_ended_training = True
        if loop.step:
            self._write_digest()
        if options.loop == "step" and loop.step and not options.is_due(loop.step):
            self._end_interval()
        elif options.loop != "step" and loop.epoch and not options.is_due(loop.epoch):
            loop.epoch -= 1  # SNAPSHOT belongs to the last epoch
            self.driver.snapshot()
            loop.epoch += 1

    def after_epoch(self, numbers: Mapping[str, float]) -> None:
        """End an epoch; ``numbers`` are those of its evaluation, if any."""
        driver, loop = self.driver, self.driver.loop
        self.plan.end_epoch(loop.epoch, loop.step)
        driver.end_batches()
        if self.options.loop != "step":
            driver.end_interval()
        if numbers:
            driver.record_evaluation(numbers)
        self._progress.report_evaluation(loop)
        driver.end_epoch()
        is_due = self.options.loop != "step" and self.options.is_due(loop.epoch + 1)
        if is_due:
            driver.snapshot()
        loop.epoch += 1
        if is_due and self.options.digest_every is None:
            self._write_digest()
        self.manager.raise_failures()

    @contextmanager
    def evaluating(
        self, model: nn.Module, optimizers: Iterable[Optimizer] = (), *, notices: bool = True
    ) -> Iterator[None]:
        """Isolate a Trainer's evaluation: random streams and everything in modules are restored after the body.

        With ``isolate_evaluation=False`` only the taps of hooks are disabled. Values that the Trainer stores elsewhere,
        such as the best number so far, are not restored.

        Args:
            model: the evaluated model.
            optimizers: the optimizers of the training.
            notices: report the first evaluation that draws random numbers.
        """
        if not self.options.isolate_evaluation:
            with ExitStack() as stack:
                if self.is_started:
                    stack.enter_context(self.clock.during(EVALUATION))
                    stack.enter_context(self.manager.untapped_pass())
                yield
            return
        with ExitStack() as stack:
            if self.is_started and not self.is_closed:
                stack.enter_context(self.clock.during(EVALUATION))
                stack.enter_context(self.manager.between_steps())
                streams = self.manager.state.streams
                streams.derive("evaluation", "the trainer", self.driver.loop.step)
            else:
                stack.enter_context((streams := RandomStreams(self.options.seed)).preserved())
            stack.enter_context(
                undone_pass(self.manager.state, optimizers) if self.is_built else undone_in_modules([model], optimizers)
            )
            stack.enter_context(self._noticed_draws(streams) if notices else nullcontext())
            stack.enter_context(unchanged_replica(self.driver.task.replica if self.is_built else None))
            yield

    def evaluate(self, function: Callable[[], Result]) -> Result:
        """Evaluate a custom loop, isolated unless ``isolate_evaluation=False``; record and return the result.

        An evaluation within another one is isolated with it, and recorded before it.
        """
        if self.is_evaluating:
            result = function()
            self._inner_results.append(result)
            return result
        inner_results = self._inner_results = list[Any]()
        self.is_evaluating = True
        try:
            with self.clock.during(EVALUATION):
                result = self._isolated(function)
        finally:
            self.is_evaluating = False
        for item in (*inner_results, result):
            self._record_result(item)
        return result

    def _isolated(self, function: Callable[[], Result]) -> Result:
        manager = self.manager
        if not self.options.isolate_evaluation:
            with manager.untapped_pass():
                return function()

        def run(model: nn.Module) -> Result:
            with self._noticed_draws(manager.state.streams):
                return function()

        with unchanged_replica(self.driver.task.replica):
            return manager.in_eval_mode("evaluation", run)

    def _record_result(self, result: Any) -> None:
        """Record the named numbers that an evaluation of a custom loop returned.

        Numbers without names, such as those of a pair of loss and accuracy, are reported, once per run.
        """
        if isinstance(result, Mapping):
            numbers = {name: as_number(value) for name, value in result.items()}
            named = {name: number for name, number in numbers.items() if number is not None}
            if named and len(named) == len(numbers):
                self.driver.record_evaluation(named)
            has_numbers = bool(named) and len(named) < len(numbers)
            problem = "values that are not numbers, so that none of its values is recorded"
        else:
            items = result if isinstance(result, (tuple, list)) else [result]
            has_numbers = any(as_number(item) is not None for item in items if not isinstance(item, bool))
            problem = "numbers without names, which are not recorded"
        if has_numbers and self.ranks.is_main and not self._has_noticed_unnamed:
            self._has_noticed_unnamed = True
            notice(f'An evaluation returned {problem}: return only named numbers, such as {{"val_loss": 0.5}}.')

    def start_facts(self) -> Mapping[str, Any]:
        """Return the start-up facts of the run; none before its start."""
        return self.run.record.facts if self.is_started else {}

    @contextmanager
    def _noticed_draws(self, streams: RandomStreams) -> Iterator[None]:
        """Report the first isolated evaluation that draws random numbers, once per run."""
        start = streams.save()
        yield
        is_main = not self.is_built or self.ranks.is_main
        if is_main and not self._has_noticed_draws and not streams.save().equals(start):
            self._has_noticed_draws = True
            notice(
                "This evaluation drew random numbers, as every pass over a DataLoader does, and loopscope isolates "
                "them: the weights will differ from those of this script without loopscope; pass "
                "isolate_evaluation=False to keep the script's own behaviour."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the states of the hooks, the sinks and the loop, as tensors and plain values."""
        return state_of(self.manager, self.place | {"plan": self.plan.state_dict()}, self.path.name)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume, at the first step, from a result of :meth:`state_dict` or its flat form for several ranks.

        All ranks call it after :meth:`build`.

        Raises:
            UsageError: after the first step, or for another state.
        """
        require(not self.is_started, "Load the state of a scope before its first step: right after attach.")
        if self.ranks.are_many or (isinstance(state, Mapping) and "rank 0" in state):
            state = state_for_rank(state, self.driver.task.model, self.ranks)
        self._stored = StoredState(state)
        self.place = dict(state["place"])
        self._folder_choice.resume(str(state["folder"]))

    @property
    def stored_epoch(self) -> int:
        """The epoch of the loaded state."""
        return 0 if self._stored is None else int(self._stored.loop["epoch"])

    @preserved_streams()
    def end(self, status: str = "completed", error: BaseException | None = None) -> None:
        """Deliver all metrics, write the summary and release the folder; further calls do nothing."""
        if self.is_closed:
            return
        self.is_closed = True
        try:
            if not self.is_started:
                self.manager.end(status)
                return
            try:
                if status == "completed":
                    self.end_training()
            except BaseException as raised:
                status, error = "failed", raised
                raise
            finally:
                self._end_run(status, error)
        finally:
            self._release()

    def _end_run(self, status: str, error: BaseException | None) -> None:
        """End the run; a record that cannot be completed is reported, and never ends the script of the training."""
        for action in (partial(self.run.end, status, error), self._show_end):
            try:
                action()
            except (HookError, HookMisuseError, StateMutationError, RankLostError):
                raise
            except Exception as failure:
                reason = str(failure) if isinstance(failure, LoopscopeError) else f"{with_lines(failure)}."
                warn(f"The run in {short_path(self.path)} has no complete record: {reason}")

    def _show_end(self) -> None:
        if self.ranks.is_main and self.run.summary:
            self._console.ended([self.run.summary])

    def _release(self) -> None:
        stop_timing(self.clock)
        _TRAINED.difference_update(separate_optimizers(self.driver.task.optimizer))
        if _OPEN.get(self.path.resolve()) is self:
            del _OPEN[self.path.resolve()]
        atexit.unregister(self._close_at_exit)
        self._contexts.close()

    def _close_at_exit(self) -> None:
        """Close a run that is still open when the program ends, with the error that has ended the program, if any."""
        if END_OF_PROCESS:
            self._close_quietly(*END_OF_PROCESS[0]())
            return
        if (error := vars(sys).get("last_value")) is not None:
            is_interactive = hasattr(sys, "ps1")  # there it is the error of any earlier input
            self._at_exit("failed" if is_interactive else status_of_script(error), None if is_interactive else error)
            return
        if not self.ranks.is_main:
            self._at_exit("failed", None)
            return
        notice(
            f"The run in {short_path(self.path)} was still open and is closed at the end of the program: call "
            "scope.close() after the loop, or use `with loopscope.attach(...) as scope`."
        )
        self._at_exit("interrupted" if self.ranks.are_many else "completed", None)  # other ranks may be gone

    def _close_quietly(self, status: str, error: BaseException | None) -> None:
        """Close the run of a script that does not know of it, which a failure must not reach."""
        try:
            self._at_exit(status, error)
        except SystemExit:  # stop_after, or a finding at the last step
            pass
        except Exception as failure:
            warn(f"The run in {short_path(self.path)} ended with an error: {with_lines(failure)}.")


def close_open_runs(
    status: str, error: BaseException | None, concerns: Callable[[AttachedLoop], bool] = lambda attached: True
) -> None:
    """Close the open runs of a watched process that an event ``concerns``."""
    for attached in [*_OPEN.values()]:
        if concerns(attached):
            attached._close_quietly(status, error)


def _forget_open_runs() -> None:
    """Leave the open runs to the process that has started them, in a forked one."""
    for attached in [*_OPEN.values()]:
        attached.is_closed = True
        atexit.unregister(attached._close_at_exit)
    _OPEN.clear()
    _TRAINED.clear()


os.register_at_fork(after_in_child=_forget_open_runs)
