"""What becomes of a run when a hook raises, and the list of what was raised."""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from traceback import format_exception
from typing import Any, Literal

from ..errors import (
    HookError,
    LoopscopeError,
    RankError,
    ReloadedHookError,
    RunNotice,
    UnsuitableError,
    UsageError,
    passed_through_users_code,
    place_of,
    shortened,
    told,
    users_lines,
    with_lines,
)
from ..hooks import HookPoint, InterventionHook, TrainingHook, UndeclaredCommitError
from ..state import explain_nondeterminism
from .remedies import function_at, remedy

SNAPSHOT = HookPoint.SNAPSHOT.name
LOAD = "load_state_dict"
BEFORE_THE_RUN = ("describe_metrics", "start", "taps")
"""Where a :class:`UsageError` of a hook refuses the run."""


@dataclass(frozen=True)
class Failure:
    """What other ranks are told of a hook that raised on one, and what became of the run there."""

    hook: str
    where: str
    step: int
    sentence: str
    outcome: Literal["left out", "skipped", "held back", "ends", "refuses"] = "ends"

    def __str__(self) -> str:
        """Return the sentence."""
        return self.sentence


def _nowhere(name: str) -> Collection[str]:
    """Stand for the points at which a hook has reported, where there are none."""
    return ()


@dataclass
class HookFailures:
    """Decides what becomes of a run when a hook raises (see :class:`HookManager`), and lists what was raised.

    A hook that only a group switched on is left out, whatever it raises, until its first report: a call at a hook point
    that returned at least one metric. At SNAPSHOT it is left out until its first report there, which may be days later.
    A hook that was named ends the run, and so does one that had reported, also before an interruption.
    """

    on_error: Literal["raise", "skip"]
    required: set[str]
    errors: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    pending: LoopscopeError | None = None
    """The first error of the step that is under way, which is finished before the run ends."""
    points_of_reports: Callable[[str], Collection[str]] = _nowhere
    """Returns the names of the hook points at which a hook has reported, given its name."""
    reloaded: Mapping[str, int] = field(default_factory=dict)
    """The hooks that took their state back from a checkpoint, by name, and the last step of the first epoch after."""
    before: tuple[Sequence[Mapping[str, Any]], Mapping[str, str]] = ((), {})
    """Errors and hooks left out (with the reason) before the interruption, where a run is resumed."""

    def treat(self, hook: TrainingHook, where: str, step: int, error: BaseException) -> Failure:
        """Raise what ends the run now; otherwise the caller goes on without the hook."""
        raised = explain_nondeterminism(error)
        unsuited = isinstance(error, UnsuitableError) and hook.name not in self.required
        if unsuited or self.may_leave_out(hook, where):
            sentence = f"Hook {hook.name!r} raised at {_first(where, step)}: {with_lines(raised)}"
            return self.leave_out(hook, where, step, str(error) if unsuited else shortened(sentence, 290))
        if where == LOAD:
            raise UsageError(
                f"Hook {hook.name!r} cannot take its state back ({with_lines(error)}): go on with the options that it "
                "had, or without it."
            ) from error
        lines = with_lines(raised, place_of(function_at(hook, where)))
        what_to_do = remedy(hook, where, error)
        message = f"Hook {hook.name!r} raised at {where} of step {step}: {lines}" + (what_to_do and f". {what_to_do}")
        entry = {"hook": hook.name, "point": where, "step": step, "error": told(raised)}
        self.errors.append(entry | {"traceback": "".join(format_exception(error))})
        if isinstance(error, UndeclaredCommitError):
            error.args = (f"{error} [{users_lines(error)}]",)
            raise error
        if where in BEFORE_THE_RUN and isinstance(error, UsageError):
            raise error
        if self.on_error == "skip":
            stop = "" if what_to_do else "."
            warnings.warn(f"{message}{stop} The run goes on without it.", stacklevel=3)
            return Failure(hook.name, where, step, message, "skipped")
        reloaded = step <= self.reloaded.get(hook.name, -1) and not isinstance(error, (LoopscopeError, Warning))
        if reloaded and not passed_through_users_code(error):
            raise ReloadedHookError(message) from error
        failure = HookError(message)
        failure.__cause__ = error
        # A step comes out the same without the hook that raised, and can be finished, unless the hook commits.
        within = where in HookPoint.__members__ or where in ("check", "state_dict") or where.startswith("tap on")
        if not within or (isinstance(hook, InterventionHook) and hook.commits):
            raise failure
        self.pending = self.pending or failure
        return Failure(hook.name, where, step, message, "held back")

    def may_leave_out(self, hook: TrainingHook, where: str) -> bool:
        """Return whether the run does without a hook that raises ``where``: a group switched it on, and it is new."""
        if hook.name in self.required:
            return False
        points = self.points_of_reports(hook.name)
        return not points or (where == SNAPSHOT and SNAPSHOT not in points)

    def leave_out(self, hook: TrainingHook, where: str, step: int, sentence: str) -> Failure:
        """Note why a hook is left out, and warn once."""
        self.left_out[hook.name] = sentence
        warnings.warn(f"Left out: {sentence}", RunNotice, stacklevel=4)
        return Failure(hook.name, where, step, sentence, "left out")

    def follow(self, error: RankError) -> None:
        """Do what another rank did when a hook raised there; raises the ``error`` where that ended the run."""
        failure: Failure = error.failure
        if failure.outcome == "left out":
            self.left_out[failure.hook] = str(error)
            return
        if failure.outcome == "refuses":
            raise UsageError(str(error)) from error
        entry = {"hook": failure.hook, "point": failure.where, "step": failure.step, "error": str(error)}
        self.errors.append(entry | {"traceback": ""})
        if failure.outcome == "ends":
            raise error
        if failure.outcome == "held back":
            self.pending = self.pending or error

    def raise_pending(self) -> None:
        """Raise the error that was held back until the step was finished; a second call raises nothing."""
        pending, self.pending = self.pending, None
        if pending is not None:
            raise pending

    def take_over(self) -> set[str]:
        """Add what happened before the interruption, and return the names of the hooks that the run did without."""
        errors, left_out = self.before
        left_out = {name: reason for name, reason in left_out.items() if name not in self.required}
        self.left_out = {**left_out, **self.left_out}
        if self.on_error == "skip":
            self.errors[:] = map(dict, errors)
        return {*left_out, *(error["hook"] for error in self.errors)}


def _first(where: str, step: int) -> str:
    if where == SNAPSHOT:
        return "its first SNAPSHOT"
    moment = f" of step {step}" if where in HookPoint.__members__ or where.startswith("tap on") else ""
    return f"{where}{moment}, before its first report"
