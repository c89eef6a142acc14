"""The elements of parameters that are looked at, a sample or all, with copies of them from before a step."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any

import torch
from loopscope.state import WIDE, is_sharded, laid_out_like, local_shards
from torch import Tensor, nn

from .element_samples import held_here, sample_indices

AT_ONCE = 2**17
"""Elements that are copied or compared together: what a cache holds."""
SAMPLED_AT_ONCE = 2**15
"""Sampled elements that are compared together: they take as much memory again meanwhile."""
ROW = 1024
"""Elements that are added up in one go: of a million, rounding would leave an error of 1e-5, of these one of 1e-7."""
WHOLE = 2 * ROW
"""Elements up to which a tensor is added up in one go all the same: below, rows are not worth their calls."""
KIND = attrgetter("shape", "dtype", "device")
Named = Mapping[str, nn.Parameter]


@dataclass(frozen=True)
class Choice:
    """What is looked at of one parameter."""

    shard: torch.Size
    """The shape of the part of the parameter that lies on this rank."""
    dtype: torch.dtype
    indices: Tensor | None
    """Places in that part, flattened; ``None``: all of it."""
    looked_at: int
    """How many elements are looked at, on all ranks together."""
    elements: int
    """How many the whole parameter has."""

    @property
    def share(self) -> float:
        """How many elements stand behind each one that is looked at."""
        return self.elements / self.looked_at

    def suits(self, shard: Tensor) -> bool:
        """Return whether it was made for a tensor of this shape and dtype on this device."""
        here = self.indices is None or self.indices.device == shard.device
        return here and (self.shard, self.dtype) == (shard.shape, shard.dtype)

    @property
    def shape(self) -> torch.Size:
        """The shape of what is looked at on this rank."""
        return self.shard if self.indices is None else self.indices.shape

    def of(self, shard: Tensor) -> Tensor:
        """Return what is looked at of a tensor laid out like the part of the parameter on this rank."""
        if self.indices is None:
            return shard
        if shard.is_contiguous():
            return shard.view(-1).index_select(0, self.indices)
        return torch.take(shard, self.indices.long())


class Block:
    """What is looked at of some parameters of one dtype on one device, in one buffer of rows.

    A row has :data:`ROW` elements, or as many as the largest of them needs. Every parameter begins a row; the rest of
    its last one is zeros. A number per parameter comes as a vector, shape (parameters,), in float32 or wider.
    """

    def __init__(self, names: Sequence[str], choices: Sequence[Choice], device: torch.device) -> None:
        self.names = list(names)
        self._choices = list(choices)
        sizes = [choice.shape.numel() for choice in choices]
        width = max(1, min(ROW, max(sizes)))
        self._row_counts = [max(1, -(-size // width)) for size in sizes]
        self._lengths = torch.tensor(self._row_counts, device=device)
        dtype = choices[0].dtype
        self.is_wide = dtype in WIDE
        """Whether the elements are in float32 or wider."""
        self._wide = dtype if self.is_wide else torch.float32
        self.rows = torch.zeros(sum(self._row_counts), width, dtype=dtype, device=device)
        parts = torch.split(self.rows, self._row_counts)
        self.views = [
            part.view(-1)[:size].view(choice.shape) for part, size, choice in zip(parts, sizes, choices, strict=True)
        ]
        self._all = all(choice.indices is None for choice in choices)
        self._pieces = pieces(self._row_counts, (AT_ONCE if self._all else SAMPLED_AT_ONCE) // width)

    def keep(self, shards: Sequence[Tensor]) -> Tensor:
        """Copy what is looked at of the tensors, and return its norms."""
        found = []
        for these, rows in self._pieces:
            self._copy(these, shards)
            found.append(torch.linalg.vector_norm(self.rows[rows], dim=1, dtype=self._wide))
        return self._for_each(torch.cat(found), 2)

    def _copy(self, these: slice, shards: Sequence[Tensor]) -> None:
        if self._all:
            torch._foreach_copy_(self.views[these], list(shards[these]))
            return
        whole: tuple[list[Tensor], list[Tensor]] = ([], [])
        for choice, view, shard in zip(self._choices[these], self.views[these], shards[these], strict=True):
            if choice.indices is not None and shard.is_contiguous() and shard.dtype is view.dtype:
                torch.index_select(shard.view(-1), 0, choice.indices, out=view)
            else:
                whole[0].append(view)
                whole[1].append(choice.of(shard))
        if whole[0]:
            torch._foreach_copy_(*whole)

    def measure(self, shards: Sequence[Tensor], *, extremes: bool) -> list[Tensor]:
        """Return the norms of what is looked at of the tensors, and ``extremes``, the largest and the sum of |x|.

        Overwrites the copies, unless all is looked at.
        """
        if self._all:
            orders = (2.0, math.inf, 1.0) if extremes else (2.0,)
            return [norms(shards, order) for order in orders]
        found = [self.keep(shards)]
        if extremes:
            sizes = self.rows.abs_()
            found.append(self._for_each(sizes.amax(1).to(self._wide), math.inf))
            found.append(self._for_each(sizes.sum(1, dtype=self._wide), 1))
        return found

    def compare(
        self, shards: Sequence[Tensor], gradients: Sequence[Tensor | None], decays: Sequence[float | None]
    ) -> list[Tensor]:
        """Return the norms of the changes since :meth:`keep`, then four counts of elements below float32.

        Driven are those whose gradient is not zero, stuck those of them that are where the decay alone takes them.
        Decayed are those that are not zero where there is a decay, undecayed those of them that the decay alone leaves
        as they are. ``decays`` holds the share that a step's decay takes of a weight, ``None`` where no step is made:
        there nothing is driven. Overwrites the copies.
        """
        if self.is_wide:
            none = torch.zeros(len(self.names), device=self.rows.device)
            return [self._changes(shards), none, none, none, none]
        changes, counts = [], []
        for these, _ in self._pieces:
            before, now = self.views[these], self._looked_at(these, shards)
            changes.append(norms([one.float() - other.float() for one, other in zip(before, now, strict=True)]))
            looked_at = zip(self._choices[these], gradients[these], before, now, decays[these], strict=True)
            for choice, gradient, old, new, decay in looked_at:
                counts.append(_counts(None if gradient is None else choice.of(gradient) != 0, old, new, decay))
        return [torch.cat(changes), *torch.stack(counts).unbind(1)]

    def _changes(self, shards: Sequence[Tensor]) -> Tensor:
        found = []
        for these, rows in self._pieces:
            torch._foreach_sub_(self.views[these], self._looked_at(these, shards))
            found.append(torch.linalg.vector_norm(self.rows[rows], dim=1))
        return self._for_each(torch.cat(found), 2)

    def _looked_at(self, these: slice, shards: Sequence[Tensor]) -> list[Tensor]:
        if self._all:
            return list(shards[these])
        return [choice.of(shard) for choice, shard in zip(self._choices[these], shards[these], strict=True)]

    def _for_each(self, values: Tensor, order: float) -> Tensor:
        """Combine a number per row into one per parameter: root of the summed squares, largest, or sum."""
        if len(values) == len(self.names):
            return values
        if order == 2:
            squares = values.double().square()
            # unsafe: the check of the lengths, which are right, would wait for the device
            return torch.segment_reduce(squares, "sum", lengths=self._lengths, unsafe=True).sqrt().to(self._wide)
        return torch.stack(torch._foreach_norm(torch.split(values, self._row_counts), order))


class WatchedElements:
    """Chooses elements by name and shape of their parameter, once, and measures them around a step.

    What it returns are tables, a list of rows for each block of parameters with one number per parameter in each row;
    the parameters are in the order of :attr:`names`.

    Args:
        sample_size: elements of each parameter; ``None``: all.
    """

    def __init__(self, sample_size: int | None) -> None:
        self._sample_size = sample_size
        self._choices: dict[str, Choice] = {}
        self._blocks: list[Block] = []
        self._planned_for: dict[str, Any] = {}
        self._norms: list[Tensor] = []
        self._loaded: Mapping[str, Any] = {}

    def __getitem__(self, name: str) -> Choice:
        """Return what was chosen of a parameter."""
        return self._choices[name]

    @property
    def names(self) -> list[str]:
        """The parameters that were measured last, or loaded."""
        return (
            list(self._loaded["copies"]) if self._loaded else [name for block in self._blocks for name in block.names]
        )

    @property
    def keeps(self) -> bool:
        """Whether there are copies to compare with."""
        return bool(self._norms or self._loaded)

    @property
    def bytes(self) -> int:
        """The memory of indices and buffers."""
        indices = [choice.indices for choice in self._choices.values() if choice.indices is not None]
        return sum(tensor.nbytes for tensor in [*indices, *(block.rows for block in self._blocks)])

    @torch.no_grad()
    def measure(self, parameters: Named, *, extremes: bool) -> list[list[Tensor]]:
        """Measure the gradients (:meth:`Block.measure`), then copy the parameters; every one has a gradient."""
        shards = self._plan(parameters)
        gradients = dict(zip(parameters, gradient_shards(parameters.values()), strict=True))
        tables = [block.measure([gradients[name] for name in block.names], extremes=extremes) for block in self._blocks]
        self._norms = [block.keep([shards[name] for name in block.names]) for block in self._blocks]
        self._loaded = {}
        return tables

    @torch.no_grad()
    def compare(self, parameters: Named, decays: Mapping[str, float]) -> list[list[Tensor]]:
        """Compare the parameters, those of :attr:`names`, with their copies, which are lost by that.

        Rows: the norm that was, that of the change, and the four counts of :meth:`Block.compare`; ``decays`` has those
        of which a step is made.
        """
        if self._loaded:
            self._plan(parameters)
            self._unload()
        shards = dict(zip(parameters, shards_of(parameters.values()), strict=True))
        tables = []
        for block, before in zip(self._blocks, self._norms, strict=True):
            low = [None if block.is_wide else parameters[name] for name in block.names]
            gradients = [None if each is None or each.grad is None else gradient_shards([each])[0] for each in low]
            ours = [decays.get(name) for name in block.names]
            tables.append([before, *block.compare([shards[name] for name in block.names], gradients, ours)])
        self._norms = []
        return tables

    def state_dict(self) -> dict[str, Any]:
        """Return the copies by parameter name and their norms, if there are any to compare with."""
        if self._loaded or not self._norms:
            return dict(self._loaded)
        copies = {name: view for block in self._blocks for name, view in zip(block.names, block.views, strict=True)}
        return {"copies": copies, "norms": list(self._norms)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what :meth:`state_dict` returned, and free the buffers that were there."""
        self._blocks, self._planned_for, self._norms, self._loaded = [], {}, [], dict(state)

    def _unload(self) -> None:
        copies = self._loaded["copies"]
        for block in self._blocks:
            torch._foreach_copy_(block.views, [copies[name].to(block.rows.device) for name in block.names])
        pairs = zip(self._loaded["norms"], self._blocks, strict=True)
        self._norms = [norms.to(block.rows.device) for norms, block in pairs]
        self._loaded = {}

    def _plan(self, parameters: Named) -> dict[str, Tensor]:
        """Return the shards by name; choose elements and make buffers unless those that are there fit."""
        shards = dict(zip(parameters, shards_of(parameters.values()), strict=True))
        like = dict(zip(shards, map(KIND, shards.values()), strict=True))
        if like != self._planned_for:
            groups: dict[Any, list[str]] = {}
            for name, shard in shards.items():
                self._choices[name] = self._choice(name, parameters[name], shard)
                groups.setdefault((shard.dtype, shard.device), []).append(name)
            self._blocks = []  # gives the memory back before the new ones take some
            self._blocks = [
                Block(names, [self._choices[name] for name in names], device) for (_, device), names in groups.items()
            ]
            self._planned_for = like
        return shards

    def _choice(self, name: str, parameter: nn.Parameter, shard: Tensor) -> Choice:
        """Return what is looked at of a parameter, chosen anew only if it is not what it was."""
        known = self._choices.get(name)
        if known is not None and known.suits(shard):
            return known
        whole = (*parameter.shape, 2) if parameter.is_complex() else tuple(parameter.shape)
        elements = math.prod(whole)
        indices = None if self._sample_size is None else sample_indices(name, whole, self._sample_size)
        if indices is None:
            return Choice(shard.shape, shard.dtype, None, elements, elements)
        here = held_here(parameter, indices) if is_sharded(parameter) else indices
        return Choice(shard.shape, shard.dtype, here.to(shard.device), len(indices), elements)


