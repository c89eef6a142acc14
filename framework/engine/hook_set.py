"""The active hooks of a run: their schedules, calls, failures and life cycle."""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, partial
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..errors import (
    LoopscopeError,
    NoLossError,
    RankError,
    RankLostError,
    StateMutationError,
    UnsuitableError,
    UsageError,
    listed,
    require,
    shortened,
    with_lines,
)
from ..hooks import STEP_POINTS, HookPoint, InterventionHook, MetricInfo, RunInfo, StatePart, TapOwner, TrainingHook
from ..isolation import Call, Isolation, is_shipped
from ..state import TrainingState, visited
from ..taps import TapSet, attention_not_read
from ..training import HOOKS, Profiler, Ranks
from . import hook_validation
from .error_advice import advice_on_mutation
from .failures import LOAD, Failure, HookFailures
from .listeners import Listeners
from .log import log
from .state_offload import StateOffload

Result = TypeVar("Result")
PLAIN_VALUES = (str, bytes, bool, int, float, complex, type(None))
"""Types of values that cannot change: a batch of these alone is restored with its containers."""


class CallTimer(Protocol):
    """Measures the time of the calls of hooks."""

    def time_call(self, hook: str, where: str, call: Callable[[], Result]) -> Result:
        """Make a call at a hook point, or of another method."""

    def time_pass(self, hook: str, step: int, call: Callable[[], Result]) -> Result:
        """Make a call during a pass of the training."""


