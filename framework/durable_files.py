"""Atomic writes of files, and reading of JSON files with one-sentence errors."""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from .errors import LoopscopeError, UsageError, library_warnings_ignored, require

MAX_JSON_BYTES = 2**26
"""Maximum size of a JSON file that is read into memory."""


def write_atomically(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write a temporary file, flush it to the disk, then rename it to ``path``; missing folders are created.

    Raises :class:`LoopscopeError` if the file system reports an error.
    """
    temporary = path.with_name(path.name + ".partial")
    with translated_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def save_tensors(content: Any, path: Path) -> None:
    """Write tensors and plain values with ``torch.save``, atomically."""
    write_atomically(path, partial(write_tensors, content))


def write_tensors(content: Any, file: Any) -> None:
    """Write tensors and plain values with ``torch.save`` to an open file, which needs ``write`` and ``flush``."""
    import torch  # here, since the readers of records need no tensors, and torch takes over a second

    with library_warnings_ignored():
        torch.save(content, file)


def read_tensors(source: Path | BinaryIO, *, mapped: bool = False) -> Any:
    """Read a file of ``torch.save`` onto the CPU without executing code from it; raises the errors of torch.

    Warnings are ignored, so that errors depend only on the bytes and not on Python's warning filters. ``mapped``
    tensors are read from the disk when they are used.
    """
    import torch

    # Without ``bytes``, torch writes an empty value and then refuses to read it.
    with library_warnings_ignored(), torch.serialization.safe_globals([bytes]):
        return torch.load(source, weights_only=True, map_location="cpu", mmap=mapped)


@contextmanager
def translated_disk_errors(path: Path) -> Iterator[None]:
    """Translate file-system errors of the body into a :class:`LoopscopeError` that names ``path``."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # torch.save raises a RuntimeError, whose context is the OSError.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise LoopscopeError(f"{path} could not be written: {cause.strerror or cause}.") from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write indented JSON; non-finite numbers are the bare words ``NaN``, ``Infinity``, ``-Infinity``, as in JSONL."""
    text = json.dumps(plain_json(content), indent=2) + "\n"
    write_atomically(path, methodcaller("write", text.encode()))


def plain_json(value: Any, *, finite: bool = False) -> Any:
    """Convert a value to JSON types; keys, and values of other types, become text.

    With ``finite``, numbers that are not finite become ``NaN``, ``Infinity`` and ``-Infinity`` as text, too.

    >>> plain_json({"loss": [1.5, float("nan")], "step": None}, finite=True)
    {'loss': [1.5, 'NaN'], 'step': None}
    """
    if isinstance(value, Mapping):
        return {str(key): plain_json(item, finite=finite) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(item, finite=finite) for item in value]
    if isinstance(value, np.generic) or (hasattr(value, "numel") and value.numel() == 1):
        value = value.item()
    if finite and isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def path_exists(path: Path) -> bool:
    """Return whether ``path`` exists; raises :class:`UsageError` if the file system reports an error."""
    try:
        return path.exists()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error


def is_readable_file(path: Path) -> bool:
    """Return whether ``path`` exists, as a regular file.

    Raises:
        UsageError: for a folder or a special file; reading a pipe could block forever.
    """
    exists = path_exists(path)
    require(not exists or path.is_file(), f"{path} cannot be read: it is not a regular file; remove it.")
    return exists


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with their numbers from 1; a missing file has none.

    Raises:
        UsageError: if it is not a regular file, or cannot be read.
    """
    if not is_readable_file(path):
        return
    try:
        with path.open("rb") as file:
            yield from enumerate(file, 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file that may be damaged, or written by a user or another program.

    Raises:
        UsageError: for a missing, too large or invalid file, with its path and the reason.
    """
    is_readable_file(path)
    try:
        is_large = path.stat().st_size > MAX_JSON_BYTES
        require(not is_large, f"{path} cannot be read: it has more than {MAX_JSON_BYTES:,} bytes.")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: it is not JSON: {error}.") from error
    require(isinstance(content, dict), f"{path} cannot be read: it is JSON, but not an object.")
    return dict(content)
