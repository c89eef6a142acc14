"""The values of a few scalars at the newest steps, kept on their device without a transfer to the host."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from framework.param_vectors import whole


class StepWindow:
    """A ring buffer of shape (rows, length), float64: one column a step, the oldest overwritten first."""

    def __init__(self, rows: int, length: int) -> None:
        self._values = torch.zeros(rows, length, dtype=torch.float64)
        self.count = 0
        """Columns written so far, those overwritten since included."""

    @property
    def is_full(self) -> bool:
        """Tell whether every column was written."""
        return self.count >= self._values.shape[1]

    @property
    def unordered(self) -> Tensor:
        """The columns that were written, in the order of the buffer: a view, overwritten by the next values."""
        return self._values if self.is_full else self._values[:, : self.count]

    @property
    def ordered(self) -> Tensor:
        """A copy of the columns that were written, oldest first."""
        start = self.count % self._values.shape[1] if self.is_full else 0
        return self.unordered.roll(-start, dims=1)

    def push(self, column: Tensor) -> None:
        """Write the next column, of shape (rows,); the buffer follows it to its device."""
        self._values = self._values.to(column.device)
        self._values[:, self.count % self._values.shape[1]] = column
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the buffer and how many columns it was given."""
        return {"values": self._values, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back, as a copy, what :meth:`state_dict` returned."""
        self._values = state["values"].clone()
        self.count = state["count"]


def column(*scalars: Any) -> Tensor:
    """Return scalars as one column: shape (number of scalars,), float64, on the first one's device.

    >>> column(torch.tensor(0.5), 2.0)
    tensor([0.5000, 2.0000], dtype=torch.float64)
    """
    tensors = [whole(torch.as_tensor(scalar)) for scalar in scalars]
    return torch.stack([tensor.to(tensors[0].device, torch.float64) for tensor in tensors])