def pieces(row_counts: Iterable[int], together: int) -> list[tuple[slice, slice]]:
    """Cut parameters, each with a number of rows, into pieces of at least so many rows.

    Returns for each piece the slice of parameters and that of rows.

    >>> pieces([20, 20, 5, 5], 32)
    [(slice(0, 2, None), slice(0, 40, None)), (slice(2, 4, None), slice(40, 50, None))]
    """
    ends, rows, count = [(0, 0)], 0, 0
    for count, more in enumerate(row_counts, start=1):
        rows += more
        if rows - ends[-1][1] >= together:
            ends.append((count, rows))
    if ends[-1][0] < count:
        ends.append((count, rows))
    return [(slice(first[0], last[0]), slice(first[1], last[1])) for first, last in pairwise(ends)]


def _counts(moved: Tensor | None, before: Tensor, now: Tensor, decay: float | None) -> Tensor:
    """Return how many elements are driven, stuck, decayed and undecayed (:meth:`Block.compare`), shape (4,)."""
    start = before.float()
    alone = (start * (1 - decay)).to(before.dtype).float() if decay else start  # rounded as the optimizer rounds
    if moved is None or decay is None:
        moved = torch.zeros_like(start, dtype=torch.bool)
    decayed = (start != 0) & bool(decay)
    found = [moved, moved & (now.float() == alone), decayed, decayed & (alone == start)]
    return torch.stack([each.sum() for each in found]).float()


