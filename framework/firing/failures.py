"""What becomes of a run when a hook raises: it ends, at once or after the step, or goes on without the hook."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import HookError, RunNotice, UnsuitableError, UsageError
from ..hooks import HookPoint, InterventionHook, TrainingHook, UndeclaredCommitError
from ..state import explained


@dataclass
class HookFailures:
    """Decides what becomes of a run when a hook raises (see :class:`HookManager`), and lists what was raised."""

    on_error: Literal["raise", "skip"]
    required: set[str]
    errors: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    pending: HookError | None = None
    """The first error of the step that is under way, which is finished before the run ends."""
    before: tuple[Sequence[Mapping[str, Any]], Mapping[str, str]] = ((), {})
    """Errors and hooks left out (with the reason) before the interruption, where a run is resumed."""

    def treat(self, hook: TrainingHook, where: str, step: int, error: Exception) -> None:
        """Raise what ends the run now; otherwise the caller goes on without the hook."""
        if isinstance(error, UnsuitableError) and hook.name not in self.required:
            self.left_out[hook.name] = str(error)
            warnings.warn(f"Left out: {error}", RunNotice, stacklevel=3)
            return
        told = explained(error)
        message = f"Hook {hook.name!r} raised at {where} of step {step}: {type(told).__name__}: {told}"
        self.errors.append({"hook": hook.name, "point": where, "step": step, "error": f"{type(told).__name__}: {told}"})
        if isinstance(error, UndeclaredCommitError) or (where in ("start", "taps") and isinstance(error, UsageError)):
            raise error
        if self.on_error == "skip":
            warnings.warn(f"{message}. The run goes on without it.", stacklevel=3)
            return
        failure = HookError(message)
        failure.__cause__ = error
        if not _may_finish_step(hook, where):
            raise failure
        self.pending = self.pending or failure

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


def _may_finish_step(hook: TrainingHook, where: str) -> bool:
    """Return whether a step in which a hook raised comes out the same without it, so that it can be finished."""
    within = where in HookPoint.__members__ or where in ("check", "state_dict") or where.startswith("tap on")
    return within and not (isinstance(hook, InterventionHook) and hook.commits)
