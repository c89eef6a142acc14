"""Tensors in a temporary file, for copies that are large and rarely read."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from math import prod
from tempfile import TemporaryFile
from typing import IO
from weakref import finalize

import torch
from torch import Tensor


class StoredTensors(Mapping[str, Tensor]):
    """Copies of tensors by name in a temporary file; each access reads one of them into memory, on the CPU.

    The file is in the folder for temporary files (``TMPDIR``). It has no name there, so the system deletes it when this
    object or the process ends, however that happens.

    Args:
        tensors: names and tensors, on any device; they are read one after the other.

    Raises:
        OSError: if the file cannot be written.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._places: dict[str, tuple[int, torch.dtype, torch.Size]] = {}
        self._file = TemporaryFile()  # noqa: SIM115 - open as long as this object exists
        finalize(self, _close, self._file)
        buffer = torch.empty(0, dtype=torch.uint8)  # reused, since new memory takes as long as the copy
        for name, tensor in tensors:
            self._places[name] = self._file.tell(), tensor.dtype, tensor.shape
            if tensor.nbytes > len(buffer):
                buffer = torch.empty(tensor.nbytes, dtype=torch.uint8)
            content = buffer[: tensor.nbytes]
            content.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
            self._file.write(content.numpy().data)
        self._file.flush()

    def __getitem__(self, name: str) -> Tensor:
        offset, dtype, shape = self._places[name]
        buffer, content = _memory_for(dtype, shape)
        self._file.seek(offset)
        if self._file.readinto(buffer) != buffer.nbytes:
            raise OSError(f"The temporary file with a copy of {name!r} is shorter than when it was written.")
        return content

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _close(file: IO[bytes]) -> None:
    with suppress(OSError):  # closing a file repeats a write that failed
        file.close()


def _memory_for(dtype: torch.dtype, shape: torch.Size) -> tuple[memoryview, Tensor]:
    """Return new memory as bytes and as a tensor."""
    content = torch.empty(prod(shape) * dtype.itemsize, dtype=torch.uint8)
    return content.numpy().data, content.view(dtype).view(shape)
