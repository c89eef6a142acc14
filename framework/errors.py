"""Errors and notices of loopscope, helpers for their messages, and suppression of library warnings."""

import difflib
import inspect
import linecache
import os
import re
import shlex
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any


class LoopscopeError(Exception):
    """Base class of all errors that loopscope raises; the text consists of complete sentences."""


class UsageError(LoopscopeError):
    """Bad input, detected before the run starts; the command line prints the message and exits with status 2."""


class InvalidExperimentError(UsageError):
    """An experiment, or a part of it, is invalid; the folder of a run that has just started is removed."""


class UnsuitableError(UsageError):
    """Raised by a hook that does not support the run; the hook is left out, unless it is required."""


class HookMisuseError(UsageError):
    """A hook did what no hook may do, such as closing its scope; it ends the run for any ``--on-hook-error``."""


class NoLossError(LoopscopeError):
    """The training has no loss for a batch, and skips it; a hook that asked for that loss reports nothing there."""


class RunNotice(UserWarning):
    """A warning about a run that continues as requested, for example without a hook."""


class HookError(LoopscopeError):
    """A hook raised; the state before its call was restored, and the run ends with a checkpoint."""


class RankError(HookError):
    """A hook raised on another rank, which sent the ``failure``."""

    def __init__(self, rank: int, failure: Any) -> None:
        super().__init__(f"{failure} (on rank {rank})")
        self.rank, self.failure = rank, failure


class RankLostError(LoopscopeError):
    """Another rank has ended, or did not answer within the timeout of the process group."""


class ReloadedHookError(HookError):
    """A hook with a state from a checkpoint raised in the first epoch; the checkpoint may be damaged."""


class StateMutationError(LoopscopeError):
    """Read-only code changed the training state; fatal, since the change cannot be undone."""


_LIBRARY_MODULES = {"loopscope", "torch", "numpy", *sys.stdlib_module_names}
MOST_LINES = 4
LONGEST_LINE = 60
LONGEST_TEXT = 400
_SITE_PACKAGES = f"site-packages{os.sep}"


def user_code_lines(error: BaseException) -> str:
    """Return the lines of user code in the traceback of an error, outermost first; empty if it passed through none.

    User code is that outside of loopscope, torch, NumPy and the standard library.

    An example of a line is ``spread.py:17 in compute: return {"std": ctx.batch_dta[0].std()}``. Installed packages are
    included only if there is no other user code; of many lines the first and the last are returned.
    """
    frames = walk_tb(error.__traceback__)
    user = [pair for pair in frames if str(pair[0].f_globals.get("__name__")).split(".")[0] not in _LIBRARY_MODULES]
    own_files = [pair for pair in user if _SITE_PACKAGES not in pair[0].f_code.co_filename] or user
    lines = [_describe_frame(frame, number) for frame, number in own_files] or [*_worker_lines(str(error))]
    if len(lines) > MOST_LINES:
        half = MOST_LINES // 2
        lines[half:-half] = [f"{len(lines) - MOST_LINES:,} more lines"]
    return "; ".join(lines)


def _worker_lines(text: str) -> Iterator[str]:
    """Yield the lines of user code in the error text of a DataLoader worker, which contains its traceback."""
    library_folders = (_SITE_PACKAGES, os.path.dirname(__file__) + os.sep, os.path.dirname(os.__file__) + os.sep)
    for path, number, name, code in re.findall(r'File "(.+)", line (\d+), in (\S+)\n\s+(.+)', text):
        if not any(folder in path for folder in library_folders):
            yield f"{_short_path(path)}:{number} in {name}: {shortened(code, LONGEST_LINE)}"


def _describe_frame(frame: FrameType, number: int) -> str:
    code = " ".join(linecache.getline(frame.f_code.co_filename, number, frame.f_globals).split())
    location = f"{_short_path(frame.f_code.co_filename)}:{number} in {frame.f_code.co_name}"
    return f"{location}: {shortened(code, LONGEST_LINE)}" if code else location


def source_location(function: Callable[..., Any]) -> str:
    """Return the location of a function or class, such as ``spread.py:16 in compute``; empty if it is unknown."""
    try:
        original = inspect.unwrap(function)
        path, (_, number) = inspect.getsourcefile(original), inspect.getsourcelines(original)
    except (OSError, TypeError, ValueError, SyntaxError):  # generated code, or written in C
        return ""
    return f"{_short_path(path or '')}:{number} in {original.__name__}"


def _short_path(path: str) -> str:
    """Return a path relative to the current folder, or the file name if it is outside."""
    shown = short_path(path)
    return shown if shown != path else os.path.basename(path)


def describe_error(error: BaseException) -> str:
    """Return an error's type and text in one line; of a long text the beginning and the end."""
    text = " ".join(str(error).split())
    if len(text) > LONGEST_TEXT and not isinstance(error, LoopscopeError):
        text = f"{text[: LONGEST_TEXT // 2]} ... {text[-LONGEST_TEXT // 2 :]}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def with_lines(error: BaseException, place: str = "") -> str:
    """Return an error in one line with the lines of user code, or with ``place`` if there are none."""
    lines = user_code_lines(error) or place
    return f"{describe_error(error)} [{lines}]" if lines else describe_error(error)


