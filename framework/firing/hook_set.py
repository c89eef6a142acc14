"""The hooks of a run: which are on, where they listen, how they are called, what follows if one raises, their life."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
from torch import Tensor

from ..errors import (
    LoopscopeError,
    RankError,
    RankLostError,
    StateMutationError,
    UsageError,
    require,
    shortened,
    with_lines,
)
from ..hooks import STEP_POINTS, HookPoint, InterventionHook, MetricInfo, RunInfo, TapSet, TrainingHook
from ..isolation import Call, Isolation
from ..state import TrainingState, visited
from ..training import Profiler, Ranks
from . import answers
from .failures import LOAD, Failure, HookFailures
from .listeners import Listeners
from .remedies import instead_of
from .state_offload import StateOffload

Result = TypeVar("Result")


class HookSet:
    """The hooks that are on, in the order in which the user named them; all their code is called from here.

    The run's ``taps`` hear nothing of what hooks do.
    """

    def __init__(
        self,
        hooks: Iterable[TrainingHook],
        state: TrainingState,
        isolation: Isolation,
        *,
        loop: str,
        taps: TapSet,
        failures: HookFailures,
        profiler: Profiler,
        offload: StateOffload | None,
        ranks: Ranks,
    ) -> None:
        self.failures = failures
        self.tables: dict[str, Mapping[str, Mapping[str, float]]] = {}
        self._hooks = list(hooks)
        self.loop = loop
        self.listeners = Listeners(self._hooks, loop)
        self.isolation = isolation
        self.profiler = profiler
        self._state = state
        self._taps = taps
        self._offload = offload
        self.ranks = ranks
        self._untold: list[Failure] = []
        """What was raised on this rank since :meth:`settle`."""
        self.were_called = False
        """Whether hooks were called since :meth:`settle` of whose failures other ranks do not know at once."""
        self._abandoned = False
        self._has_seen = False

    def __iter__(self) -> Iterator[TrainingHook]:
        return iter(self._hooks)

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
        """Call a hook's code through the isolation, rolled back if it is an ``intervention``'s, and return its result.

        Returns ``None`` if it raised and the run goes on for now, and always once the hooks were abandoned.
        """
        self.profiler.caller = hook.name
        if self._offload is not None:
            function = partial(self._offload.call, hook, function)
        isolated = partial(self._isolated, Call(hook.name, where, step), function, intervention)
        if self.profiler.enabled:
            state_of = partial(self._isolated, Call(hook.name, "state_dict", step), hook.state_dict)
            isolated = partial(self.profiler.call, hook.name, isolated, state_of)
        return self._treated(hook, where, step, isolated, together=intervention is not None)

    def _treated(
        self, hook: TrainingHook, where: str, step: int, isolated: Callable[[], Result], *, together: bool = False
    ) -> Result | None:
        """Return what an isolated call returns; what a hook raises, an exit included, is a failure of the hook.

        A call that all ranks make ``together`` has succeeded where it has on all of them; what is raised elsewhere the
        others are told of when they :meth:`settle`.
        """
        if self._abandoned:
            return None
        self.were_called = self.were_called or not together
        try:
            result = isolated()
            if together:
                self.ranks.join()
        except StateMutationError as error:
            error.args = (" ".join(filter(None, [str(error), instead_of(hook, where, error)])),)
            self._tell(Failure(hook.name, where, step, str(error)), now=together)
            if together or not self.ranks.are_many:
                self.abandon()
                raise
            self.failures.pending = error  # until all settle: others would wait for this rank in their collectives
            self.isolation.rebase()
            return None
        except (KeyboardInterrupt, RankLostError):
            raise
        except RankError as error:
            self._off(hook, partial(self.failures.follow, error))
            return None
        except BaseException as error:  # sys.exit() among them, which would end the run as if it were done
            self._failed(hook, where, step, error, together=together)
            return None
        return result

    def _gated(self, hook: TrainingHook, where: str, function: Callable[[], Result]) -> Result | None:
        """Ask a hook for what is no part of its work: isolated like a call, but neither profiled nor offloaded."""
        step = self._state.loop.step
        with self.isolation.visit():
            return self._treated(hook, where, step, partial(self._isolated, Call(hook.name, where, step), function))

    def call_tap(self, hook: TrainingHook, target: str, function: Callable[[], Result]) -> Result | None:
        """Call the function of a tap amid the run's own pass, where it is watched and can be rolled back by no copy."""
        call = Call(hook.name, f"tap on {target!r}", self._state.loop.step)
        if self._offload is not None:
            function = partial(self._offload.call, hook, function)

        def isolated() -> Result:
            with self.profiler.section(hook.name):
                return self.isolation.observe_in_pass(call, function)

        return self._treated(hook, call.where, call.step, isolated)

    def isolated(self, name: str, where: str, function: Callable[[], Result]) -> Result:
        """Call what is not a hook's, such as the evaluation, within a visit and as isolated as an observer."""
        return self._isolated(Call(name, where, self._state.loop.step, "The"), function, None)

    @property
    def acting(self) -> str:
        """The name of a hook that is rolled back within a step, of one that was named if there is; empty if none is."""
        due = [each for point in STEP_POINTS for each in self.listeners.at[point] if each.intervention is not None]
        acting = [each.hook for each in due if each.intervention.mutates]  # type: ignore[union-attr]
        acting.sort(key=lambda hook: hook.name not in self.failures.required)
        return next((hook.name for hook in acting), "")

    def see_first(self, batch: object) -> None:
        """Raise :class:`UsageError` if a hook may change a run's first batch, which no rollback could put back."""
        if self._has_seen:
            return
        self._has_seen = True
        if any(isinstance(leaf, (Tensor, np.ndarray)) for _, leaf, _ in visited("", batch)):
            return
        while hook := self.acting:
            error = UsageError(
                f"Hook {hook!r} is rolled back within a step, but in its batch, a {type(batch).__name__}, there is no "
                "tensor to be found, and so nothing that could be put back; give batches that are tensors, arrays, or "
                "containers or plain objects of them, or leave the hook out."
            )
            self.without([hook], "start", error)

    def abandon(self) -> None:
        """Call no hook any more: the training state is damaged, and what they would find there is not the run."""
        self._abandoned = True
        self.isolation.rebase()  # or the sinks, which are still to be closed, would be blamed for it

    def _isolated(
        self, call: Call, function: Callable[[], Result], intervention: InterventionHook | None = None
    ) -> Result:
        with self._taps:
            if intervention is None:
                return self.isolation.observe(call, function)
            return self.isolation.intervene(call, function, mutates=intervention.mutates)

    def _failed(
        self, hook: TrainingHook, where: str, step: int, error: BaseException, *, together: bool = False
    ) -> None:
        try:
            failure = self._off(hook, partial(self.failures.treat, hook, where, step, error))
        except BaseException as final:
            outcome: Literal["refuses", "ends"] = "refuses" if isinstance(final, UsageError) else "ends"
            self._tell(Failure(hook.name, where, step, str(final), outcome), now=True)
            raise
        self._tell(failure, now=together)

    def _tell(self, failure: Failure, *, now: bool) -> None:
        """Let the other ranks know, at their next agreement or when all settle."""
        if now:
            self.ranks.told([failure])
        else:
            self._untold.append(failure)

    def settle(self) -> None:
        """Bring all ranks to one mind about the hooks that raised on some of them, if they could not be told before."""
        called, self.were_called = self.were_called, False
        while called and (told := self.ranks.told(self._untold or None)) is not None:
            self._untold = []
            failures = [(rank, failure) for rank, each in told for failure in each]
            if ends := any(failure.outcome in ("ends", "refuses") for _, failure in failures):
                self.failures.raise_pending()  # what was raised here comes before what was elsewhere
            for rank, failure in failures:
                if not self.ranks.is_mine(rank):
                    self._follow(RankError(rank, failure))
            if ends:
                return

    def _follow(self, error: RankError) -> None:
        for hook in [hook for hook in self._hooks if hook.name == error.failure.hook]:
            self._off(hook, partial(self.failures.follow, error))

    def _off(self, hook: TrainingHook, treat: Callable[[], Result]) -> Result:
        """Let the run go on without a hook, once it has been decided that it goes on."""
        found = treat()
        if self.failures.pending is None:
            self._drop(hook)
        else:  # the run ends after the step, and the hook is told of that
            self.listeners.drop(hook)
        return found

    def without_those_that_need(self, need: str, error: Exception) -> None:
        """Leave out the hooks with the flag ``need``, which the loop failed to compute for them.

        Raises the ``error`` if one of them was named, or has reported before.
        """
        self.without([hook.name for hook in self._hooks if getattr(hook, need)], need, error)

    def without(self, names: Collection[str], where: str, error: Exception) -> None:
        """Leave out the hooks with these ``names``, since what is done for them failed.

        Raises the ``error`` if one of them was named, or has reported before.
        """
        hooks = [hook for hook in self._hooks if hook.name in names]
        final = isinstance(error, (StateMutationError, RankError, RankLostError))
        if final or not hooks or not all(self.failures.may_leave_out(hook, where) for hook in hooks):
            raise error
        for hook in hooks:
            sentence = f"Hook {hook.name!r} cannot be served: {where} failed with {with_lines(error)}"
            self._tell(self.failures.leave_out(hook, where, self._state.loop.step, shortened(sentence, 290)), now=False)
            self._drop(hook)

    def _drop(self, hook: TrainingHook) -> None:
        self.listeners.drop(hook)
        self._hooks = [other for other in self._hooks if other is not hook]

    # Life cycle

    def start(self, run: RunInfo) -> None:
        """Tell every hook that the strategy starts; after an error only those remain that did start."""
        started: list[TrainingHook] = []
        try:
            with self.isolation.visit():
                for hook in list(self._hooks):
                    self.call(hook, "start", 0, partial(self._start, hook, run))
                    if hook in self._hooks:
                        started.append(hook)
        except LoopscopeError:
            self._hooks = started
            raise
        self.listeners = Listeners(self._hooks, self.loop)  # a hook may fit its schedule to the run it starts

    def _start(self, hook: TrainingHook, run: RunInfo) -> None:
        answers.start(hook, run)
        Listeners([hook], self.loop)  # raises UsageError for a schedule that is none

    def keep_to(self, points: Set[HookPoint], reason: str) -> None:
        """Leave out what acts, or fires elsewhere than at these, before the start.

        Raises :class:`UsageError` for a hook that was asked for by name, and where nothing is left.
        """
        for hook in list(self._hooks):
            acts = isinstance(hook, InterventionHook) and (hook.mutates or bool(hook.commits))
            others = {listener.point for listener in self.listeners.of(hook)} - points
            if acts or others:
                where = "it acts" if acts else f"it fires at {', '.join(point.name for point in sorted(others))}"
                sentence = f"Hook {hook.name!r} cannot be served, since {where}: {reason}"
                require(hook.name not in self.failures.required, sentence)
                self.failures.left_out[hook.name] = sentence
                self._drop(hook)
        require(bool(self._hooks), f"No hook is left that can be served: {reason}")

    def goes_on(self) -> None:
        """Do without the hooks that a run had gone on without before it was interrupted; called once they started."""
        gone = self.failures.take_over()
        for hook in [hook for hook in self._hooks if hook.name in gone]:
            self._drop(hook)

    def end(self, status: str) -> None:
        """Tell every hook that the strategy is over, whatever others raise there, and take its table."""
        if status != "completed":  # perhaps on this rank alone, so that nobody is there to agree with
            self.ranks = Ranks()
        # An ExitStack calls all of its callbacks, the last one first, whatever some of them raise.
        with ExitStack() as one_after_another:
            for hook in reversed(self._hooks):
                one_after_another.callback(self._end, hook, status)

    def reset(self) -> None:
        """Let every hook forget the strategy that it served before."""
        with self.isolation.visit():
            for hook in list(self._hooks):
                self.call(hook, "reset", 0, hook.reset)

    def metric_infos(self) -> dict[str, MetricInfo]:
        """Return every metric that the hooks describe, by full name."""
        found: dict[str, MetricInfo] = {}
        for hook in list(self._hooks):
            described = self._gated(hook, "describe_metrics", partial(answers.described, hook))
            found |= {f"{hook.name}/{info.name}": info for info in described or ()}
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return every hook's state, by the hook's name; that of a hook which has raised is left out."""
        states: dict[str, Any] = {}
        for hook in list(self._hooks):
            # A hook that raised may have stopped half way through an update of what it remembers.
            if all(error["hook"] != hook.name for error in self.failures.errors):
                state = self._gated(hook, "state_dict", hook.state_dict)
                states |= {} if state is None else {hook.name: state}
        return states

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give every hook its state back; hooks that were not there when it was saved keep their fresh one."""
        called = False
        for hook in list(self._hooks):
            if hook.name in state:
                called = True
                load = partial(self._isolated, Call(hook.name, LOAD, 0), partial(answers.load, hook, state[hook.name]))
                with self.isolation.visit():
                    self._treated(hook, LOAD, 0, load)
        if called:  # a hook that is left out on one rank must not wait for the others when it starts
            self.settle()

    def _end(self, hook: TrainingHook, status: str) -> None:
        self.call(hook, "end", self._state.loop.step, partial(hook.end, status))
        if hook.name in self.failures.left_out:
            return
        if table := self.call(hook, "table", self._state.loop.step, partial(answers.table, hook)):
            self.tables[hook.name] = table
