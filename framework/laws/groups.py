"""Rows of different lengths whose entries follow each other, such as the nodes of a batch of graphs."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .recorded_step import Constant, RecordedStep
from .rows import UndecidedError

LEAST = 3
"""Rows that a batch needs."""
SUMS = {"index_add", "scatter_add", "scatter_reduce", "scatter"}
"""Functions that sum entries of rows by the number of the row."""


@dataclass(frozen=True)
class Groups:
    """The rows of a step, each a group of entries in the leading dimension of some inputs."""

    owner: Tensor
    """The row of each entry."""
    count: int
    numbering: frozenset[int]
    """The inputs that assign entries to rows, or number them: owners, lengths, offsets and edges."""
    inputs: Mapping[int, Tensor]
    are_rows: bool = True
    """Whether the groups are the rows; otherwise they are connected parts, of which a row has one or more."""

    @classmethod
    def of(cls, step: RecordedStep) -> "Groups":
        """Find the groups by an input with the row, the lengths or the offsets of entries, or by edges.

        Raises:
            UndecidedError: no input shows them.
        """
        inputs = {index: step.constants[index] for index in step.constants_of_passes() if step.constants[index].ndim}
        whole = {index: item for index, item in inputs.items() if not item.is_floating_point() and item.numel()}
        # Also the row of each node, by which the script sums outputs of nodes.
        pooled = {
            item.index
            for call in step.calls
            if call.name.rstrip("_") in SUMS
            for item in step.items_of(call)
            if isinstance(item, Constant)
        }
        edges = {index: item for index, item in whole.items() if item.ndim == 2 and len(item) == 2}
        lengths = {len(item) for index, item in inputs.items() if index not in edges}
        for index, item in (whole | {index: step.constants[index] for index in pooled - set(inputs)}).items():
            owner = _owner(item, lengths) if item.ndim == 1 and not item.is_floating_point() else None
            if owner is not None and LEAST <= (count := int(owner.max()) + 1) < len(owner):
                return cls(owner, count, frozenset({index, *edges}), inputs)
        for index, item in edges.items():
            for length in sorted(lengths):
                if int(item.min()) >= 0 and int(item.max()) < length and length > LEAST:
                    owner = _components(item, length)
                    return cls(owner, int(owner.max()) + 1, frozenset({index}), inputs, are_rows=False)
        raise UndecidedError("the inputs have different lengths, and none shows the rows of their entries")

    def with_other_content(self, group: int) -> dict[int, Tensor]:
        """Return the inputs with the entries of a group replaced by those of other groups."""
        chosen = (self.owner == group).nonzero().flatten()
        others = (self.owner != group).nonzero().flatten()
        changed = {}
        for index, item in self.inputs.items():
            if index not in self.numbering and len(item) == len(self.owner):
                changed[index] = item.clone()
                changed[index][chosen] = item[others[torch.arange(len(chosen)) % len(others)]]
        return changed

    def rows_of(self, output: Tensor) -> Tensor | None:
        """Return the row of each entry in the leading dimension of an output, if it has any."""
        if output.ndim and len(output) == self.count and self.are_rows:
            return torch.arange(self.count)
        return self.owner if output.ndim and len(output) == len(self.owner) else None


def _owner(item: Tensor, lengths: set[int]) -> Tensor | None:
    """Return the row of each entry, if this input shows it: by rows in order, by their lengths, or by their offsets."""
    item = item.cpu().long()
    steps = item.diff()
    if int(item[0]) == 0 and len(item) > LEAST and len(item) in lengths and bool(((steps == 0) | (steps == 1)).all()):
        return item
    for length in lengths:
        if len(item) >= LEAST and int(item.min()) >= 0 and int(item.sum()) == length:
            return torch.arange(len(item)).repeat_interleave(item)
        if len(item) > LEAST and int(item[0]) == 0 and int(item[-1]) == length and bool((steps > 0).all()):
            return torch.arange(len(steps)).repeat_interleave(steps)
    return None


def _components(edges: Tensor, length: int) -> Tensor:
    """Return the number of the connected component of each node."""
    edges, labels = edges.cpu().long(), torch.arange(length)
    while True:
        least = torch.minimum(labels[edges[0]], labels[edges[1]])
        new = labels.scatter_reduce(0, edges[0], least, "amin").scatter_reduce(0, edges[1], least, "amin")
        new = new[new]
        if torch.equal(new, labels):
            numbers: Tensor = torch.unique(labels, return_inverse=True)[1]
            return numbers
        labels = new
