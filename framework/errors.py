"""The errors of loopscope, and the sentence that names what was meant."""

import difflib
from collections.abc import Iterable


class LoopscopeError(Exception):
    """Base of every error that loopscope raises on purpose; its text is one or more whole sentences."""


class UsageError(LoopscopeError):
    """Bad input, found before the run starts: the command line prints the sentence and exits with status 2."""


class UnsuitableError(UsageError):
    """A hook does not suit the run, says its ``start`` (or a later call): left out, unless it was asked for by name."""


class RunNotice(UserWarning):
    """A warning about what a run does without or measures against, where going on is what was asked for."""


class HookError(LoopscopeError):
    """A hook raised; the run was put back to the state before the hook and ends with a checkpoint."""


class StateMutationError(LoopscopeError):
    """Something that may only read changed the training state; fatal, since the change cannot be undone."""


def unknown(kind: str, value: str, choices: Iterable[str]) -> UsageError:
    """Make the error for a name that does not exist: the value, the nearest name, all names.

    >>> str(unknown("hook", "norm", ["norms", "fourier"]))
    "Unknown hook 'norm'. Did you mean 'norms'? Known: fourier, norms."
    """
    known = sorted(choices)
    return UsageError(f"Unknown {kind} {value!r}.{nearest(value, known)} Known: {', '.join(known) or 'none'}.")


def nearest(value: str, choices: Iterable[str]) -> str:
    """Return the words that suggest the choice nearest to ``value``, or none if nothing is near.

    >>> nearest("norm", ["norms", "fourier"]), nearest("xyz", ["norms", "fourier"])
    (" Did you mean 'norms'?", '')
    """
    near = difflib.get_close_matches(value, choices, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
