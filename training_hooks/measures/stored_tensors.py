"""Tensors in a temporary file, for copies that are large and rarely read.

A hook that compares the weights with those of its start or of its last report keeps copies as large as the model.
Copies in bfloat16 would falsify small distances, and views into a checkpoint would need one at the start of every run.
Parameters on a device stay there: a copy to the host would make every report wait for the device.
"""

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
        self._file = TemporaryFile(buffering=0)  # noqa: SIM115 - open as long as this object exists
        finalize(self, _close, self._file)
        for name, tensor in tensors:
            self._places[name] = self._file.tell(), tensor.dtype, tensor.shape
            self._write(tensor)

    def __getitem__(self, name: str) -> Tensor:
        offset, dtype, shape = self._places[name]
        content = torch.empty(prod(shape) * dtype.itemsize, dtype=torch.uint8)
        rest = content.numpy().data
        self._file.seek(offset)
        while rest:
            size = self._file.readinto(rest)
            if not size:
                raise OSError(f"The temporary file with a copy of {name!r} is shorter than when it was written.")
            rest = rest[size:]
        return content.view(dtype).view(shape)

    def replace(self, name: str, tensor: Tensor) -> None:
        """Overwrite a copy by another tensor of its dtype and shape.

        Raises:
            OSError: if the file cannot be written.
        """
        self._file.seek(self._places[name][0])
        self._write(tensor)

    def _write(self, tensor: Tensor) -> None:
        content = tensor.detach().cpu().contiguous()
        rest = content.view(-1).view(torch.uint8).numpy().data
        while rest:  # a system may write less than it was given, such as 2 GB at a time
            rest = rest[self._file.write(rest) :]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _close(file: IO[bytes]) -> None:
    with suppress(OSError):  # a delayed write that failed
        file.close()
