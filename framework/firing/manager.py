"""The hook manager: decides which hooks are due, calls them through the isolation and forwards their metrics."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from ..errors import LoopscopeError, StateMutationError, UnsuitableError, UsageError
from ..hooks import (
    STEP_POINTS,
    CommitRecord,
    HookPoint,
    InterventionHook,
    MetricInfo,
    Metrics,
    MetricSink,
    ModelDataContext,
    RunDataContext,
    RunInfo,
    StatePart,
    Tap,
    TapOwner,
    TapSet,
    TrainingHook,
    without_duplicates,
)
from ..isolation import Call, Isolation, Snapshot, borrowed_buffers, borrowed_gradients, borrowed_modes
from ..state import StreamState, TrainingState
from ..training import LossProbe, Profiler, TrainingTask
from .dispatch import MetricDispatch, Positions
from .failures import HookFailures
from .listeners import Listener, Listeners
from .offload import StateOffload
from .views import Views

Result = TypeVar("Result")


class HookManager:
    """Fires hooks for one strategy's run; one without hooks is a run like any other.

    Args:
        hooks: in the order the user named them, which is the order of committing hooks at one point.
        loop: ``"epoch"`` or ``"step"``.
        required: names of the hooks that must run; any other is left out if it does not suit the model. By default
            all must.
        offload_state: keep what hooks remember on the CPU between their calls.
        reference_weights: the weights of a reference solution by parameter name, placed like the model's.
        on_error: ``"raise"`` ends the run at the first hook that raises, ``"skip"`` goes on without that hook.
    """

    def __init__(
        self,
        hooks: Iterable[TrainingHook],
        task: TrainingTask,
        state: TrainingState,
        *,
        loop: str = "epoch",
        required: Collection[str] | None = None,
        sinks: Sequence[MetricSink] = (),
        on_error: Literal["raise", "skip"] = "raise",
        audit: bool = False,
        guardian_device: torch.device | None = None,
        profile: bool = False,
        offload_state: bool = False,
        reference_weights: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.hooks = without_duplicates(hooks)
        self.task = task
        self.state = state
        self.isolation = Isolation(state, audit=audit, guardian_device=guardian_device)
        names = {hook.name for hook in self.hooks}
        self.failures = HookFailures(on_error, names if required is None else set(required))
        self.tables: dict[str, Mapping[str, Mapping[str, float]]] = {}
        self._abandoned = self._ended = False
        self.profiler = Profiler(enabled=profile)
        self._offload = StateOffload() if offload_state else None
        self._loop = loop
        self.counts_epochs = loop == "epoch"
        """Whether the loop counts epochs; the step loop counts steps."""
        self._guardian_device = guardian_device
        self.pre_epoch_snapshot = Snapshot(guardian_device)
        self._taps = TapSet(task.model, audit=audit)
        self.dispatch = MetricDispatch(self.isolation, sinks, self._guarded)
        self._views = Views(task, state, self.profiler, self.get_last_metrics, reference_weights)
        self._listeners = Listeners(self.hooks, loop)
        self._needs_target = self.needs("needs_target_grad")

    # Life cycle

    def start(self, run: RunInfo) -> None:
        """Tell every hook and sink that the strategy starts, and attach the taps."""
        self.start_hooks(run)
        self.start_sinks(run)

    def start_hooks(self, run: RunInfo) -> None:
        """Tell every hook that the strategy starts, and attach the taps; after an error, end those that did start."""
        started: list[TrainingHook] = []
        try:
            with self.isolation.visit():
                for hook in list(self.hooks):
                    self._guarded(hook, "start", 0, partial(_start, hook, run))
                    if hook in self.hooks:
                        started.append(hook)
                taps = {
                    hook.name: self._guarded(hook, "taps", 0, partial(self._declared_taps, hook)) for hook in self.hooks
                }
            self._listeners = Listeners(self.hooks, self._loop)  # a hook may fit its schedule to the run it starts
            for hook in self.hooks:
                self._taps.attach(self._tap_owner(hook), taps[hook.name] or ())
        except LoopscopeError:
            self.hooks = started
            raise

    def start_sinks(self, run: RunInfo, positions: Positions | None = None) -> None:
        """Tell every sink that the strategy starts, or goes on from the ``positions`` of a checkpoint."""
        with self.isolation.visit():
            self.dispatch.start(run, positions)

    def reset(self) -> None:
        """Let every hook forget the strategy that it served before."""
        with self.isolation.visit():
            for hook in list(self.hooks):
                self._guarded(hook, "reset", 0, hook.reset)

    def abandon(self) -> None:
        """Let no hook run any more: the training state is damaged, and what they would find there is not the run."""
        self._abandoned = True
        self.isolation.rebase()  # or the sinks, which are still to be closed, would be blamed for it

    def end(self, status: str) -> None:
        """Deliver what is still buffered, tell every hook and sink that the strategy is over, remove the taps.

        Called again it does nothing.
        """
        if self._ended:
            return
        self._ended = True
        self._taps.remove()
        with self.isolation.visit(), ExitStack() as whatever_happens:
            whatever_happens.callback(self.dispatch.end, status)
            for hook in reversed(self.hooks):
                whatever_happens.callback(self._end_hook, hook, status)
            self.dispatch.flush_steps(self.state.loop.epoch)
        if status == "completed":  # else the run ends for another reason
            self.failures.raise_pending()

    def _end_hook(self, hook: TrainingHook, status: str) -> None:
        self._guarded(hook, "end", self.state.loop.step, partial(hook.end, status))
        if table := self._guarded(hook, "table", self.state.loop.step, hook.table):
            self.tables[hook.name] = table

    def metric_infos(self) -> dict[str, MetricInfo]:
        """Return every metric the hooks describe, by full name."""
        return {f"{hook.name}/{info.name}": info for hook in self.hooks for info in hook.describe_metrics()}

    def state_dict(self) -> dict[str, Any]:
        """Return every hook's state, by the hook's name; that of a hook which has raised is left out."""
        states: dict[str, Any] = {}
        for hook in list(self.hooks):
            if all(error["hook"] != hook.name for error in self.failures.errors):
                try:
                    states[hook.name] = hook.state_dict()
                except Exception as error:
                    self._failed(hook, "state_dict", self.state.loop.step, error)
        return states

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give every hook its state back; hooks that were not there when it was saved keep their fresh one."""
        for hook in self.hooks:
            if hook.name in state:
                try:
                    hook.load_state_dict(state[hook.name])
                except Exception as error:
                    raise UsageError(
                        f"Hook {hook.name!r} cannot take its state back ({type(error).__name__}: {error}): go on with "
                        "the options that it had, or without it."
                    ) from error

    def goes_on(self) -> None:
        """Do without the hooks that a run had gone on without before it was interrupted; called once they started."""
        gone = self.failures.take_over()
        for hook in [hook for hook in self.hooks if hook.name in gone]:
            self._drop(hook)

    # What the loop asks

    def fire(self, point: HookPoint) -> None:
        """Call the hooks that are due at ``point``."""
        if point is HookPoint.POST_BACKWARD and self._taps.need_a_pass:
            self._pass_for_taps()
        listeners = self._listeners.at[point]
        if listeners:
            loop = self.state.loop
            due = [listener for listener in listeners if listener.is_due(loop.epoch, loop.step)]
            if due:
                self._fire(point, due)

    def snapshot_taken(self) -> None:
        """Tell the sinks that SNAPSHOT has fired, whether or not a hook listened there."""
        if self.dispatch.follows_snapshots:
            with self.isolation.visit():
                self.dispatch.snapshot(self.state.loop.epoch, self.state.loop.step)

    def wants(
        self, need: str, *, points: Iterable[HookPoint], epoch: int | None = None, step: int | None = None
    ) -> bool:
        """Tell whether a hook with the flag ``need`` fires at one of ``points`` in this epoch (and at ``step``)."""
        return self._listeners.wants(need, points, self.state.loop.epoch if epoch is None else epoch, step)

    def needs(self, need: str) -> bool:
        """Tell whether any active hook has the flag ``need``."""
        return self._listeners.need(need)

    def flush_steps(self) -> None:
        """Move the buffered step metrics to the host and deliver them as series."""
        if self.dispatch.has_steps:
            with self.isolation.visit():
                self.dispatch.flush_steps(self.state.loop.epoch)

    def isolated(self, name: str, function: Callable[[], Result]) -> Result:
        """Run something that is not a hook, such as evaluation, so that it cannot change the run."""
        loop = self.state.loop
        with self.isolation.visit(), self._taps.silenced():
            return self.isolation.observe(Call(name, "the loop", loop.step, "The"), function)

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Let the body look at the run between two steps, through :attr:`isolation`."""
        with self.isolation.visit(), self._taps.silenced():
            yield

    @property
    def run_streams(self) -> StreamState:
        """The state of the run's random generators, also while something runs on derived streams."""
        return self.isolation.run_streams

    def get_last_metrics(self, point: HookPoint | None = None) -> Mapping[str, Any]:
        """Return the newest metrics by full name, of one point or of all."""
        return self.dispatch.last(point)

    # One fire

    def _fire(self, point: HookPoint, due: list[Listener]) -> None:
        isolation = self.isolation
        try:
            isolation.begin()
            context = self._views.at(point, self._target_grad(point))
            for listener in due:
                self._call(listener, context)
            isolation.settle()
            if point not in STEP_POINTS:
                self.dispatch.deliver(point, self.state.loop.epoch, self.state.loop.step)
                isolation.settle()
        finally:
            isolation.end()

    def _call(self, listener: Listener, context: RunDataContext) -> None:
        hook, loop = listener.hook, self.state.loop
        if listener.intervention is None:
            self._guarded(hook, listener.point.name, loop.step, lambda: self._keep(listener, hook.compute(context)))
            return
        intervention = listener.intervention
        record = CommitRecord(hook.name, frozenset(intervention.commits))
        model_context = ModelDataContext(
            self.task,
            self.state,
            record,
            self.isolation.parameters,
            mutates=intervention.mutates,
            device=self._guardian_device,
            stream=(hook.name, listener.point.name, loop.step),
            loop=self._loop,
            profiler=self.profiler,
        )
        done = self._guarded(
            hook,
            listener.point.name,
            loop.step,
            lambda: self._keep(listener, intervention.intervene(context, model_context)),
            intervention=intervention,
        )
        if done and record.changes:
            record.apply()
            self.isolation.committed()

    def _keep(self, listener: Listener, metrics: Metrics) -> bool:
        """Store a call's metrics; copying their tensors here, before any rollback, is what makes them last."""
        self.dispatch.add(listener.hook, listener.point, self.state.loop.step, metrics)
        return True

    def _guarded(
        self,
        hook: TrainingHook,
        where: str,
        step: int,
        function: Callable[[], Result],
        *,
        intervention: InterventionHook | None = None,
    ) -> Result | None:
        """Call hook code through the isolation and treat what it raises as the user asked for."""
        if self._abandoned:
            return None
        call = Call(hook.name, where, step)
        self.profiler.caller = hook.name
        try:
            if self._offload is not None:
                function = partial(self._offload.call, hook, function)
            if self.profiler.enabled:
                return self._profiled_call(hook, call, function, intervention)
            return self._isolated_call(call, function, intervention)
        except StateMutationError:
            self.abandon()
            raise
        except Exception as error:
            self._failed(hook, where, step, error)
            return None

    def _profiled_call(
        self, hook: TrainingHook, call: Call, function: Callable[[], Result], intervention: InterventionHook | None
    ) -> Result:
        if not self.profiler.measures_memory(hook.name):
            with self.profiler.section(hook.name):
                return self._isolated_call(call, function, intervention)
        with self.profiler.call(hook.name):
            result = self._isolated_call(call, function, intervention)
        self.profiler.remembers(hook.name, hook.state_dict())
        return result

    def _isolated_call(
        self, call: Call, function: Callable[[], Result], intervention: InterventionHook | None
    ) -> Result:
        with self._taps.silenced():
            if intervention is None:
                return self.isolation.observe(call, function)
            return self.isolation.intervene(call, function, mutates=intervention.mutates)

    def _failed(self, hook: TrainingHook, where: str, step: int, error: Exception) -> None:
        self.failures.treat(hook, where, step, error)
        if self.failures.pending is None:
            self._drop(hook)
        else:  # the run ends after the step, and the hook is told of that
            self._listeners.drop(hook)

    def _drop(self, hook: TrainingHook) -> None:
        self._listeners.drop(hook)
        self.hooks = [other for other in self.hooks if other is not hook]

    # Taps

    def _declared_taps(self, hook: TrainingHook) -> list[Tap]:
        """Return the taps of a hook, none if it is left out of this loop."""
        return list(hook.taps(self.task.model)) if self._listeners.of(hook) else []

    def _tap_owner(self, hook: TrainingHook) -> TapOwner:
        loop = self.state.loop

        def is_due() -> bool:
            listeners = self._listeners.of(hook)
            return hook.step_schedule.is_due(loop.step) and any(item.in_window(loop.epoch) for item in listeners)

        def call(target: str, function: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
            where = f"tap on {target!r}"
            try:
                with self.state.streams.isolated(), self.profiler.section(hook.name):
                    self.state.streams.derive(hook.name, where, loop.step)
                    return function() if self._offload is None else self._offload.call(hook, function)
            except Exception as error:
                self._failed(hook, where, loop.step, error)
                return None

        commits = hook.commits if isinstance(hook, InterventionHook) else ()
        return TapOwner(hook.name, is_due, call, may_replace=StatePart.GRADIENTS in commits)

    def _pass_for_taps(self) -> None:
        """Run the step's batch once more, on streams of its own, for the taps that a compiled pass cannot serve."""
        run_once = partial(LossProbe(self.task, self.state, self.profiler).run_once, self.state.loop.batch)
        with self.isolation.visit():
            self.isolation.observe(
                Call("taps", "POST_BACKWARD", self.state.loop.step, "The"), partial(self._taps.hear, run_once)
            )

    def _target_grad(self, point: HookPoint) -> dict[str, torch.Tensor] | None:
        """Ask the experiment for its target gradient, if a hook wants it now; isolated, and leaving nothing behind."""
        if not (self._needs_target and self.wants("needs_target_grad", points=(point,), step=self.state.loop.step)):
            return None
        model = self.task.model

        def compute() -> dict[str, torch.Tensor] | None:
            with (
                borrowed_buffers(model),
                borrowed_modes(model, train=None),
                borrowed_gradients(model),
                torch.enable_grad(),
            ):
                return self.task.target_grad(model)

        with self._taps.silenced():
            return self.isolation.observe(Call("target_grad", point.name, self.state.loop.step, "The"), compute)


def _start(hook: TrainingHook, run: RunInfo) -> None:
    if hook.needs_reference_weights and run.reference_weights is None:
        raise UnsuitableError(
            f"Hook {hook.name!r} measures against a reference solution, and there is none: name a run or a file of "
            "final weights with --reference PATH."
        )
    hook.start(run)
