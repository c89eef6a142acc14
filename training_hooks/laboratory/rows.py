"""Detection of outlier rows and repeated rows in a batch."""

from collections import Counter
from collections.abc import Sequence

import torch
from loopscope.data import Batch, MicroBatches, part_of, rows
from loopscope.hooks import ModelDataContext
from loopscope.state import visited
from loopscope.tensors import in_bytes
from torch import Tensor

STANDS_OUT = 6.0
"""A row stands out if it is this many spreads above the median, and above all rows of fresh batches."""


def outliers(own: Tensor, others: Tensor) -> list[int]:
    """Return the positions whose loss or gradient norm is above all others and far above their median.

    Shapes (2, rows) each. The spread is 1.4826 times the median distance from the median, of logarithms if all values
    are positive. Rows with values that are not finite stand out.
    """
    places: set[int] = set()
    for values, other_values in zip(own, others, strict=True):
        finite = other_values[other_values.isfinite()]
        if not len(finite):
            continue
        if bool((finite > 0).all()) and bool((values[values.isfinite()] > 0).all()):
            values, finite = values.log(), finite.log()
        middle = finite.median()
        # 1.4826 times the median absolute deviation is the standard deviation of a normal distribution.
        spread = 1.4826 * (finite - middle).abs().median()
        far = (values > middle + STANDS_OUT * spread) & (values > finite.max())
        places.update((far | ~values.isfinite()).nonzero().flatten().tolist())
    return sorted(places)


def repeated(batch: Batch, others: Sequence[Batch]) -> list[int]:
    """Return the positions of further copies of a row, if no other batch has half as many copies of any row."""
    most = max(map(copies, others), default=1)
    contents = row_contents(batch)
    counts = Counter(contents)
    firsts = {content: place for place, content in reversed([*enumerate(contents)])}
    return [place for place, row in enumerate(contents) if place != firsts[row] and counts[row] > 2 * most]


def outlier_rows(batch: Batch, measured: Tensor, others: Sequence[Batch], usual: Tensor) -> list[int]:
    """Return the positions of outliers and of repeated rows; ``measured`` and ``usual`` as in :func:`outliers`."""
    return sorted({*outliers(measured, usual), *repeated(batch, others)})


def without_rows(batch: Batch, places: Sequence[int]) -> Batch:
    """Return the batch without the rows at some positions."""
    return part_of(batch, [place for place in range(rows(batch)) if place not in places])


def row_contents(batch: Batch) -> list[bytes]:
    """Return the bytes of each row."""
    if isinstance(batch, MicroBatches):
        return [content for part in batch for content in row_contents(part)]
    leaves = [leaf.detach().cpu() for _, leaf, _ in visited("", batch) if isinstance(leaf, Tensor) and leaf.ndim]
    plain = [in_bytes(leaf).view(len(leaf), -1).numpy() for leaf in leaves if leaf.numel()]
    return [b"".join(tensor[place].tobytes() for tensor in plain) for place in range(rows(batch))]


def measure_rows(model_ctx: ModelDataContext, batch: Batch) -> Tensor:
    """Return loss and gradient norm of each row, shape (2, rows)."""
    return torch.stack([values.cpu() for values in model_ctx.measure_rows(batch)])


def exclude_shared_rows(batch: Batch, others: Sequence[Batch], fewest: int = 0) -> Sequence[Batch]:
    """Return the other batches without rows that are also in ``batch``; omits batches that lose more than half.

    If fewer than ``fewest`` are left, as in a small data set, all of them are returned as they are.
    """
    own_rows, kept = {*row_contents(batch)}, []
    for other in others:
        places = [place for place, row in enumerate(row_contents(other)) if row not in own_rows]
        if 2 * len(places) >= rows(other):
            kept.append(other if len(places) == rows(other) else part_of(other, places))
    return kept if len(kept) >= fewest else others


def copies(batch: Batch) -> int:
    """Return the number of copies of the most frequent row in a batch."""
    return max(Counter(row_contents(batch)).values(), default=0)
