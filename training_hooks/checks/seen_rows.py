"""Rows of the data that a run has seen in the current epoch, by their fingerprints."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from loopscope.hooks import Remembered, Remembering
from torch import Tensor

from ..measures import splitmix64
from .batch_facts import BatchPart

MOST_ROWS = 200_000
"""Fingerprints that are kept in an epoch."""
MOST_WORDS = 512
"""Elements of a row that its fingerprint contains, evenly spaced: 11 ms for 256 images of 3 × 224 × 224, where 4,096
elements take 90 ms."""
ALL_SEEN, FEW_SEEN = 0.8, 0.35
"""Shares of repeated rows that show the start of the second pass over the data, and the largest mean before it."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprints(part: BatchPart) -> Tensor:
    """Return a number for each row of inputs and targets, int64, that differs between different rows.

    It is Σ_j m_j·w_j modulo 2⁶⁴ over the elements w_j of the row, read as integers, with fixed random odd factors m_j.
    Two different rows agree with a probability of about 2⁻⁴⁰ or less.
    """
    words = [_words(part.inputs)]
    if part.targets is not None and len(part.targets) == len(part.inputs):
        words.append(_words(part.targets))
    rows = torch.cat(words, dim=1)
    factors = splitmix64(0, rows.shape[1]) | 1
    return (rows * factors).sum(dim=1)


def _words(tensor: Tensor) -> Tensor:
    """Return elements of each row as integers, shape (rows, elements), int64."""
    rows = tensor.detach().reshape(len(tensor), -1)
    stride = -(-rows.shape[1] // MOST_WORDS)
    chosen = rows[:, :: max(1, stride)].contiguous()
    if chosen.is_floating_point():
        chosen = chosen.view(INTEGERS[chosen.itemsize])
    words = chosen.long()
    # Round floating-point numbers differ in their high bits only, of which a product modulo 2⁶⁴ loses most.
    # w ^ (w >> n) spreads them to the low bits, and is one to one.
    for bits in (32, 16):
        words = words ^ (words >> bits).bitwise_and(2 ** (64 - bits) - 1)
    return words


def _no_tensor() -> None:
    """Return nothing, as the weak reference to a tensor that is gone."""


class SeenRows(Remembering):
    """The fingerprints of the rows of an epoch, up to a number of them."""

    _epoch = Remembered(-1)
    _seen = Remembered(set[int], saved=False)
    _last = Remembered(list[int], saved=False)
    """The rows of the last batch."""
    _inputs = Remembered[Callable[[], Tensor | None]](lambda: _no_tensor, saved=False)
    """A weak reference to the inputs of the last batch."""
    _same = Remembered(int)
    """Batches in a row that were equal to the one before."""
    _repeats = Remembered(float)
    """The sum of the shares of repeated rows, in a loop that does not show its epochs."""
    _batches = Remembered(int)
    """The batches of its first pass over the data."""
    _has_passed = Remembered(bool)
    """Whether this pass has ended."""

    def add(self, parts: Sequence[BatchPart], epoch: int | None) -> dict[str, float]:
        """Add the rows of a batch; return the shares that the epoch, or the batch itself, already has.

        Without an ``epoch``, in a loop of steps, the first pass over the data counts: it ends at a batch of which
        nearly all rows have been seen, after batches of which few had. Later repetitions are those of epochs.
        """
        if epoch is not None and epoch != self._epoch:
            self._epoch, self._seen, self._last = epoch, set(), []
        rows = [row for part in parts for row in fingerprints(part).tolist()]
        if not rows:
            return {}
        # A loop that trains on all of its data in every step gives one tensor again and again.
        is_copy = rows == self._last and self._inputs() is not parts[0].inputs
        self._same = self._same + 1 if is_copy else 0
        self._last, self._inputs = rows, weakref.ref(parts[0].inputs)
        repeated = sum(row in self._seen for row in rows)
        distinct = set(rows)
        if len(self._seen) + len(distinct) <= MOST_ROWS:
            self._seen |= distinct
        share = repeated / len(rows)
        if epoch is None:
            is_next_pass = share > ALL_SEEN and self._repeats < FEW_SEEN * self._batches
            self._has_passed = self._has_passed or is_next_pass
            self._repeats, self._batches = self._repeats + share, self._batches + 1
        return {
            **({} if self._has_passed else {"repeated_row_fraction": share}),
            "duplicate_row_fraction": 1 - len(distinct) / len(rows),
            "same_batch_count": self._same,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the fingerprints, sorted."""
        return super().state_dict() | {"seen": torch.tensor(sorted(self._seen), dtype=torch.int64)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        super().load_state_dict(state)
        self._seen = {*state["seen"].tolist()}
