"""Files that are written whole or not at all: a crash or a full disk leaves the old one intact."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from torch import Tensor

from ..errors import LoopscopeError


def write_whole(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write under a temporary name, flush to the disk, then rename over ``path``; folders are made as needed.

    Raises :class:`LoopscopeError` where the file system refuses.
    """
    partial = path.with_name(path.name + ".partial")
    with refusal_of_disk(path):
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


@contextmanager
def refusal_of_disk(path: Path) -> Iterator[None]:
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
    write_whole(path, lambda file: file.write(text.encode()))


def plain_json(value: Any) -> Any:
    """Make a value JSON: keys and whatever has no form of its own become text."""
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(item) for item in value]
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1):
        return value.item()
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
