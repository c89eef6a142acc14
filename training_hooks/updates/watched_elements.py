"""Buffers of watched elements of parameters (a sample or all), with copies from before a step.

The foreach functions ``torch._foreach_*``, a beta API with which torch implements its own optimizers, process a list of
tensors in one call. A loop over the tensors would make one call, and on an accelerator one kernel launch, for each.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import Any

import torch
from loopscope.tensors import WIDE, is_sharded, laid_out_like, local_shards, norms_of, row_norms
from torch import Tensor, nn

from .element_samples import local_indices, sample_indices

PIECE = 2**17
"""Elements that are copied or compared together, so that they stay in a processor's cache."""
SAMPLED_PIECE = 2**15
"""The same for sampled elements; fewer, because the comparison needs temporary memory of the same size."""
ROW = 1024
"""Elements per float32 sum: the rounding error is 1e-7; with a million elements it would be 1e-5."""
SHORT = 2 * ROW
"""Tensors with at most this many elements are summed in one operation, because summing rows would cost more calls."""
KIND = attrgetter("shape", "dtype", "device")
Named = Mapping[str, nn.Parameter]


@dataclass(frozen=True)
class ElementSelection:
    """The watched elements of one parameter."""

    shard_shape: torch.Size
    """The shape of this rank's part of the parameter."""
    dtype: torch.dtype
    indices: Tensor | None
    """Indices into that part, flattened; ``None`` selects all of it."""
    sample_size: int
    """The number of watched elements on all ranks together."""
    elements: int
    """The number of elements of the complete parameter."""

    @property
    def elements_per_sample(self) -> float:
        """Number of elements of the parameter per watched element."""
        return self.elements / self.sample_size

    def matches(self, shard: Tensor) -> bool:
        """Return whether the selection was made for the shape, dtype and device of a tensor."""
        on_device = self.indices is None or self.indices.device == shard.device
        return on_device and (self.shard_shape, self.dtype) == (shard.shape, shard.dtype)

    @property
    def shape(self) -> torch.Size:
        """The shape of the watched elements on this rank."""
        return self.shard_shape if self.indices is None else self.indices.shape

    def select(self, shard: Tensor) -> Tensor:
        """Return the watched elements of a tensor that is laid out like this rank's part of the parameter."""
        if self.indices is None:
            return shard
        if shard.is_contiguous():
            return shard.view(-1).index_select(0, self.indices)
        return torch.take(shard, self.indices.long())


