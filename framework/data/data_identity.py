"""The identity of a run's data: number of rows, a digest that detects changes, and the source of their order."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from ..state import described, visited
from ..tensors import in_bytes
from .batches import ROWED
from .loaders import Batch, Loader

Buffer = bytes | memoryview
PIECES, PIECE = 64, 2**20
"""Number and size in bytes of the pieces that are read of larger data."""
BY_FUNCTION, IN_A_FILE, UNKNOWN = "function", "file", "unknown"


def fingerprint(loader: Loader, first: Callable[[], Batch]) -> dict[str, Any]:
    """Return the identity of a loader's data as plain values; ``first`` draws the first batch without side effects.

    ``rows`` is the number of rows. ``xxh3_128`` is a digest that ``covers`` every row, 64 evenly spaced pieces of 1 MiB
    of larger data, or the first batch; it is missing if the loader gives neither the data nor row numbers. ``order`` is
    the source of the rows' order: a function of the epoch, a file in the record, or unknown.
    """
    source, numbered = loader.source_of_rows(), loader.row_indices(0) is not None
    identity: dict[str, Any] = {"rows": source.rows, "covers": "nothing", "order": UNKNOWN}
    if numbered:
        identity["order"] = BY_FUNCTION if source.by_function else IN_A_FILE
    if source.arrays:
        large = sum(array.nbytes for array in source.arrays) > PIECES * PIECE
        identity |= {"covers": "pieces" if large else "every row", "xxh3_128": _digest(_arrays(source.arrays, large))}
    elif numbered:
        identity |= {"covers": "the first batch", "xxh3_128": _digest(_of_batch(first()))}
    return identity


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
        # piece n of count starts at row floor(last * n / (count - 1)): evenly spaced, with the first and the last rows
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
    """Return the bytes of a part of the data in row-major order, from any device and layout."""
    if isinstance(part, Tensor):
        if part.layout is not torch.strided or part.is_quantized:
            return described(part).encode()
        return in_bytes(part.detach().cpu().resolve_conj().resolve_neg()).numpy().data
    if part.dtype.hasobject:
        return described(part.tolist()).encode()
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8).data


def data_changed(previous: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether data differ from an earlier fingerprint; ``False`` if that has no digest."""
    names = ("rows", "covers", "xxh3_128")
    return "xxh3_128" in previous and any(previous.get(name) != now.get(name) for name in names)
