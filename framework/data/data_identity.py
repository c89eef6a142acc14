"""What a run's data are: how many rows, a digest by which a change shows, and where their order comes from."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from ..state import described, in_bytes, visited
from .batches import ROWED
from .loaders import Batch, Loader

Buffer = bytes | memoryview
PIECES, PIECE = 64, 2**20
"""How many pieces of how many bytes are read of data that have more."""
BY_FUNCTION, IN_A_FILE, UNKNOWN = "function", "file", "unknown"


def fingerprint(loader: Loader, first: Callable[[], Batch]) -> dict[str, Any]:
    """Return in plain values what a loader's data are; ``first`` draws the first batch and leaves nothing behind.

    ``rows`` is their number, ``xxh3_128`` a digest that ``covers`` every row, 64 evenly spread pieces of 1 MiB of the
    data of more than that, or the first batch; of data that are not at hand and whose rows have no numbers, nothing.
    ``order`` is that of the rows: a function of the epoch, or a file in the record that holds it, or unknown.
    """
    source, numbered = loader.source_of_rows(), loader.row_indices(0) is not None
    found: dict[str, Any] = {"rows": source.rows, "covers": "nothing", "order": UNKNOWN}
    if numbered:
        found["order"] = BY_FUNCTION if source.by_function else IN_A_FILE
    if source.arrays:
        large = sum(array.nbytes for array in source.arrays) > PIECES * PIECE
        found |= {"covers": "pieces" if large else "every row", "xxh3_128": _digest(_arrays(source.arrays, large))}
    elif numbered:
        found |= {"covers": "the first batch", "xxh3_128": _digest(_of_batch(first()))}
    return found


def _digest(parts: Iterator[Buffer]) -> str:
    summary = xxhash.xxh3_128()
    for part in parts:
        summary.update(part)
    return summary.hexdigest()


def _arrays(arrays: Sequence[Tensor | np.ndarray], large: bool) -> Iterator[Buffer]:
    count = max(1, PIECES // len(arrays))
    for array in arrays:
        yield f"{array.dtype} {tuple(array.shape)}".encode()
        piece = max(1, PIECE * len(array) // max(1, array.nbytes)) if large else len(array)  # rows
        last = max(0, len(array) - piece)
        for place in dict.fromkeys(last * number // max(1, count - 1) for number in range(count)) if large else [0]:
            yield _bytes(array[place : place + piece])


def _of_batch(batch: Batch) -> Iterator[Buffer]:
    for path, leaf, holds in visited("", batch):
        if isinstance(leaf, ROWED):
            yield f"{path} {leaf.dtype} {tuple(leaf.shape)}".encode()
            yield _bytes(leaf)
        elif not holds:
            yield f"{path} {described(leaf)}".encode()


def _bytes(part: Tensor | np.ndarray) -> Buffer:
    """Return the bytes of a part of the data, row by row, whatever it is on and however it lies."""
    if isinstance(part, Tensor):
        if part.layout is not torch.strided or part.is_quantized:
            return described(part).encode()
        return in_bytes(part.detach().cpu().resolve_conj().resolve_neg()).numpy().data
    if part.dtype.hasobject:
        return described(part.tolist()).encode()
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8).data


def data_changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether data are others than those of an earlier fingerprint; of one without a digest nobody knows."""
    names = ("rows", "covers", "xxh3_128")
    return "xxh3_128" in before and any(before.get(name) != now.get(name) for name in names)
