"""Rows of a batch that stand out: by numbers measured of each, or because they stand there several times."""

from collections import Counter
from collections.abc import Sequence

from loopscope.data import Batch, part_of, rows
from loopscope.state import in_bytes, visited
from torch import Tensor

STANDS_OUT = 6.0
"""From how many spreads above the middle on a row stands out, if it is above all rows of fresh batches, too."""


def outliers(own: Tensor, others: Tensor) -> list[int]:
    """Return the places whose loss or gradient norm is above all others' and far above their middle.

    Shapes (2, rows) each; the spread is 1.4826 times the median distance from the median, of logarithms where all
    values are positive. What is not finite stands out.
    """
    places: set[int] = set()
    for mine, theirs in zip(own, others, strict=True):
        known = theirs[theirs.isfinite()]
        if not len(known):
            continue
        if bool((known > 0).all()) and bool((mine > 0).all()):
            mine, known = mine.log(), known.log()
        middle = known.median()
        spread = 1.4826 * (known - middle).abs().median()
        far = (mine > middle + STANDS_OUT * spread) & (mine > known.max())
        places.update((far | ~mine.isfinite()).nonzero().flatten().tolist())
    return sorted(places)


def repeated(batch: Batch, others: Sequence[Batch]) -> list[int]:
    """Return the places of all copies of a row but the first, where no other batch has half as many of one row."""
    most = max(map(copies, others), default=1)
    contents = contents_of(batch)
    counts = Counter(contents)
    firsts = {content: place for place, content in reversed([*enumerate(contents)])}
    return [place for place, each in enumerate(contents) if place != firsts[each] and counts[each] > 2 * most]


def contents_of(batch: Batch) -> list[bytes]:
    """Return the bytes of each row."""
    leaves = [leaf.detach().cpu() for _, leaf, _ in visited("", batch) if isinstance(leaf, Tensor) and leaf.ndim]
    plain = [in_bytes(leaf).view(len(leaf), -1).numpy() for leaf in leaves if leaf.numel()]
    return [b"".join(tensor[place].tobytes() for tensor in plain) for place in range(rows(batch))]


def without_rows_of(batch: Batch, others: Sequence[Batch]) -> list[Batch]:
    """Return the other batches without rows that ``batch`` has, too; those that keep less than half are left out."""
    own, found = {*contents_of(batch)}, []
    for other in others:
        places = [place for place, row in enumerate(contents_of(other)) if row not in own]
        if 2 * len(places) >= rows(other):
            found.append(other if len(places) == rows(other) else part_of(other, places))
    return found


def copies(batch: Batch) -> int:
    """Return how often the row stands in a batch that stands there most often."""
    return max(Counter(contents_of(batch)).values(), default=0)
