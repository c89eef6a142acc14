"""The errors of loopscope, and what their sentences are made of."""

import difflib
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from traceback import walk_tb


class LoopscopeError(Exception):
    """Base of every error that loopscope raises on purpose; its text is one or more whole sentences."""


class UsageError(LoopscopeError):
    """Bad input, found before the run starts: the command line prints the sentence and exits with status 2."""


class UnfitError(UsageError):
    """An experiment, or what it is made of, is not what it must be; of a run that has just begun nothing is kept."""


class UnsuitableError(UsageError):
    """A hook does not suit the run, says its ``start`` (or a later call): left out, unless it was asked for by name."""


class RunNotice(UserWarning):
    """A warning about what a run does without or measures against, where going on is what was asked for."""


class HookError(LoopscopeError):
    """A hook raised; the run was put back to the state before the hook and ends with a checkpoint."""


class ReloadedHookError(HookError):
    """A hook raised in the first epoch with a state from a checkpoint, which may not be what was written."""


class StateMutationError(LoopscopeError):
    """Something that may only read changed the training state; fatal, since the change cannot be undone."""


_NOT_THE_USERS = {"loopscope", "torch", "numpy", *sys.stdlib_module_names}


def passed_through_users_code(error: BaseException) -> bool:
    """Return whether code that is neither loopscope's nor torch's, NumPy's or Python's own was running at an error."""
    names = (str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__))
    return any(name.partition(".")[0] not in _NOT_THE_USERS for name in names)


def require(condition: bool, sentence: str) -> None:
    """Raise :class:`UsageError` with ``sentence`` unless ``condition`` holds."""
    if not condition:
        raise UsageError(sentence)


def unknown(kind: str, value: str, choices: Iterable[str]) -> UsageError:
    """Make the error for a name that does not exist: the value, the nearest name, all names.

    >>> str(unknown("hook", "norm", ["norms", "fourier"]))
    "Unknown hook 'norm'. Did you mean 'norms'? Known: fourier, norms."
    """
    known = sorted(choices)
    value = shortened(value)
    return UsageError(f"Unknown {kind} {value!r}.{nearest(value, known)} Known: {', '.join(known) or 'none'}.")


def shortened(text: str, most: int = 80) -> str:
    """Return the beginning of a text that is too long for a sentence; another program's file may be one.

    >>> shortened("abc"), shortened("abcdef", 4)
    ('abc', 'abcd...')
    """
    return text if len(text) <= most else text[:most] + "..."


def nearest(value: str, choices: Iterable[str]) -> str:
    """Return the words that suggest the choice nearest to ``value``, or none if nothing is near.

    >>> nearest("norm", ["norms", "fourier"]), nearest("xyz", ["norms", "fourier"])
    (" Did you mean 'norms'?", '')
    """
    near = difflib.get_close_matches(value, choices, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def listed(names: Sequence[object], most: int = 6) -> str:
    """Join names, of many the first, and say how many more there are.

    >>> listed(["a", "b"], 3), listed([7, 9, 11, 12], 2)
    ('a, b', '7, 9 and 2 more')
    """
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def counted(count: int, singular: str, plural: str = "") -> str:
    """Return a number with the name of what it counts, whose plural is made with an s unless it is given.

    >>> counted(1, "epoch"), counted(1200, "step"), counted(2, "batch", "batches")
    ('1 epoch', '1,200 steps', '2 batches')
    """
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


def require_package(package: str, needed_by: str, extra: str) -> None:
    """Raise :class:`UsageError` that says how to get ``package`` with an extra of loopscope, if it is missing.

    A mere folder of that name is none: it has no origin.
    """
    found = find_spec(package)
    if found is None or found.origin is None:
        raise UsageError(
            f"{needed_by} needs the package {package}, which is not installed: pip install 'loopscope[{extra}]'."
        )
