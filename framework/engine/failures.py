"""Handling of hook failures: a failure ends the run, or drops the hook."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from traceback import format_exception
from typing import Any, Literal

from ..errors import (
    HookError,
    HookMisuseError,
    LoopscopeError,
    RankError,
    ReloadedHookError,
    RunNotice,
    UnsuitableError,
    UsageError,
    describe_error,
    shortened,
    source_location,
    user_code_lines,
    warn,
    with_lines,
)
from ..hooks import HookPoint, InterventionHook, TrainingHook
from ..state.settings import explain_nondeterminism
from .error_advice import advice_on_error, called_method

OnError = Literal["raise", "skip", "auto"]
LOAD = "load_state_dict"
CALLED_BEFORE_RUN = ("describe_metrics", "start", "taps")
"""Calls in which a :class:`UsageError` of a hook refuses the run."""


@dataclass(frozen=True)
class Failure:
    """A hook failure on one rank, as other ranks receive it, with its effect on the run."""

    hook: str
    where: str
    step: int
    sentence: str
    outcome: Literal["left out", "skipped", "held back", "ends", "refuses"] = "ends"

    def __str__(self) -> str:
        """Return the sentence."""
        return self.sentence


@dataclass
class HookFailures:
    """Decides whether a hook failure ends the run (see :class:`HookManager`), and records all failures.

    A hook that was enabled by a group, not by name, is dropped if it raises. For a hook that was enabled by name,
    ``on_error`` decides: ``"raise"`` ends the run, ``"skip"`` drops the hook, and ``"auto"`` drops it unless it
    commits, since the run is then another one, or reports unsuitable input by the end of the first step.
    """

    on_error: OnError
    required: set[str]
    errors: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    pending: LoopscopeError | None = None
    """First error of the current step; the run completes the step before it ends."""
    reloaded: Mapping[str, int] = field(default_factory=dict)
    """Last step of the first epoch after resuming, by the names of the hooks whose state was restored."""
    earlier: tuple[Sequence[Mapping[str, Any]], Mapping[str, str]] = ((), {})
    """For a resumed run: errors, and dropped hooks with reasons, from before the interruption."""

    def handle(self, hook: TrainingHook, where: str, step: int, error: BaseException) -> Failure:
        """Handle an error of a hook; if this method returns, the caller continues without the hook.

        Raises:
            LoopscopeError: the error ends the run now.
        """
        explained = explain_nondeterminism(error)
        is_within_step = where in HookPoint.__members__ or where.startswith("tap on") or where == "check"
        if hook.name not in self.required:
            moment = f"{where} of step {step}" if is_within_step else where
            sentence = f"Hook {hook.name!r} raised at {moment}: {with_lines(explained)}"
            is_unsuitable = isinstance(error, UnsuitableError)
            return self.leave_out(hook, where, step, str(error) if is_unsuitable else shortened(sentence, 290))
        if where == LOAD:
            raise UsageError(
                f"The state of hook {hook.name!r} cannot be restored ({with_lines(error)}); resume with its earlier "
                "options, or without this hook."
            ) from error
        lines = with_lines(explained, source_location(called_method(hook, where)))
        advice = advice_on_error(hook, error)
        message = f"Hook {hook.name!r} raised at {where} of step {step}: {lines}" + (advice and f". {advice}")
        entry = {"hook": hook.name, "point": where, "step": step, "error": describe_error(explained)}
        self.errors.append(entry | {"traceback": "".join(format_exception(error))})
        if isinstance(error, HookMisuseError):
            error.args = (f"{error} [{user_code_lines(error)}]",)
            raise error
        if where in CALLED_BEFORE_RUN and isinstance(error, UsageError):
            raise error
        if self._drops(hook, step, error):
            full_stop = "" if advice else "."
            warn(f"{message}{full_stop} The run continues without this hook.", stacklevel=3)
            return Failure(hook.name, where, step, message, "skipped")
        is_reloaded = step <= self.reloaded.get(hook.name, -1) and not isinstance(error, (LoopscopeError, Warning))
        if is_reloaded and not user_code_lines(error):
            raise ReloadedHookError(message) from error
        failure = HookError(message)
        failure.__cause__ = error
        # Without the failed hook, the step has the same result and can be completed, unless the hook commits.
        if not (is_within_step or where == "state_dict") or (isinstance(hook, InterventionHook) and hook.commits):
            raise failure
        self.pending = self.pending or failure
        return Failure(hook.name, where, step, message, "held back")

    def _drops(self, hook: TrainingHook, step: int, error: BaseException) -> bool:
        if self.on_error == "auto":
            commits = isinstance(hook, InterventionHook) and bool(hook.commits)
            return not commits and not (step <= 1 and isinstance(error, LoopscopeError))
        return self.on_error == "skip"

    def leave_out(self, hook: TrainingHook, where: str, step: int, sentence: str) -> Failure:
        """Record why a hook is left out, and warn."""
        self.left_out[hook.name] = sentence
        warn(f"Left out: {sentence}", RunNotice, stacklevel=4)
        return Failure(hook.name, where, step, sentence, "left out")

    def mirror(self, error: RankError) -> None:
        """Apply the effect of a failure on another rank; raise ``error`` if it ended the run there."""
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
        """Raise the pending error, once."""
        pending, self.pending = self.pending, None
        if pending is not None:
            raise pending

    def merge_earlier(self) -> set[str]:
        """Add the failures from before the interruption, and return the names of all dropped hooks."""
        errors, left_out = self.earlier
        left_out = {name: reason for name, reason in left_out.items() if name not in self.required}
        self.left_out |= {name: reason for name, reason in left_out.items() if name not in self.left_out}
        if self.on_error != "raise":
            self.errors[:] = map(dict, errors)
        return {*left_out, *(error["hook"] for error in self.errors)}
