"""The rows of several micro-batches in one batch; shorter sequences get the padding that others have."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .padding import tail_of
from .rows import RowLayout, UndecidedError
from .trial import Trial


class JoinedBatches:
    """The micro-batches of a step, in which the rows of several ones are joined.

    Raises:
        UndecidedError: they do not have the same calls, or no entries for each row.
    """

    def __init__(self, trial: Trial) -> None:
        steps, self._layouts, self._bundles = trial.steps, trial.layout.layouts, trial.bundles
        calls = {tuple(call.name for call in step.calls) for step in steps}
        used = [step.used_constants() for step in steps]
        if len(set(map(len, used))) > 1 or len(calls) > 1:
            raise UndecidedError("the micro-batches have different calls")
        if any(self._layouts.get(index) not in (None, RowLayout.FIRST, RowLayout.FLAT) for index in used[0]):
            raise UndecidedError("the rows of the micro-batches cannot be joined")
        first = next((index for index in trial.inputs if self._layouts.get(index) is RowLayout.FIRST), None)
        if first is None:
            raise UndecidedError("the rows of the micro-batches cannot be joined")
        self._parts: dict[int, list[Tensor]] = {}
        """For each constant with rows that of every micro-batch, of shape (rows, ...)."""
        self._of_bundles = trial.layout.of_bundles(trial.step, len(trial.bundles)) if trial.bundles.members > 1 else []
        for places in zip(*used, strict=True):
            parts = [step.constants[place] for step, place in zip(steps, places, strict=True)]
            self._parts[places[0]] = parts
        rows = list(map(len, self._parts[first]))
        for index in used[0]:
            if index not in self._layouts and index not in self._of_bundles:
                del self._parts[index]
            elif self._layouts.get(index) is RowLayout.FLAT:
                self._parts[index] = [
                    part.reshape(count, -1, *part.shape[1:])
                    for count, part in zip(rows, self._parts[index], strict=True)
                ]
        self._with_lengths = {
            index
            for index, parts in self._parts.items()
            if parts[0].ndim > 1 and len({part.shape[1] for part in parts}) > 1
        }
        self._tails = [tail for part in self._parts[first] if (tail := tail_of(part)) is not None]

    @property
    def shortest(self) -> int | None:
        """The micro-batch with the shortest sequences; ``None`` if all have one length."""
        lengths = next(([part.shape[1] for part in self._parts[index]] for index in sorted(self._with_lengths)), [])
        return lengths.index(min(lengths)) if lengths else None

    def joined(self, places: Sequence[int], *, is_full: bool = False) -> dict[int, Tensor]:
        """Return the constants of the first micro-batch with the rows of those at some places, one after the other.

        ``is_full`` makes sequences as long as the longest of all micro-batches.

        Raises:
            UndecidedError: the micro-batches have different lengths, and no padding.
        """
        changed = {}
        for index, every in self._parts.items():
            parts = [every[place] for place in places]
            if index in self._with_lengths:
                width = max(part.shape[1] for part in (every if is_full else parts))
                parts = [self._padded(index, part, width) for part in parts]
            if len({part.shape[1:] for part in parts}) > 1:
                raise UndecidedError("the micro-batches have different lengths")
            whole = torch.cat(parts) if index in self._of_bundles else self._bundles.joined(parts)
            changed[index] = whole.flatten(0, 1) if self._layouts.get(index) is RowLayout.FLAT else whole
        return changed

    def _padded(self, index: int, part: Tensor, width: int) -> Tensor:
        missing = width - part.shape[1]
        if not missing:
            return part
        return torch.cat([part, self._content(index).expand(len(part), missing, *part.shape[2:])], 1)

    def _content(self, index: int) -> Tensor:
        """Return what a constant has at padded positions: one content there, or the most frequent end of a row.

        Raises:
            UndecidedError: neither exists.
        """
        parts = self._parts[index]
        for part, tail in ((part, tail) for part in parts for tail in self._tails):
            if part.shape[:2] == tail.shape and bool((part[tail] == part[tail][:1]).all()):
                return part[tail][0]
        ends = torch.cat([part[:, -1] for part in parts])
        if ends.ndim == 1:
            return ends.mode().values
        if bool((ends == 0).flatten(1).all(1).any()):
            return torch.zeros_like(ends[0])
        raise UndecidedError("the micro-batches have different lengths, and no padding")
