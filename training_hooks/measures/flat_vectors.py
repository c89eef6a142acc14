"""Parameters of a model, or their gradients, concatenated to one vector, so that few operations process all."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from loopscope.hooks import Remembered, Remembering
from loopscope.tensors import (
    WIDE,
    Vector,
    flat_products,
    groups_of,
    in_range,
    is_sharded,
    laid_out_like,
    local_shards,
    over_shards,
    scale_of,
    unsharded,
)
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

LONGEST_DOT = 2**31 - 1  # largest number of elements for BLAS, which has 32-bit sizes


@dataclass(frozen=True)
class FlatSpace:
    """The space of vectors over ``parameters``, flattened in their order, in float32, or float64 if a parameter is.

    A flat vector contains all elements of sharded parameters, on every rank, and real and imaginary parts of complex
    elements next to each other.
    """

    parameters: Mapping[str, Tensor]

    @cached_property
    def size(self) -> int:
        """Number n of elements."""
        return sum(map(_real_count, self.parameters.values()))

    @cached_property
    def dtype(self) -> torch.dtype:
        """Dtype of flat vectors."""
        dtypes = [value.dtype.to_real() if value.is_complex() else value.dtype for value in self.parameters.values()]
        widest = max(dtypes, key=attrgetter("itemsize"))
        return widest if widest in WIDE else torch.float32

    @torch.no_grad()
    def flat(self, vector: Vector) -> Tensor:
        """Return a vector as one tensor, shape (n,), with zeros for missing names."""
        named = self.parameters.items()
        parts = [unsharded(vector[name] if name in vector else torch.zeros_like(value)) for name, value in named]
        real = [torch.view_as_real(part.resolve_conj()) if part.is_complex() else part for part in parts]
        return torch.cat([part.reshape(-1).to(self.dtype) for part in real])

    @torch.no_grad()
    def vector(self, flat: Tensor) -> dict[str, Tensor]:
        """Return a flat tensor as a vector: views for plain parameters, shards for sharded parameters."""
        pieces = torch.split(flat, [*map(_real_count, self.parameters.values())])
        pairs = zip(self.parameters.items(), pieces, strict=True)
        return {name: laid_out_like(_in_shape(piece, value), value) for (name, value), piece in pairs}


def _real_count(tensor: Tensor) -> int:
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def _in_shape(piece: Tensor, owner: Tensor) -> Tensor:
    """Return a piece of a flat vector in the shape of its parameter, complex if that is."""
    return torch.view_as_complex(piece.view(*owner.shape, 2)) if owner.is_complex() else piece.view(owner.shape)


def stacked(parts: Iterable[Tensor]) -> Tensor:
    """Stack tensors of one shape, possibly on several devices, on the device of the first."""
    first, *others = parts
    return torch.stack([first, *(part.to(first.device) for part in others)])


@dataclass
class FlatVector:
    """One vector: ``data`` of shape (elements,), and ``views`` of it in the parameters' shapes, created on demand."""

    data: Tensor
    views: list[Tensor] = field(default_factory=list)