def shards_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that hold the bytes on this rank, complex ones as pairs of real numbers."""
    return [torch.view_as_real(shard) if shard.is_complex() else shard for shard in local_shards(parameters)]


def gradient_shards(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the gradients as far as they belong to the parameters' parts on this rank; every one has a gradient."""
    owners = list(parameters)
    live: list[Any] = [owner.grad for owner in owners]
    dense = [gradient if gradient.layout is torch.strided else gradient.to_dense() for gradient in live]
    return shards_of(map(laid_out_like, dense, owners))


def norms(tensors: Sequence[Tensor], order: float = 2) -> Tensor:
    """Return the norm of each tensor's elements (order 1, 2 or infinity) in float32 or wider, shape (tensors,).

    All are on one device.
    """
    dtype = torch.float64 if any(tensor.dtype is torch.float64 for tensor in tensors) else torch.float32
    folded = [_folded(tensor, order) for tensor in tensors]
    found = torch._foreach_norm(folded, order, dtype=dtype)
    return torch.stack(found)


def _folded(tensor: Tensor, order: float) -> Tensor:
    """Return fewer numbers of the same norm; what is on an accelerator, which adds up in a tree, as it is."""
    if not tensor.numel():
        return tensor.new_zeros(1)
    if tensor.numel() <= WHOLE or tensor.device.type != "cpu":
        return tensor
    if math.isinf(order):
        return torch.stack(torch.aminmax(tensor))
    flat = tensor.reshape(-1)
    end = flat.numel() // ROW * ROW
    rows, rest = flat[:end].view(-1, ROW), flat[end:]
    wide = tensor.dtype if tensor.dtype in WIDE else torch.float32
    slow = order == 1  # torch has no fast norm of this order
    sums = rows.abs().sum(1, dtype=wide) if slow else torch.linalg.vector_norm(rows, order, dim=1, dtype=wide)
    return torch.cat([sums, rest.to(wide)]) if end < flat.numel() else sums
