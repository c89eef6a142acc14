"""The errors and notices of loopscope, what their sentences are made of, and how warnings of libraries are ignored."""

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
from importlib.util import find_spec
from traceback import walk_tb
from types import FrameType
from typing import Any


class LoopscopeError(Exception):
    """Base of every error that loopscope raises on purpose; its text is one or more whole sentences."""


class UsageError(LoopscopeError):
    """Bad input, found before the run starts: the command line prints the sentence and exits with status 2."""


class InvalidExperimentError(UsageError):
    """An experiment, or what it is made of, is not what it must be; of a run that has just begun nothing is kept."""


class UnsuitableError(UsageError):
    """A hook does not suit the run, says its ``start`` (or a later call): left out, unless it was asked for by name."""


class RunNotice(UserWarning):
    """A warning about what a run does without or measures against, where going on is what was asked for."""


class HookError(LoopscopeError):
    """A hook raised; the run was put back to the state before the hook and ends with a checkpoint."""


class RankError(HookError):
    """A hook raised on another rank: ``failure`` is what that rank tells of it."""

    def __init__(self, rank: int, failure: Any) -> None:
        super().__init__(f"{failure} (on rank {rank})")
        self.rank, self.failure = rank, failure


class RankLostError(LoopscopeError):
    """Another rank is gone, or did not answer within the timeout of its process group."""


class ReloadedHookError(HookError):
    """A hook raised in the first epoch with a state from a checkpoint, which may not be what was written."""


class StateMutationError(LoopscopeError):
    """Something that may only read changed the training state; fatal, since the change cannot be undone."""


_NOT_THE_USERS = {"loopscope", "torch", "numpy", *sys.stdlib_module_names}
MOST_LINES = 4
LONGEST_LINE = 60
LONGEST_TEXT = 400
_INSTALLED = f"site-packages{os.sep}"


def raised_in_user_code(error: BaseException) -> bool:
    """Return whether code that is neither loopscope's nor torch's, NumPy's or Python's own was running at an error."""
    return bool(user_code_lines(error))


def user_code_lines(error: BaseException) -> str:
    """Return the lines of the user's own code that were running at an error, outermost first, without installed code.

    Such as ``spread.py:17 in compute: return {"std": ctx.batch_dta[0].std()}``, of many lines the first and the last.
    """
    found = walk_tb(error.__traceback__)
    theirs = [pair for pair in found if str(pair[0].f_globals.get("__name__")).split(".")[0] not in _NOT_THE_USERS]
    own = [pair for pair in theirs if _INSTALLED not in pair[0].f_code.co_filename] or theirs
    lines = [_line(frame, number) for frame, number in own] or [*_lines_of_a_worker(text_of(error))]
    if len(lines) > MOST_LINES:
        half = MOST_LINES // 2
        lines[half:-half] = [f"{len(lines) - MOST_LINES:,} more lines"]
    return "; ".join(lines)


def _lines_of_a_worker(text: str) -> Iterator[str]:
    """Yield the user's lines of the traceback that the text of an error from a worker process of torch contains."""
    others = (_INSTALLED, os.path.dirname(__file__) + os.sep, os.path.dirname(os.__file__) + os.sep)
    for path, number, name, code in re.findall(r'File "(.+)", line (\d+), in (\S+)\n\s+(.+)', text):
        if not any(other in path for other in others):
            yield f"{_short(path)}:{number} in {name}: {shortened(code, LONGEST_LINE)}"


def _line(frame: FrameType, number: int) -> str:
    code = " ".join(linecache.getline(frame.f_code.co_filename, number, frame.f_globals).split())
    where = f"{_short(frame.f_code.co_filename)}:{number} in {frame.f_code.co_name}"
    return f"{where}: {shortened(code, LONGEST_LINE)}" if code else where


def source_location(function: Callable[..., Any]) -> str:
    """Return where a function or class is written, such as ``spread.py:16 in compute``; empty where nobody knows."""
    try:
        written = inspect.unwrap(function)
        path, (_, number) = inspect.getsourcefile(written), inspect.getsourcelines(written)
    except (OSError, TypeError, ValueError, SyntaxError):  # made by a program, or written in C
        return ""
    return f"{_short(path or '')}:{number} in {written.__name__}"


def _short(path: str) -> str:
    """Return a path from the present folder on; of what lies elsewhere the name."""
    try:
        return os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else os.path.basename(path)
    except OSError:  # the present folder was removed
        return os.path.basename(path)


def describe_error(error: BaseException) -> str:
    """Return an error's type and text in one line; of a long text the beginning and the end, where errors say most."""
    text = " ".join(text_of(error).split())
    if len(text) > LONGEST_TEXT and not isinstance(error, LoopscopeError):
        text = f"{text[: LONGEST_TEXT // 2]} ... {text[-LONGEST_TEXT // 2 :]}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def text_of(error: BaseException) -> str:
    """Return what an error says, whatever its ``__str__`` does."""
    try:
        return str(error)
    except Exception:
        return "(its text cannot be read)"


def with_lines(error: BaseException, place: str = "") -> str:
    """Return an error in one line with the user's own lines; where none of these was running, with a ``place``."""
    where = user_code_lines(error) or place
    return f"{describe_error(error)} [{where}]" if where else describe_error(error)


def this_command(*words: str) -> str:
    """Return what to type in a shell to call the command again as it was: ``python spread.py`` for a script, and words.

    Another program that calls the command is none, so there the command's own name stands.
    """
    program, module = sys.argv[0], getattr(sys.modules["__main__"], "__spec__", None)
    is_first = os.path.dirname(shutil.which("python") or "") == os.path.dirname(sys.executable)
    start = ["python" if is_first else sys.executable, *([program] if module is None else ["-m", module.name])]
    if sys.argv[1:2] not in (["run"], ["resume"]) or shutil.which("loopscope") == os.path.abspath(program):
        start = ["loopscope"]
    elif module is None and os.path.basename(program) == "loopscope":
        start = [program]
    return " ".join(_in_shell(word.removesuffix(".__main__")) for word in (*start, *words))


def _in_shell(text: str) -> str:
    """Return a text as a word of a shell; what a line of output would not keep, such as two spaces, in octal."""
    if text.isprintable() and text == " ".join(text.split()):
        return shlex.quote(text)
    octal = re.sub(rb"[^\w/.-]", lambda found: b"\\%03o" % ord(found[0]), os.fsencode(text)).decode()
    return f"\"$(printf '{octal}')\""


def require(condition: bool, sentence: str) -> None:
    """Raise :class:`UsageError` with ``sentence`` unless ``condition`` holds."""
    if not condition:
        raise UsageError(sentence)


def notice(sentence: str) -> None:
    """Warn with a :class:`RunNotice`, as from where the caller was called."""
    warnings.warn(sentence, RunNotice, stacklevel=3)


class _AnyTextInThread:
    """The message pattern of a warning filter: matches every text in the thread that made it, until it is disabled."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self.enabled = True

    def match(self, text: str) -> bool:
        """Return whether a warning with this text is raised where the pattern applies."""
        return self.enabled and threading.get_ident() == self._thread


@contextmanager
def library_warnings_ignored() -> Iterator[None]:
    """Ignore every warning that the body raises in this thread, whatever Python's warning filters are.

    For calls of libraries whose failure is a verdict, such as "this file is damaged": where filters turn warnings into
    errors, a warning would be taken for the failure.
    """
    # Not catch_warnings: up to Python 3.13 it replaces the filters of all threads, and bodies that overlap (checkpoints
    # are written in a thread) restore them in the wrong order. It also makes every module forget what it has warned of.
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