@dataclass(eq=False, repr=False)
class HookSet:
    """The active hooks, in the order in which the user named them; every call of hook code starts here.

    The run's ``taps`` are disabled during these calls.
    """

    hooks: list[TrainingHook]
    state: TrainingState
    isolation: Isolation
    _: KW_ONLY
    loop_type: str
    taps: TapSet
    failures: HookFailures
    profiler: Profiler
    offload: StateOffload | None
    ranks: Ranks
    tables: dict[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    _unannounced: list[Failure] = field(default_factory=list)
    """Failures on this rank since the last :meth:`synchronise_failures`."""
    has_unsynchronised_calls: bool = False
    """Whether other ranks may not know of failures of calls since the last :meth:`synchronise_failures`."""
    has_current_norm: bool = True
    """Whether the series of the steps contains the newest one; without a budget it contains all."""
    timer: CallTimer | None = None
    """Times the calls of hooks, under a budget."""
    _disabled = _has_disabled_taps = _checked_first_batch = False

    def __post_init__(self) -> None:
        """List the hooks by hook point."""
        self.listeners = Listeners(self.hooks, self.loop_type)

    def __iter__(self) -> Iterator[TrainingHook]:
        return iter(self.hooks)

    # Calls

    def call(
        self,
        hook: TrainingHook,
        where: str,
        step: int,
        function: Callable[[], Result],
        *,
        intervention: InterventionHook | None = None,
    ) -> Result | None:
        """Call a hook's code through the isolation and return its result; an ``intervention`` is rolled back.

        Returns ``None`` if the call raised and the run continues for now, and always after :meth:`disable_all`.
        """
        self.profiler.caller = hook.name
        if self.offload is not None:
            function = partial(self.offload.call, hook, function)
        # Without the function of Python that creates a named tuple.
        call: Call = tuple.__new__(Call, (hook.name, where, step, *_traits(type(hook))))
        is_observer = intervention is None and (self.taps.is_idle or self._has_disabled_taps)
        if is_observer and self.timer is None and not self.profiler.enabled:  # nearly always, with few functions
            if self._disabled:
                return None
            self.has_unsynchronised_calls = True
            try:
                return self.isolation.observe(call, function)
            except BaseException as error:
                self._handle_error(hook, call, error)
                return None
        if is_observer:
            run_hook = partial(self.isolation.observe, call, function)
        else:
            run_hook = partial(self.run_in_gate, call, function, intervention)
        if self.profiler.enabled:
            state_of = partial(self.run_in_gate, Call(hook.name, "state_dict", step), hook.state_dict)
            run_hook = partial(self.profiler.call, hook.name, run_hook, state_of)
        safe_call = partial(self._call_safely, hook, call, run_hook, collective=intervention is not None)
        return safe_call() if self.timer is None else self.timer.time_call(hook.name, where, safe_call)

    def _call_safely(
        self, hook: TrainingHook, call: Call, run_hook: Callable[[], Result], *, collective: bool = False
    ) -> Result | None:
        """Return the result of an isolated call, or handle its exception (``SystemExit`` too) as a failure of the hook.

        A ``collective`` call is made by all ranks and succeeds only if it succeeds on all of them. Failures of other
        calls reach the other ranks in :meth:`synchronise_failures`.
        """
        if self._disabled:
            return None
        self.has_unsynchronised_calls = self.has_unsynchronised_calls or not collective
        try:
            result = run_hook()
            if collective:
                self.ranks.join()
        except BaseException as error:
            self._handle_error(hook, call, error, collective=collective)
            return None
        return result

    def _handle_error(self, hook: TrainingHook, call: Call, error: BaseException, *, collective: bool = False) -> None:
        """Handle an error of a call, or raise the one with which the run ends."""
        if isinstance(error, StateMutationError):
            if str(error).startswith(f"Hook {hook.name!r} at {call.where} "):  # otherwise earlier calls are named
                error.args = (" ".join(filter(None, [str(error), advice_on_mutation(hook, call.where, error)])),)
            self.handle_mutation(error, call, collective=collective)
        elif isinstance(error, (KeyboardInterrupt, RankLostError)):
            raise error
        elif isinstance(error, RankError):
            self._drop_after(hook, partial(self.failures.mirror, error))
        # Without a loss on this rank alone, the others may have one, and wait for it. SystemExit is a failure as well,
        # since it would end the run as if it had completed.
        elif self.ranks.are_many or not isinstance(error, NoLossError):
            self._handle_failure(hook, call, error, collective=collective)

    def call_each(self, call_hooks: Callable[[], None]) -> None:
        """Call a function that makes several calls, with the taps disabled once for all of them."""
        with self.taps.disabled():
            self._has_disabled_taps = True
            try:
                call_hooks()
            finally:
                self._has_disabled_taps = False

    def handle_mutation(self, error: StateMutationError, call: Call, *, collective: bool = False) -> None:
        """End the run now, or after the step if other ranks may wait in a collective operation."""
        self._announce(Failure(*call[:3], str(error)), now=collective)
        if collective or not self.ranks.are_many:
            self.disable_all()
            raise error
        self.failures.pending = error
        self.isolation.retake_baseline()

    def _query(self, hook: TrainingHook, where: str, function: Callable[[], Result]) -> Result | None:
        """Query a hook's metadata or state, isolated but neither profiled nor offloaded."""
        with self.isolation.visit():
            call = call_of(hook, where, self.state.loop.step)
            return self._call_safely(hook, call, partial(self.run_in_gate, call, function))

    def tap_owner(self, hook: TrainingHook) -> TapOwner:
        """Return what the taps of a hook need to know of it."""
        loop = self.state.loop

        def is_due() -> bool:
            return self.listeners.is_scheduled(hook, loop.epoch, loop.step)

        commits = hook.commits if isinstance(hook, InterventionHook) else ()
        return TapOwner(hook.name, is_due, partial(self.call_tap, hook), may_replace=StatePart.GRADIENTS in commits)

    def call_tap(self, hook: TrainingHook, target: str, function: Callable[[], Result]) -> Result | None:
        """Call the function of a tap during a pass of the run."""
        return self._call_in_pass(hook, f"tap on {target!r}", function)

    def call_before_backward(self, hook: TrainingHook, function: Callable[[], None]) -> None:
        """Call a hook between a forward and a backward pass of the run, without gradient tracking."""
        with torch.no_grad(), self.taps.disabled():
            self._call_in_pass(hook, "before_backward", function)

    def _call_in_pass(self, hook: TrainingHook, where: str, function: Callable[[], Result]) -> Result | None:
        """Call the code of a hook during a pass of the run: checked for mutations, but never rolled back."""
        call = call_of(hook, where, self.state.loop.step)
        if self.offload is not None:
            function = partial(self.offload.call, hook, function)

        def run_in_pass() -> Result:
            with self.profiler.clock.during(HOOKS), self.profiler.section(hook.name), attention_not_read():
                return self.isolation.observe_in_pass(call, function)

        safe_call = partial(self._call_safely, hook, call, run_in_pass)
        return safe_call() if self.timer is None else self.timer.time_pass(hook.name, call.step, safe_call)

    @property
    def rolled_back_hook(self) -> str:
        """The name of a hook that is rolled back within a step, preferably a required one, or an empty text."""
        listeners = [item for point in STEP_POINTS for item in self.listeners.at[point]]
        mutating = [item.hook.name for item in listeners if item.intervention is not None and item.intervention.mutates]
        required = [name for name in mutating if name in self.failures.required]
        return next(iter([*required, *mutating]), "")

    def check_first_batch(self, batch: object) -> None:
        """Leave out the hooks whose changes are rolled back within a step if the first ``batch`` is out of reach.

        A batch can be restored if it contains a tensor, or, such as the prompts of a language model, only plain values.
        An empty one, of a step whose pass was not seen, gives hooks nothing to change.
        Raises :class:`UsageError` if one of them is required.
        """
        if self._checked_first_batch or (isinstance(batch, tuple) and not batch):
            return
        self._checked_first_batch = True
        values = [(value, has_contents) for _, value, has_contents in visited("", batch)]
        if any(isinstance(value, (Tensor, np.ndarray)) for value, _ in values):
            return
        if all(has_contents or isinstance(value, PLAIN_VALUES) for value, has_contents in values):
            return
        while hook := self.rolled_back_hook:
            error = UsageError(
                f"Hook {hook!r} changes the state within a step, and its changes are rolled back, but the batch "
                f"({type(batch).__name__}) contains no tensor that could be restored; use batches of tensors, arrays, "
                "or containers or plain objects of them, or remove the hook."
            )
            self.leave_out([hook], "start", error)

    def disable_all(self) -> None:
        """Call no hook from now on, since the training state is damaged and metrics of it would be wrong."""
        self._disabled = True
        self.isolation.retake_baseline()  # otherwise the sinks, which are closed later, would be blamed

    def run_in_gate(
        self, call: Call, function: Callable[[], Result], intervention: InterventionHook | None = None
    ) -> Result:
        """Run code in the gate, within a visit; that of an ``intervention`` is rolled back. Its errors are raised."""
        with self.taps.disabled():
            if intervention is None:
                return self.isolation.observe(call, function)
            return self.isolation.intervene(call, function, mutates=intervention.mutates)

    def _handle_failure(self, hook: TrainingHook, call: Call, error: BaseException, *, collective: bool) -> None:
        try:
            failure = self._drop_after(hook, partial(self.failures.handle, hook, call.where, call.step, error))
        except BaseException as final:
            outcome: Literal["refuses", "ends"] = "refuses" if isinstance(final, UsageError) else "ends"
            self._announce(Failure(*call[:3], str(final), outcome), now=True)
            raise
        self._announce(failure, now=collective)
        level = logging.WARNING if hook.name in self.failures.left_out else logging.ERROR
        log(self.state.streams, level, "%s", failure)

    def _announce(self, failure: Failure, *, now: bool) -> None:
        """Send a failure to the other ranks, ``now`` or in :meth:`synchronise_failures`."""
        if now:
            self.ranks.exchange_failures([failure])
        else:
            self._unannounced.append(failure)

    def synchronise_failures(self) -> None:
        """Synchronise hook failures across ranks, unless they have been announced already."""
        has_calls, self.has_unsynchronised_calls = self.has_unsynchronised_calls, False
        while has_calls and (rank_failures := self.ranks.exchange_failures(self._unannounced or None)) is not None:
            self._unannounced = []
            failures = [(rank, failure) for rank, sent in rank_failures for failure in sent]
            if run_ends := any(failure.outcome in ("ends", "refuses") for _, failure in failures):
                self.failures.raise_pending()  # errors of this rank take precedence
            for rank, failure in failures:
                if not self.ranks.is_this_process(rank):
                    mirror = partial(self.failures.mirror, RankError(rank, failure))
                    for hook in [hook for hook in self.hooks if hook.name == failure.hook]:
                        self._drop_after(hook, mirror)
            if run_ends:
                return

    def _drop_after(self, hook: TrainingHook, handle: Callable[[], Result]) -> Result:
        """Handle a failure, and drop the hook if the run continues; ``handle`` raises if it does not."""
        outcome = handle()
        if self.failures.pending is None:
            self._drop(hook)
        else:  # the run ends after the step, and the hook's end() is still called
            self.listeners.drop(hook)
        return outcome

    def leave_out_needing(self, need: str, error: Exception) -> None:
        """Leave out the hooks with the flag ``need``, since the loop failed to compute it.

        Raises the ``error`` if one of them is required.
        """
        self.leave_out([hook.name for hook in self.hooks if getattr(hook, need)], need, error)

    def leave_out(self, names: Collection[str], where: str, error: Exception) -> None:
        """Leave out the hooks with these ``names``, since ``where`` failed for them.

        Raises the ``error`` if one of them is required.
        """
        hooks = [hook for hook in self.hooks if hook.name in names]
        is_fatal = isinstance(error, (StateMutationError, RankError, RankLostError))
        if is_fatal or not hooks or any(hook.name in self.failures.required for hook in hooks):
            raise error
        for hook in hooks:
            sentence = f"Hook {hook.name!r} cannot run: {where} failed with {with_lines(error)}"
            failure = self.failures.leave_out(hook, where, self.state.loop.step, shortened(sentence, 290))
            self._announce(failure, now=False)
            self._drop(hook)
            log(self.state.streams, logging.WARNING, "Left out: %s", failure)

    def _drop(self, hook: TrainingHook) -> None:
        self.listeners.drop(hook)
        self.hooks = [other for other in self.hooks if other is not hook]

    # Life cycle

    def start(self, run: RunInfo) -> None:
        """Call ``start`` of every hook; after an error the set contains only the hooks that have started."""
        started: list[TrainingHook] = []
        try:
            with self.isolation.visit():
                for hook in list(self.hooks):
                    self.call(hook, "start", 0, partial(self._start, hook, run))
                    if hook in self.hooks:
                        started.append(hook)
        except LoopscopeError:
            self.hooks = started
            raise
        self.listeners = Listeners(self.hooks, self.loop_type)  # start() may set the schedule

    def _start(self, hook: TrainingHook, run: RunInfo) -> None:
        if hook.loop_points is not None and not Listeners([hook], self.loop_type).of(hook):
            reason = "its loop_points have no point of this loop"
            raise UnsuitableError(f"Hook {hook.name!r} is never called in the {self.loop_type} loop: {reason}.")
        hook_validation.start(hook, run)
        Listeners([hook], self.loop_type)  # raises UsageError for an invalid schedule

    def restrict_to(self, points: Set[HookPoint], reason: str) -> None:
        """Leave out hooks that mutate or commit, or that fire outside of ``points``; called before the start.

        Raises :class:`UsageError` if one of them is required.
        """
        for hook in list(self.hooks):
            intervenes = isinstance(hook, InterventionHook) and (hook.mutates or bool(hook.commits))
            other_points = {listener.point for listener in self.listeners.of(hook)} - points
            if intervenes or other_points:
                names = ", ".join(point.name for point in sorted(other_points))
                cause = "it changes the training state" if intervenes else f"it fires at {names}"
                sentence = f"Hook {hook.name!r} cannot run here, since {cause}: {reason}"
                require(hook.name not in self.failures.required, sentence)
                self.failures.left_out[hook.name] = sentence
                self._drop(hook)

    def leave_out_tapping(self, sentence: str) -> None:
        """Leave out the hooks with taps; raises :class:`UsageError` with the ``sentence`` if one was named."""
        if names := self.taps.hooks:
            self.leave_out(names, "start", UsageError(f"{sentence} Hooks with taps: {listed(sorted(names))}."))

    def leave_out_for_closures(self, optimizer: str) -> None:
        """Leave out hooks that an optimizer with a closure does not support: those of PRE_UPDATE, and that clip.

        Raises :class:`UsageError` if one of them was named.
        """
        for hook in list(self.hooks):
            only_before = {listener.point for listener in self.listeners.of(hook)} == {HookPoint.PRE_UPDATE}
            commits = isinstance(hook, InterventionHook) and hook.commits & {StatePart.GRADIENTS, StatePart.OPTIMIZER}
            if only_before or commits:
                cause = "fires at PRE_UPDATE" if only_before else "changes gradients and sees only the first"
                sentence = f"Hook {hook.name!r} {cause}, but {optimizer} evaluates a closure several times a step."
                self.leave_out([hook.name], "start", UsageError(sentence))

    def due_at(self, point: HookPoint) -> list[TrainingHook]:
        """Return the hooks that are due at ``point``, each once."""
        listeners = self.listeners.at[point]
        epoch, step = self.state.loop.epoch, self.state.loop.step
        if not listeners or step < self.listeners.first_due[point]:
            return []
        due = [
            item.hook
            for item in listeners
            if item.is_always_due or (step not in item.idle and item.is_due(epoch, step))
        ]
        return [*dict.fromkeys(due)]

    def memory_of(self, hooks: Iterable[TrainingHook]) -> dict[str, Any]:
        """Return the states of ``hooks`` by name, for :meth:`load_state_dict`."""
        states: dict[str, Any] = {}
        for hook in hooks:
            # The gate's checks cost more than most states, and methods of this package only read theirs.
            is_ours = type(hook).state_dict is TrainingHook.state_dict or is_shipped(type(hook))
            state = hook.state_dict() if is_ours else self._query(hook, "state_dict", hook.state_dict)
            states |= {} if state is None else {hook.name: state}
        return states

    def disable_dropped_hooks(self) -> None:
        """Drop the hooks that the run had already dropped before it was interrupted; called after the start."""
        dropped = self.failures.merge_earlier()
        for hook in [hook for hook in self.hooks if hook.name in dropped]:
            self._drop(hook)

    def end(self, status: str) -> None:
        """Call ``end`` of every hook, even if others raise there, and store its table."""
        if status != "completed":  # perhaps only on this rank, so the others cannot take part in collectives
            self.ranks = Ranks()
        # An ExitStack calls all of its callbacks, last one first, even if some of them raise.
        with ExitStack() as callbacks:
            for hook in reversed(self.hooks):
                callbacks.callback(self._end, hook, status)

    def reset(self) -> None:
        """Reset the state of every hook before the next strategy."""
        with self.isolation.visit():
            for hook in list(self.hooks):
                self.call(hook, "reset", 0, hook.reset)

    def metric_infos(self) -> dict[str, MetricInfo]:
        """Return the descriptions of all metrics by full name."""
        infos: dict[str, MetricInfo] = {}
        with self.isolation.visit():  # one for all hooks, whose calls share a bytes check
            for hook in list(self.hooks):
                hook_infos = self._query(hook, "describe_metrics", partial(hook_validation.metric_infos, hook))
                infos |= {f"{hook.name}/{info.name}": info for info in hook_infos or ()}
        return infos

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every hook by name, without hooks that have raised."""
        states: dict[str, Any] = {}
        with self.isolation.visit():
            for hook in list(self.hooks):
                # A hook that raised may have stopped in the middle of an update of its state.
                if all(error["hook"] != hook.name for error in self.failures.errors):
                    state = self._query(hook, "state_dict", hook.state_dict)
                    states |= {} if state is None else {hook.name: state}
        return states

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict` or :meth:`memory_of`; hooks without a state keep their own."""
        has_calls = False
        for hook in list(self.hooks):
            if hook.name in states:
                has_calls, call = True, Call(hook.name, LOAD, 0)
                load = partial(self.run_in_gate, call, partial(hook.load_state_dict, states[hook.name]))
                with self.isolation.visit():
                    self._call_safely(hook, call, load)
        if has_calls:  # before start(), where a rank would wait for a hook that another rank has left out
            self.synchronise_failures()

    def _end(self, hook: TrainingHook, status: str) -> None:
        self.call(hook, "end", self.state.loop.step, partial(hook.end, status))
        if hook.name in self.failures.left_out:
            return
        if table := self.call(hook, "table", self.state.loop.step, partial(hook_validation.summary_table, hook)):
            self.tables[hook.name] = table


def call_of(hook: TrainingHook, where: str, step: int) -> Call:
    """Return the call of a hook at a place and a step."""
    return Call(hook.name, where, step, *_traits(type(hook)))


@cache
def _traits(kind: type[TrainingHook]) -> tuple[str, bool, bool]:
    """Return the kind of the calls of a class of hooks, whether it is shipped, and whether it may draw numbers."""
    needs = ("needs_loss", "needs_loader", "mutates")
    # Hooks of loopscope that only read what the loop has computed draw nothing.
    draws = not is_shipped(kind) or any(getattr(kind, need, False) for need in needs)
    return "Hook", is_shipped(kind), draws