class FlatLayout:
    """Positions of the parameters in a flat vector, and sums over such vectors.

    A vector is in float32 or wider, on the device of the first parameter. It contains this rank's shards of sharded
    parameters; sums are over all ranks.

    Args:
        parameters: the parameters by name, in the order of the vector.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = dict(parameters)
        self.names = list(parameters)
        shards = local_shards(self.parameters.values())
        self._shapes = [shard.shape for shard in shards]
        self._sizes = [shape.numel() for shape in self._shapes]
        self._dtype = reduce(torch.promote_types, [shard.dtype for shard in shards], torch.float32)
        self.device = shards[0].device
        self._groups = groups_of(self.parameters.values())
        self._sharded = any(map(is_sharded, self.parameters.values()))
        # One product over the whole vector saves a call per parameter; sums over ranks need one product per parameter.
        self._fits_one_dot = not self._groups and sum(self._sizes) <= LONGEST_DOT

    def zeros(self) -> FlatVector:
        """Return a new vector of zeros."""
        return FlatVector(torch.zeros(sum(self._sizes), dtype=self._dtype, device=self.device))

    def values(self) -> FlatVector:
        """Return the current values of the parameters as a new vector."""
        return self.copy(self.parameters, self.zeros())

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor], into: FlatVector) -> FlatVector:
        """Overwrite a vector with tensors by parameter name, with zeros for missing names, and return the vector."""
        views, shards = self._pairs(tensors, into)
        if len(views) < len(self.names):
            into.data.zero_()
        if views:  # torch rejects empty lists
            # torch._foreach_* is private, but one call saves a kernel launch per parameter.
            torch._foreach_copy_(views, shards)
        return into

    @torch.no_grad()
    def add(self, tensors: Mapping[str, Tensor], into: FlatVector, weight: float = 1) -> None:
        """Add tensors by parameter name, multiplied by ``weight``, to a vector."""
        views, shards = self._pairs(tensors, into)
        if views:
            torch._foreach_add_(views, shards, alpha=weight)

    def views(self, vector: FlatVector) -> list[Tensor]:
        """Return views of a vector in the shapes of the parameters, or of this rank's shards of them."""
        if not vector.views:
            parts = zip(self._parts(vector.data), self._shapes, strict=True)
            vector.views = [part.view(shape) for part, shape in parts]
        return vector.views

    def shards(self, tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
        """Yield this rank's shard of a tensor for each parameter, zeros for missing names."""
        for (name, owner), shape in zip(self.parameters.items(), self._shapes, strict=True):
            if name not in tensors:
                yield torch.zeros(shape, dtype=self._dtype, device=self.device)
            else:
                yield local_shards([laid_out_like(tensors[name], owner)])[0].to(self.device)

    def over_ranks(self, values: Tensor) -> Tensor:
        """Return sums over shards, one for each parameter (last dimension), summed over the ranks."""
        return over_shards(values, self._groups)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients by name, without parameters that have none."""
        return {name: parameter.grad for name, parameter in self.parameters.items() if parameter.grad is not None}

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the inner product of two vectors' elements, zero-dimensional, float64."""
        return flat_products([(a, b)])[0] if self._fits_one_dot else self.dots(a, b).sum()

    def norm(self, a: Tensor) -> Tensor:
        """Return the 2-norm of a vector's elements, zero-dimensional, float64, or float32 where there is none."""
        (scaled,) = in_range(a)
        length = self.dot(scaled, scaled).sqrt()
        return length if scaled is a else length * scale_of(a)

    def dots(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the inner product for each parameter, shape (parameters,), float64."""
        pairs = zip(self._parts(a), self._parts(b), strict=True)
        return over_shards(flat_products(list(pairs)), self._groups)

    def named(self, a: Tensor) -> dict[str, Tensor]:
        """Return views of a vector by parameter name, each with the shape and layout of its parameter."""
        parts = zip(self.parameters.items(), self._parts(a), self._shapes, strict=True)
        return {name: sharded_like(part.view(shape), owner) for (name, owner), part, shape in parts}

    def flat(self, vector: Tensor | Vector) -> Tensor:
        """Return the elements, shape (elements,), of a vector that is flat or by parameter name."""
        return vector.to(self.device) if isinstance(vector, Tensor) else self.copy(vector, self.zeros()).data

    def by_name(self, values: Tensor) -> dict[str, Tensor]:
        """Return one value per parameter, shape (parameters,), by name."""
        return dict(zip(self.names, values.unbind(), strict=True))

    def _parts(self, a: Tensor) -> tuple[Tensor, ...]:
        return torch.split(a, self._sizes)

    def _pairs(self, tensors: Mapping[str, Tensor], vector: FlatVector) -> tuple[list[Tensor], list[Tensor]]:
        """Return the views of the parameters in ``tensors``, and this rank's shards of these tensors."""
        views = self.views(vector)
        if tensors is self.parameters:
            return views, local_shards(tensors.values())
        is_given = [name in tensors for name in self.names]
        shards = [tensors[name] for name in compress(self.names, is_given)]
        if self._sharded:
            owners = compress(self.parameters.values(), is_given)
            shards = local_shards(map(laid_out_like, shards, owners))
        return list(compress(views, is_given)), shards


class FlatMemory(Remembering):
    """Memory of a hook between steps: flat vectors by name, over a fixed set of parameters."""

    names = Remembered(list[str])
    """Names of the parameters; empty before :meth:`reset_to`."""
    vectors = Remembered(dict[str, FlatVector], saved=False)
    spare = Remembered[FlatVector | None](None, saved=False)
    """A vector whose content is no longer needed."""
    _loaded = Remembered[Mapping[str, Vector]](dict, saved=False)
    """Loaded vectors by parameter name, until a model determines their layout and device."""
    _layout = Remembered[FlatLayout | None](None, saved=False)

    def reset_to(self, parameters: Mapping[str, nn.Parameter], *vectors: str) -> FlatLayout:
        """Reset to these parameters, with their current values in each of the named ``vectors``."""
        self.reset()
        self._layout = FlatLayout(parameters)
        self.names = self._layout.names
        self.vectors = {name: self._layout.values() for name in vectors}
        return self._layout

    def holds(self, parameters: Mapping[str, nn.Parameter]) -> bool:
        """Return whether these are the parameters of the memory; a layer that was replaced has others."""
        known = {} if self._layout is None else self._layout.parameters
        return self.names == list(parameters) and all(
            known.get(name, item) is item for name, item in parameters.items()
        )

    def layout(self, model: nn.Module) -> FlatLayout:
        """Return the layout of the vectors, after moving loaded vectors to the device of this model."""
        if self._layout is None:
            self._layout = layout = FlatLayout({name: model.get_parameter(name) for name in self.names})
            self.vectors = {name: FlatVector(layout.flat(vector)) for name, vector in self._loaded.items()}
            self._loaded = {}
        return self._layout

    def scratch(self, layout: FlatLayout) -> FlatVector:
        """Return a vector to overwrite: the spare one, or a new one."""
        return self.spare or layout.zeros()

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the parameters, and the vectors by parameter name."""
        flat = {name: vector.data for name, vector in self.vectors.items()}
        return super().state_dict() | {"vectors": {name: self.named(v) for name, v in (flat or self._loaded).items()}}

    def named(self, vector: Tensor | Vector) -> dict[str, Tensor]:
        """Return a flat or loaded vector by parameter name, as DTensors where the parameters are DTensors."""
        return self._layout.named(vector) if self._layout and isinstance(vector, Tensor) else dict(vector)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self.reset()
        super().load_state_dict(state)
        self._loaded = {name: dict(vector) for name, vector in state["vectors"].items()}


def sharded_like(shard: Tensor, owner: Any) -> Tensor:
    """Return this rank's ``shard`` as a DTensor in the layout of ``owner``, or as it is if ``owner`` is not a DTensor.

    The result shares the memory of ``shard``; no data is communicated.
    """
    if not is_sharded(owner):
        return shard
    if shard.storage_offset():
        # torch cannot save a DTensor that is a view into a larger storage; DLPack gives the view a storage of offset 0.
        shard = from_dlpack(shard)
    # type(owner.data) is DTensor; importing the class would need the module path of this torch version.
    return type(owner.data).from_local(  # type: ignore[no-any-return]
        shard, owner.device_mesh, owner.placements, run_check=False, shape=owner.shape, stride=owner.stride()
    )
