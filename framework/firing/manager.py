"""The hook manager: what a loop asks of the hooks of one strategy's run."""

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from ..data import Batch, RowNumbers, first_batch, global_batches, with_copied_batches
from ..errors import RunNotice, UsageError, require
from ..hooks import (
    EPOCH_END,
    HookPoint,
    InterventionHook,
    MetricSink,
    RunInfo,
    StatePart,
    Tap,
    TapOwner,
    TapSet,
    TrainingHook,
    options_of,
    refuse_what_is_computed_anew,
    treatments,
    without_duplicates,
)
from ..isolation import Call, Isolation, Snapshot, borrowed_extras, borrowed_for_evaluation
from ..state import TrainingState
from ..training import LossProbe, Profiler, TrainingTask
from .dispatch import MetricDispatch
from .failures import HookFailures
from .fire import Firing
from .hook_set import HookSet
from .state_offload import StateOffload

Result = TypeVar("Result")
POST_BACKWARD = HookPoint.POST_BACKWARD
UNNAMED = "unnamed"
"""What experiment, strategy and folder are called where nobody has said."""


class HookManager:
    """Fires hooks for one strategy's run; one without hooks is a run like any other.

    Its parts are ``hooks`` (who is on, their state, failures and tables), ``dispatch`` (metrics and sinks),
    ``isolation`` (the gate for all foreign code) and ``profiler`` (what hooks cost).

    Args:
        hooks: in the order the user named them, which is the order of committing hooks at one point.
        loop: ``"epoch"`` or ``"step"``.
        required: names of the hooks that must run; any other is left out if it does not suit the model, or raises
            before its first report. By default all must.
        left_out: why hooks could not even be made, by name.
        on_error: ``"raise"`` ends the run at the first hook that raises, ``"skip"`` goes on without that hook.
        audit: compare every byte of the training state before and after every call.
        guardian_device: where the copies live that undo interventions; ``None``: where the state does.
        profile: time every hook, and measure its memory.
        offload_state: keep what hooks remember on the CPU between their calls.
        reference_weights: the weights of a reference solution by parameter name, placed like the model's.
    """

    _started = _ended = False

    def __init__(
        self,
        hooks: Iterable[TrainingHook],
        task: TrainingTask,
        state: TrainingState,
        *,
        loop: str = "epoch",
        required: Collection[str] | None = None,
        left_out: Mapping[str, str] = {},
        sinks: Sequence[MetricSink] = (),
        on_error: Literal["raise", "skip"] = "raise",
        audit: bool = False,
        guardian_device: torch.device | None = None,
        profile: bool = False,
        offload_state: bool = False,
        reference_weights: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        named = without_duplicates(hooks)
        refuse_what_is_computed_anew(treatments(named), task.optimizer)
        self.task = task
        self.state = state
        self.counts_epochs = loop == "epoch"
        """Whether the loop counts epochs; the step loop counts steps."""
        self.pre_epoch_snapshot = Snapshot(guardian_device)
        self.isolation = Isolation(state, audit=audit, guardian_device=guardian_device)
        self.profiler = Profiler(enabled=profile)
        self._taps = TapSet(task.model, audit=audit, compiled=task.compiled)
        failures = HookFailures(on_error, {hook.name for hook in named} if required is None else set(required))
        for sentence in left_out.values():
            warnings.warn(f"Left out: {sentence}", RunNotice, stacklevel=2)
        failures.left_out.update(left_out)
        self.hooks = HookSet(
            named,
            state,
            self.isolation,
            loop=loop,
            taps=self._taps,
            failures=failures,
            profiler=self.profiler,
            offload=StateOffload() if offload_state else None,
            ranks=task.ranks,
        )
        self._numbers = RowNumbers(global_batches(task.loader))
        self.dispatch = MetricDispatch(self.isolation, sinks, self.hooks.call, self._rows_of)
        failures.points_of_reports = self.dispatch.points_of
        self.deaf = self._taps.deaf
        """Makes the context of a step's further evaluations, where the optimizer makes several: no tap hears them."""
        self.arrange_taps = self._taps.arrange
        self._firing = Firing(self.hooks, task, state, self.dispatch, guardian_device, reference_weights)
        self._reference_weights = reference_weights

    def __del__(self) -> None:
        if self._started and not self._ended and self.dispatch.waits:
            sentence = "A hook manager was not ended: metrics of its last steps are lost, and files may be incomplete."
            warnings.warn(f"{sentence} Call manager.end('completed') after the loop.", RunNotice, stacklevel=2)

    def refuse_other_loop(self, loop: str) -> None:
        """Raise :class:`UsageError` in a loop that the hooks were not made for, or after the end."""
        require(not self._ended, "This hook manager has ended; make a new one for another run.")
        right = loop == self.hooks.loop or not any(True for _ in self.hooks)
        made = f"was made for the {self.hooks.loop} loop; make it with HookManager(..., loop={loop!r})"
        require(right, f"The hook manager of {loop}_loop {made}.")

    def run_info(self, experiment: str, strategy: str, output_dir: Path) -> RunInfo:
        """Return what hooks and sinks are to be told of a run with this manager."""
        return RunInfo(
            experiment=experiment,
            strategy=strategy,
            output_dir=output_dir,
            task=self.task,
            loop=self.hooks.loop,
            seed=self.state.streams.seed,
            optimizer_class=type(self.task.optimizer),
            reference_weights=self._reference_weights,
            metric_infos=self.hooks.metric_infos(),
            treatments=treatments(self.hooks),
        )

    def start(self, run: RunInfo) -> None:
        """Tell every hook and sink that the strategy starts, and attach the taps."""
        self.start_hooks(run)
        self.dispatch.start(run)

    def start_hooks(self, run: RunInfo, first: Batch | None = None) -> None:
        """Tell every hook that the strategy starts, and attach the taps; after an error, end those that did start.

        ``first`` is the first batch, where the loader is not to be asked for it. Raises :class:`UsageError` where an
        intervention could change what cannot be rolled back.
        """
        if self._started:
            raise UsageError("This hook manager has started already; make a new one for another run.")
        self._started = True
        if any(True for _ in self.hooks) and (sentence := self.state.out_of_reach()):
            if acting := [hook.name for hook in self.hooks if isinstance(hook, InterventionHook) and hook.mutates]:
                self.hooks.without(acting, "start", UsageError(sentence))
            warnings.warn(sentence, RunNotice, stacklevel=2)
        first_pass = None if "needs_loss" in run.lacks else partial(self._first_pass, first)
        if self.task.ranks.are_many:
            self.task.ranks.check_equal(self._settings())
        counted = {name: dict(kinds) for name, kinds in self.profiler.samples.items()}
        self.hooks.start(replace(run, first_pass=first_pass))
        self.profiler.samples.update(counted)  # of a resumed run, which has counted the passes of its start before
        self._attach_taps()
        self.hooks.settle()
        if self._taps.apart and (missing := run.lacks.get("needs_loss")):
            error = UsageError(f"A hook taps a compiled model, which takes a pass of its own; {missing}.")
            self.hooks.without(self._taps.apart, "start", error)

    def goes_on(self) -> None:
        """Do without what the run lacks that was interrupted; called once its state is back and the hooks started."""
        self.hooks.goes_on()
        if self.is_within_an_epoch() and self.state.loop.pre_epoch is None:
            self.hooks.listeners.postpone("needs_pre_epoch_state", EPOCH_END, self.state.loop.epoch + 1)

    def is_within_an_epoch(self) -> bool:
        """Return whether the epoch loop has taken steps of an epoch that is not over."""
        return self.counts_epochs and self.state.loop.step > self.state.loop.epoch * len(self.task.loader)

    def fire(self, point: HookPoint) -> None:
        """Call the hooks that are due at ``point``; a manager that was not started starts itself at the first."""
        if not self._started:
            self._start_itself()
        if point is POST_BACKWARD and self._taps.need_a_pass:
            self._hear_taps()
        if self.hooks.listeners.at[point]:
            self._firing.call_due(point)

    def settle(self) -> None:
        """Raise what hooks raised during the step, on this rank or another; called where nothing is half done."""
        hooks = self.hooks
        if hooks.were_called:
            hooks.settle()
        if hooks.failures.pending is not None:
            hooks.failures.raise_pending()

    def isolated(self, name: str, function: Callable[[], Result]) -> Result:
        """Run something that is not a hook, such as evaluation, so that it cannot change the run."""
        with self.isolation.visit():
            return self.hooks.isolated(name, "the loop", function)

    def in_eval_mode(self, name: str, look: Callable[[nn.Module], Result]) -> Result:
        """Look at the model in eval mode, isolated from the run."""

        def looking() -> Result:
            with borrowed_for_evaluation(self.task.model):
                return look(self.task.model)

        return self.isolated(name, looking)

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Let the body look at the run between two steps, through :attr:`isolation`."""
        with self.isolation.visit(), self._taps.silenced():
            yield

    def end(self, status: str) -> None:
        """Deliver what is still buffered, tell every hook and sink that the strategy is over, remove the taps.

        Called again it does nothing.
        """
        if self._ended:
            return
        self._ended = True
        self._taps.remove()
        # The stack closes the sinks last, after the hooks, and also if a hook or the flush raises.
        with self.isolation.visit(), ExitStack() as whatever_happens:
            whatever_happens.callback(self.dispatch.end, status)
            whatever_happens.callback(self.hooks.end, status)
            if self._started:  # not where a hook of a resumed run refused its state, while the sinks are closed
                self.dispatch.flush_steps(self.state.loop.epoch)
        if status == "completed":  # else the run ends for another reason
            self.settle()

    def _settings(self) -> dict[str, Any]:
        """Return what must be the same on all ranks, or some would wait for others."""
        task, streams = self.task, self.state.streams
        names = ("length", "eval_every", "snapshot_every", "log_every", "accumulation_steps")
        return {
            "The list of hooks": ", ".join(hook.name for hook in self.hooks),
            **{f"What hook {hook.name!r} was made with": options_of(hook) for hook in self.hooks},
            "The loop": self.hooks.loop,
            "The seed of the hooks' random streams": streams.seed,
            "The number of batches": len(task.loader),
            **{f"The task's {name}": getattr(task, name) for name in names},
        }

    def _start_itself(self) -> None:
        """Start with what is known here of the run, which has neither names nor a folder.

        Raises :class:`UsageError` for a sink that cannot do without a folder.
        """
        run = self.run_info(UNNAMED, UNNAMED, Path(UNNAMED))
        try:
            self.start_hooks(run)
            self.dispatch.start(run, fatal=(UsageError, OSError))
        except BaseException as error:
            self.end("failed")
            if not isinstance(error, OSError):
                raise
            raise UsageError(
                f"A sink needs the folder of the run ({type(error).__name__}: {error}), and this hook manager was told "
                "of none: call manager.start(RunInfo(...)) before the loop."
            ) from error

    def _rows_of(self, step: int) -> torch.Tensor | None:
        with self.state.streams.isolated():
            return self._numbers.of_step(step)

    def _attach_taps(self) -> None:
        """Ask every hook that has started for its taps, then attach those of the hooks that are still on."""
        hooks, model = self.hooks, self.task.model

        def declared(hook: TrainingHook) -> list[Tap]:
            taps = list(hook.taps(model)) if hooks.listeners.of(hook) else []  # none if left out of this loop
            if odd := [tap for tap in taps if not isinstance(tap, Tap)]:
                raise TypeError(f"returned {odd[0]!r}; taps are GradientTap(target, kind, function)")
            return taps

        with self.isolation.visit():
            taps = {hook.name: hooks.call(hook, "taps", 0, partial(declared, hook)) for hook in list(hooks)}
        # Outside of the visit, which would take a hook on a module for a change of the training state.
        while not self._are_attached(taps):
            pass

    def _are_attached(self, taps: Mapping[str, Sequence[Tap] | None]) -> bool:
        """Attach the taps of all hooks; if one cannot be, leave its hook out, or raise the error if it was named.

        Returns whether all are attached; otherwise none is.
        """
        for hook in self.hooks:
            try:
                self._taps.attach(self._owner(hook), taps[hook.name] or ())
            except Exception as error:
                self.hooks.without([hook.name], "taps", error)
                return False
        return True

    def _owner(self, hook: TrainingHook) -> TapOwner:
        loop = self.state.loop

        def is_due() -> bool:
            if not hook.step_schedule.is_due(loop.step):
                return False
            return any(item.in_window(loop.epoch) for item in self.hooks.listeners.of(hook))

        commits = hook.commits if isinstance(hook, InterventionHook) else ()
        call = partial(self.hooks.call_tap, hook)
        return TapOwner(hook.name, is_due, call, may_replace=StatePart.GRADIENTS in commits)

    def _first_pass(self, batch: Batch | None) -> torch.Tensor:
        if batch is None:
            with borrowed_extras(self.state):  # to which an experiment's own loader may write
                batch = first_batch(with_copied_batches(self.task.loader))
        return LossProbe(self.task, self.state, self.profiler).loss_with_graph(batch)

    def _hear_taps(self) -> None:
        """Run the step's batch once more, on streams of its own, for the taps that a compiled pass cannot serve."""
        run_once = partial(LossProbe(self.task, self.state, self.profiler).run_once, self.state.loop.batch)
        call = Call("taps", "POST_BACKWARD", self.state.loop.step, "The")
        with self.isolation.visit():
            try:
                self.isolation.observe(call, partial(self._taps.hear, run_once))
            except Exception as error:
                self.hooks.without(self._taps.apart, "the pass for its taps", error)