def this_command(*words: str) -> str:
    """Return the shell command of this process, such as ``python spread.py``, with ``words`` appended.

    If another program called loopscope, the command is ``loopscope``.
    """
    program, module = sys.argv[0], getattr(sys.modules["__main__"], "__spec__", None)
    is_on_path = os.path.dirname(shutil.which("python") or "") == os.path.dirname(sys.executable)
    start = ["python" if is_on_path else sys.executable, *([program] if module is None else ["-m", module.name])]
    if sys.argv[1:2] not in (["run"], ["resume"]) or shutil.which("loopscope") == os.path.abspath(program):
        start = ["loopscope"]
    elif module is None and os.path.basename(program) == "loopscope":
        start = [program]
    return " ".join(shlex.quote(word.removesuffix(".__main__")) for word in (*start, *words))


def require(condition: bool, sentence: str) -> None:
    """Raise :class:`UsageError` with ``sentence`` unless ``condition`` holds."""
    if not condition:
        raise UsageError(sentence)


def short_path(path: str | Path) -> str:
    """Return a path relative to the working directory if it is below it, otherwise unchanged, for messages."""
    text = str(path)
    with suppress(OSError):  # the working directory may be gone
        return os.path.relpath(text) if text.startswith(os.getcwd() + os.sep) else text
    return text


def notice(sentence: str) -> None:
    """Issue a :class:`RunNotice` at the location of the caller's caller."""
    warn(sentence, RunNotice, stacklevel=3)


def warn(message: str, category: type[Warning] = UserWarning, *, stacklevel: int = 1) -> None:
    """Issue a warning of loopscope, which does not end a run under a general filter such as ``-W error``.

    It is raised only if the filter names the warning itself: its message, or a category of loopscope.
    """
    _issue(partial(warnings.warn, message, category, stacklevel=stacklevel + 2), category)


def warn_at(warning: Warning, path: str, line: int) -> None:
    """Issue a warning for a line of code as :func:`warn` does, also if it repeats an earlier one."""
    _issue(partial(warnings.warn_explicit, warning, type(warning), path, line), type(warning))


def _issue(issue: Callable[[], None], category: type[Warning]) -> None:
    """Issue a warning, which is lost if it cannot be shown, for example since standard error is closed."""
    try:
        issue()
    except Warning:
        if is_chosen_as_error(category):
            raise
        with warnings.catch_warnings(), suppress(Exception):
            warnings.simplefilter("always", category)
            issue()
    except Exception:
        return


def is_chosen_as_error(category: type[Warning]) -> bool:
    """Return whether a filter turns a warning of loopscope into an error by its message or by its own category."""
    return any(
        action == "error" and issubclass(category, kind) and (message or kind.__module__.startswith("loopscope"))
        for action, message, kind, *_ in warnings.filters
    )


class _AnyTextInThread:
    """A message pattern for warning filters that matches every text in its own thread until it is disabled."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self.enabled = True

    def match(self, text: str) -> bool:
        """Return whether the pattern is enabled and the warning comes from its thread."""
        return self.enabled and threading.get_ident() == self._thread


@contextmanager
def library_warnings_ignored() -> Iterator[None]:
    """Ignore all warnings of the body in this thread, independently of Python's warning filters.

    For library calls whose errors have a meaning, such as "this file is damaged": with filters that turn warnings into
    errors, a warning would look like such an error.
    """
    # Not catch_warnings: up to Python 3.13 it replaces the filters of all threads, and overlapping bodies (checkpoints
    # are written in a thread) restore them in the wrong order. It also resets which warnings every module has shown.
    pattern = _AnyTextInThread()
    entry = ("ignore", pattern, Warning, None, 0)
    warnings.filters.insert(0, entry)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        pattern.enabled = False  # a catch_warnings in another thread may hold a copy of the filters
        with suppress(ValueError):  # the body has reset the filters
            warnings.filters.remove(entry)  # type: ignore[attr-defined]


def unknown(kind: str, value: str, choices: Iterable[str]) -> UsageError:
    """Return the error for a name that does not exist, with the value, the nearest name and all names.

    >>> str(unknown("hook", "norm", ["norms", "fourier"]))
    "Unknown hook 'norm'. Did you mean 'norms'? Known: fourier, norms."
    """
    names = sorted(choices)
    value = shortened(value)
    return UsageError(f"Unknown {kind} {value!r}.{nearest(value, names)} Known: {', '.join(names) or 'none'}.")


def shortened(text: str, most: int = 80) -> str:
    """Return a text, cut after ``most`` characters; error messages may contain a whole file.

    >>> shortened("abc"), shortened("abcdef", 4)
    ('abc', 'abcd...')
    """
    return text if len(text) <= most else text[:most] + "..."


def nearest(value: str, choices: Iterable[str]) -> str:
    """Return the sentence "Did you mean ...?" for the choice nearest to ``value``, or an empty text.

    >>> nearest("norm", ["norms", "fourier"]), nearest("xyz", ["norms", "fourier"])
    (" Did you mean 'norms'?", '')
    """
    matches = difflib.get_close_matches(value, choices, n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def listed(names: Sequence[object], most: int = 6) -> str:
    """Join the first names with commas, and append the number of further ones.

    >>> listed(["a", "b"], 3), listed([7, 9, 11, 12], 2)
    ('a, b', '7, 9 and 2 more')
    """
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def counted(count: int, singular: str, plural: str = "") -> str:
    """Return a count with its noun in singular or plural; the default plural has an s.

    >>> counted(1, "epoch"), counted(1200, "step"), counted(2, "batch", "batches")
    ('1 epoch', '1,200 steps', '2 batches')
    """
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"