class ElementBuffer:
    """Copies of the watched elements of parameters of one dtype on one device, in the rows of one tensor.

    A row has :data:`ROW` elements, or fewer if the largest selection needs fewer. Every parameter starts a new row; the
    end of its last row is zeros. Methods return one number per parameter, shape (parameters,), in float32 or wider.
    """

    def __init__(self, names: Sequence[str], selections: Sequence[ElementSelection], device: torch.device) -> None:
        self.names = list(names)
        self._selections = list(selections)
        sizes = [selection.shape.numel() for selection in selections]
        width = max(1, min(ROW, max(sizes)))
        self._row_counts = [max(1, -(-size // width)) for size in sizes]
        self._lengths = torch.tensor(self._row_counts, device=device)
        dtype = selections[0].dtype
        self.is_wide = dtype in WIDE
        """Whether the elements are in float32 or wider."""
        self._wide = dtype if self.is_wide else torch.float32
        self.rows = torch.zeros(sum(self._row_counts), width, dtype=dtype, device=device)
        parts = torch.split(self.rows, self._row_counts)
        self.views = [
            part.view(-1)[:size].view(selection.shape)
            for part, size, selection in zip(parts, sizes, selections, strict=True)
        ]
        self._selects_all = all(selection.indices is None for selection in selections)
        piece = PIECE if self._selects_all else SAMPLED_PIECE
        self._pieces = split_into_pieces(self._row_counts, piece // width)

    def keep(self, shards: Sequence[Tensor]) -> Tensor:
        """Copy the watched elements of the tensors, and return their norms."""
        lengths = []
        for members, rows in self._pieces:
            self._copy(members, shards)
            lengths.append(row_norms(self.rows[rows]))
        return self._combine_rows(torch.cat(lengths), 2)

    def _copy(self, members: slice, shards: Sequence[Tensor]) -> None:
        if self._selects_all:
            torch._foreach_copy_(self.views[members], list(shards[members]))
            return
        # Samples of contiguous tensors of the same dtype go directly into the buffer, without a temporary tensor.
        remaining: tuple[list[Tensor], list[Tensor]] = ([], [])
        for selection, view, shard in zip(self._selections[members], self.views[members], shards[members], strict=True):
            if selection.indices is not None and shard.is_contiguous() and shard.dtype is view.dtype:
                torch.index_select(shard.view(-1), 0, selection.indices, out=view)
            else:
                remaining[0].append(view)
                remaining[1].append(selection.select(shard))
        if remaining[0]:
            torch._foreach_copy_(*remaining)

    def measure(self, shards: Sequence[Tensor], *, extremes: bool) -> list[Tensor]:
        """Return the norms of the watched elements and, with ``extremes``, the maximum and the sum of |x|.

        Overwrites the copies, unless all elements are watched.
        """
        if self._selects_all:
            orders = (2.0, math.inf, 1.0) if extremes else (2.0,)
            return [norms(shards, order) for order in orders]
        columns = [self.keep(shards)]
        if extremes:
            magnitudes = self.rows.abs_()
            columns.append(self._combine_rows(magnitudes.amax(1).to(self._wide), math.inf))
            columns.append(self._combine_rows(magnitudes.sum(1, dtype=self._wide), 1))
        return columns

    def compare(
        self, shards: Sequence[Tensor], gradients: Sequence[Tensor | None], decays: Sequence[float | None]
    ) -> list[Tensor]:
        """Return the norms of the changes since :meth:`keep`, and four counts for weights narrower than float32.

        An element is driven if its gradient is not zero, and stuck if it is driven but only weight decay changed it. It
        is decayed if weight decay applies to it and it is not zero, and undecayed if, in addition, the decay alone is
        rounded away. The counts are 0 for float32 and wider. Overwrites the copies.

        Args:
            shards: this rank's parts of the parameters after the step.
            gradients: their gradients, ``None`` if not available.
            decays: the share of a weight that decay removes in the step; ``None`` if the learning rate is 0 or unknown,
                in which case no element is driven or decayed.
        """
        if self.is_wide:
            none = torch.zeros(len(self.names), device=self.rows.device)
            return [self._change_norms(shards), none, none, none, none]
        changes, counts = [], []
        for members, _ in self._pieces:
            before, after = self.views[members], self._select(members, shards)
            changes.append(norms([old.float() - new.float() for old, new in zip(before, after, strict=True)]))
            rows = zip(self._selections[members], gradients[members], before, after, decays[members], strict=True)
            for selection, gradient, old, new, decay in rows:
                driven = None if gradient is None else selection.select(gradient) != 0
                counts.append(_count_lost_updates(driven, old, new, decay))
        return [torch.cat(changes), *torch.stack(counts).unbind(1)]

    def _change_norms(self, shards: Sequence[Tensor]) -> Tensor:
        lengths = []
        for members, rows in self._pieces:
            torch._foreach_sub_(self.views[members], self._select(members, shards))
            lengths.append(row_norms(self.rows[rows]))
        return self._combine_rows(torch.cat(lengths), 2)

    def _select(self, members: slice, shards: Sequence[Tensor]) -> list[Tensor]:
        if self._selects_all:
            return list(shards[members])
        pairs = zip(self._selections[members], shards[members], strict=True)
        return [selection.select(shard) for selection, shard in pairs]

    def _combine_rows(self, values: Tensor, order: float) -> Tensor:
        """Combine a number per row into one per parameter: root of the summed squares, largest, or sum."""
        if len(values) == len(self.names):
            return values
        if order == 2:
            squares = values.square()
            # unsafe=True skips a check of the lengths that would wait for the device; they are correct by construction
            return torch.segment_reduce(squares, "sum", lengths=self._lengths, unsafe=True).sqrt()
        return torch.stack(torch._foreach_norm(torch.split(values, self._row_counts), order))


class WatchedElements:
    """Selects elements by name and shape of their parameter, once, and measures them around a step.

    Results are tables: for every buffer a list of rows with one number per parameter, shape (parameters,), in the order
    of :attr:`names`.

    Args:
        sample_size: number of elements of each parameter; ``None`` selects all.
    """

    def __init__(self, sample_size: int | None) -> None:
        self._sample_size = sample_size
        self._selections: dict[str, ElementSelection] = {}
        self._buffers: list[ElementBuffer] = []
        self._planned_for: dict[str, Any] = {}
        self._norms: list[Tensor] = []
        self._loaded: Mapping[str, Any] = {}

    def __getitem__(self, name: str) -> ElementSelection:
        """Return the selection of a parameter."""
        return self._selections[name]

    @property
    def names(self) -> list[str]:
        """The parameters of the last measurement, or of the loaded state."""
        if self._loaded:
            return list(self._loaded["copies"])
        return [name for buffer in self._buffers for name in buffer.names]

    @property
    def has_copies(self) -> bool:
        """Whether there are copies to compare with."""
        return bool(self._norms or self._loaded)

    @property
    def bytes(self) -> int:
        """The memory of indices and buffers, in bytes."""
        indices = [selection.indices for selection in self._selections.values() if selection.indices is not None]
        return sum(tensor.nbytes for tensor in [*indices, *(buffer.rows for buffer in self._buffers)])

    @torch.no_grad()
    def measure(self, parameters: Named, *, extremes: bool) -> list[list[Tensor]]:
        """Measure the gradients (:meth:`ElementBuffer.measure`), then copy the parameters; all must have a gradient."""
        shards = self._plan(parameters)
        gradients = dict(zip(parameters, gradient_shards(parameters.values()), strict=True))
        tables = [
            buffer.measure([gradients[name] for name in buffer.names], extremes=extremes) for buffer in self._buffers
        ]
        self._norms = [buffer.keep([shards[name] for name in buffer.names]) for buffer in self._buffers]
        self._loaded = {}
        return tables

    @torch.no_grad()
    def compare(self, parameters: Named, decays: Mapping[str, float]) -> list[list[Tensor]]:
        """Compare the parameters with their copies, and discard the copies.

        Args:
            parameters: the parameters of :attr:`names`.
            decays: the shares that decay removes, by name, without parameters whose learning rate is 0 or unknown.

        Returns:
            Rows with the norm before the step, the norm of the change, and the counts of :meth:`ElementBuffer.compare`.
        """
        if self._loaded:
            self._plan(parameters)
            self._restore_copies()
        shards = dict(zip(parameters, shards_of(parameters.values()), strict=True))
        tables = []
        for buffer, norms_before in zip(self._buffers, self._norms, strict=True):
            narrow = [None if buffer.is_wide else parameters[name] for name in buffer.names]
            gradients = [
                None if parameter is None or parameter.grad is None else gradient_shards([parameter])[0]
                for parameter in narrow
            ]
            buffer_decays = [decays.get(name) for name in buffer.names]
            changes = buffer.compare([shards[name] for name in buffer.names], gradients, buffer_decays)
            tables.append([norms_before, *changes])
        self._norms = []
        return tables

    def state_dict(self) -> dict[str, Any]:
        """Return the copies by parameter name, and their norms; nothing without copies."""
        if self._loaded or not self._norms:
            return dict(self._loaded)
        copies = {name: view for buffer in self._buffers for name, view in zip(buffer.names, buffer.views, strict=True)}
        return {"copies": copies, "norms": list(self._norms)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned, and free the present buffers."""
        self._buffers, self._planned_for, self._norms, self._loaded = [], {}, [], dict(state)

    def _restore_copies(self) -> None:
        copies = self._loaded["copies"]
        for buffer in self._buffers:
            torch._foreach_copy_(buffer.views, [copies[name].to(buffer.rows.device) for name in buffer.names])
        pairs = zip(self._loaded["norms"], self._buffers, strict=True)
        self._norms = [norms.to(buffer.rows.device) for norms, buffer in pairs]
        self._loaded = {}

    def _plan(self, parameters: Named) -> dict[str, Tensor]:
        """Return the shards by name; select elements and allocate buffers unless the present ones fit."""
        shards = dict(zip(parameters, shards_of(parameters.values()), strict=True))
        kinds = dict(zip(shards, map(KIND, shards.values()), strict=True))
        if kinds != self._planned_for:
            groups: dict[Any, list[str]] = {}
            for name, shard in shards.items():
                self._selections[name] = self._select(name, parameters[name], shard)
                groups.setdefault((shard.dtype, shard.device), []).append(name)
            self._buffers = []  # frees the old buffers before the new ones are allocated
            self._buffers = [
                ElementBuffer(names, [self._selections[name] for name in names], device)
                for (_, device), names in groups.items()
            ]
            self._planned_for = kinds
        return shards

    def _select(self, name: str, parameter: nn.Parameter, shard: Tensor) -> ElementSelection:
        """Return the selection of a parameter; make a new one only if shape, dtype or device have changed."""
        earlier = self._selections.get(name)
        if earlier is not None and earlier.matches(shard):
            return earlier
        shape = (*parameter.shape, 2) if parameter.is_complex() else tuple(parameter.shape)
        elements = math.prod(shape)
        indices = None if self._sample_size is None else sample_indices(name, shape, self._sample_size)
        if indices is None:
            return ElementSelection(shard.shape, shard.dtype, None, elements, elements)
        shard_indices = local_indices(parameter, indices) if is_sharded(parameter) else indices
        return ElementSelection(shard.shape, shard.dtype, shard_indices.to(shard.device), len(indices), elements)


def split_into_pieces(row_counts: Iterable[int], smallest: int) -> list[tuple[slice, slice]]:
    """Split parameters into pieces of at least ``smallest`` rows; the last piece may be smaller.

    ``row_counts`` has the number of rows of each parameter. Returns the slices of parameters and of rows of each piece.

    >>> split_into_pieces([20, 20, 5, 5], 32)
    [(slice(0, 2, None), slice(0, 40, None)), (slice(2, 4, None), slice(40, 50, None))]
    """
    ends, rows, count = [(0, 0)], 0, 0
    for count, row_count in enumerate(row_counts, start=1):
        rows += row_count
        if rows - ends[-1][1] >= smallest:
            ends.append((count, rows))
    if ends[-1][0] < count:
        ends.append((count, rows))
    return [(slice(first[0], last[0]), slice(first[1], last[1])) for first, last in pairwise(ends)]


def _count_lost_updates(driven: Tensor | None, before: Tensor, after: Tensor, decay: float | None) -> Tensor:
    """Return the numbers of driven, stuck, decayed and undecayed elements (:meth:`ElementBuffer.compare`), shape (4,).

    ``driven`` marks the elements with a gradient, in the shape of ``before`` and ``after``.
    """
    start = before.float()
    # w·(1 − lr·λ) in the dtype of the weights, rounded like the separate decay step of torch.optim.AdamW
    decayed_only = (start * (1 - decay)).to(before.dtype).float() if decay else start
    if driven is None or decay is None:
        driven = torch.zeros_like(start, dtype=torch.bool)
    decayed = (start != 0) & bool(decay)
    masks = [driven, driven & (after.float() == decayed_only), decayed, decayed & (decayed_only == start)]
    return torch.stack([mask.sum() for mask in masks]).float()


def shards_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's parts of parameters as plain tensors, complex ones as pairs of real numbers."""
    return [torch.view_as_real(shard) if shard.is_complex() else shard for shard in local_shards(parameters)]


def gradient_shards(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the gradients of this rank's parts of the parameters; all must have a gradient."""
    owners = list(parameters)
    live: list[Any] = [owner.grad for owner in owners]
    dense = [gradient if gradient.layout is torch.strided else gradient.to_dense() for gradient in live]
    return shards_of(map(laid_out_like, dense, owners))


def norms(tensors: Sequence[Tensor], order: float = 2) -> Tensor:
    """Return the norm (order 1, 2 or infinity) of each tensor, shape (tensors,); in float32 or wider for orders ≠ 2.

    All tensors must be on one device.
    """
    if order == 2:
        return norms_of(tensors, partial(_reduce, order=2))
    dtype = torch.float64 if any(tensor.dtype is torch.float64 for tensor in tensors) else torch.float32
    reduced = [_reduce(tensor, order) for tensor in tensors]
    return torch.stack(torch._foreach_norm(reduced, order, dtype=dtype))


def _reduce(tensor: Tensor, order: float) -> Tensor:
    """Return a smaller tensor of the same norm on the CPU; tensors on accelerators, which add up in a tree, unchanged.

    ‖x‖ = ‖(‖x_1‖, …, ‖x_n‖)‖ for rows x_i of :data:`ROW` elements, which keeps the rounding error of the sums small.
    """
    if not tensor.numel():
        return tensor.new_zeros(1)
    if tensor.numel() <= SHORT or tensor.device.type != "cpu":
        return tensor
    if math.isinf(order):
        # max |x| is the larger magnitude of minimum and maximum, so no tensor of |x| is needed.
        return torch.stack(torch.aminmax(tensor))
    flat = tensor.reshape(-1)
    end = flat.numel() // ROW * ROW
    rows, rest = flat[:end].view(-1, ROW), flat[end:]
    wide = tensor.dtype if tensor.dtype in WIDE else torch.float32
    is_slow = order == 1  # torch has no fast norm of this order
    sums = rows.abs().sum(1, dtype=wide) if is_slow else torch.linalg.vector_norm(rows, order, dim=1, dtype=wide)
    return torch.cat([sums, rest.to(wide)]) if end < flat.numel() else sums
