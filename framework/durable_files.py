"""Files that are written whole or not at all, and JSON files that are read or refused in a sentence."""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from .errors import LoopscopeError, UsageError, library_warnings_ignored, require

LARGEST = 10**4000
"""Of more digits Python makes no text (``sys.get_int_max_str_digits``)."""
MAX_JSON_DEPTH = 100
"""How deep a JSON file may be nested: far deeper than any of ours, and what recursive readers can follow."""
MAX_JSON_BYTES = 2**26
"""How large a JSON file may be that is read whole."""


def write_atomically(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write under a temporary name, flush to the disk, then rename over ``path``; folders are made as needed.

    Raises :class:`LoopscopeError` where the file system refuses.
    """
    partial = path.with_name(path.name + ".partial")
    with translated_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def save_tensors(content: Any, path: Path) -> None:
    """Write tensors and plain values with ``torch.save``, whole or not at all."""
    write_atomically(path, lambda file: write_tensors(content, file))


def write_tensors(content: Any, file: Any) -> None:
    """Write tensors and plain values to an open file, which needs ``write`` and ``flush``, with ``torch.save``."""
    with library_warnings_ignored():
        torch.save(content, file)


def read_tensors(source: Path | BinaryIO, *, mapped: bool = False) -> Any:
    """Read onto the CPU what ``torch.save`` wrote; executes no code from it, and raises whatever torch raises.

    Whether it raises depends on the bytes alone, never on Python's warning filters. Tensors that are ``mapped`` are
    read from the disk when they are used.
    """
    with library_warnings_ignored():
        return torch.load(source, weights_only=True, map_location="cpu", mmap=mapped)


@contextmanager
def translated_disk_errors(path: Path) -> Iterator[None]:
    """Turn what the file system raises in the body into a :class:`LoopscopeError` that names ``path``."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        refusal = error if isinstance(error, OSError) else error.__context__  # torch.save hides it behind its own
        if not isinstance(refusal, OSError):
            raise
        raise LoopscopeError(f"{path} could not be written: {refusal.strerror or refusal}.") from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write indented JSON; non-finite numbers are the bare words ``NaN``, ``Infinity``, ``-Infinity``, as in JSONL."""
    text = json.dumps(plain_json(content), indent=2) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def plain_json(value: Any) -> Any:
    """Make a value JSON: keys and whatever has no form of its own become text."""
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(item) for item in value]
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1):
        return value.item()
    if isinstance(value, int) and abs(value) >= LARGEST:
        return math.inf if value > 0 else -math.inf
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def path_exists(path: Path) -> bool:
    """Return whether anything lies at ``path``; raises :class:`UsageError` where the file system does not tell."""
    try:
        return path.exists()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object; raises :class:`UsageError` that names the file and what is wrong with it.

    Anything may lie under the name: what a user put there, what a disk damaged, what another program wrote.
    """
    try:
        is_file = path.is_file() or path.is_dir() or not path.exists()  # no pipe, to which nobody may ever write
        require(is_file, f"{path} cannot be read: it is no file.")
        with path.open("rb") as file:
            text = file.read(MAX_JSON_BYTES + 1)
        require(len(text) <= MAX_JSON_BYTES, f"{path} is not read: it has more than {MAX_JSON_BYTES:,} bytes.")
        content = json.loads(text.decode())
        if isinstance(content, dict) and not _is_deep(content):
            return content
        reason = "it is nested too deep" if isinstance(content, dict) else "it is JSON, but no object"
    except OSError as error:
        reason = str(error.strerror)
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is not UTF-8"
    except RecursionError:
        reason = "it is nested too deep"
    except ValueError as error:
        reason = f"it is not JSON: {error}"
    raise UsageError(f"{path} cannot be read: {reason}.")


def _is_deep(content: Any) -> bool:
    """Return whether a value from a JSON file has more than ``MOST_LEVELS`` levels; does not recurse itself."""
    level = [content]
    for _ in range(MAX_JSON_DEPTH):
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list))]
        level = list(chain.from_iterable(inner))
    return bool(level)
