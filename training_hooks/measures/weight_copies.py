"""Copies of the parameters, which hooks that measure the same step or interval share."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self
from weakref import WeakKeyDictionary, ref

import torch
from loopscope.hooks import Remembered, Remembering
from loopscope.tensors import (
    PLAIN,
    Vector,
    groups_of,
    joined_length,
    laid_out_like,
    length_of,
    local_shards,
    norms,
    over_shards,
    pieces,
    tensor_of,
    trainable,
)
from torch import Tensor, nn

from .flat_vectors import sharded_like
from .stored_tensors import StoredTensors

SMALLEST_FILE = 2**24
"""Copies of fewer bytes stay in memory."""


class WeightCopy:
    """Parameters at one moment, in float32 or wider; of a sharded parameter this rank's shard.

    Args:
        parameters: the parameters to copy.
        is_rarely_read: whether a large copy of parameters on the CPU may be in a temporary file instead of memory.
    """

    @torch.no_grad()
    def __init__(self, parameters: Mapping[str, Tensor], *, is_rarely_read: bool = False) -> None:
        self._versions = _versions(parameters)
        shards = dict(zip(parameters, local_shards(parameters.values()), strict=True))
        stored = _stored(shards) if is_rarely_read else None
        self._copies: Mapping[str, Tensor] = stored or _in_memory(shards)
        # The latest results, for another hook that asks for the same
        self._change_norms: tuple[Any, Tensor] | None = None
        self._norms: tuple[list[str], Tensor] | None = None

    @classmethod
    def of(cls, model: nn.Module) -> "WeightCopy":
        """Return a copy of the parameters as they are now; hooks that call this for the same weights share one.

        The copy is for one step: code that writes through ``parameter.data`` leaves no trace by which a later call
        would recognise other weights. :meth:`kept` returns copies that live longer.
        """
        parameters = trainable(model)
        latest = _LATEST.get(model)
        copy = None if latest is None else latest()
        if copy is None or copy._versions != _versions(parameters):
            copy = cls(parameters)
            _LATEST[model] = ref(copy)
        return copy

    @classmethod
    def kept(cls, model: nn.Module, parameters: Mapping[str, Tensor]) -> Self:
        """Return a copy of these parameters to keep between reports; hooks share one if all elements are equal.

        A large copy of parameters on the CPU is in a temporary file.
        """
        latest = _KEPT.get(model)
        copy = None if latest is None else latest()
        if not isinstance(copy, cls) or not copy.equals(parameters):
            copy = cls(parameters, is_rarely_read=True)
            _KEPT[model] = ref(copy)
        return copy

    def __getitem__(self, name: str) -> Tensor:
        """Return the copy of a parameter, or of this rank's shard of it."""
        return self._copies[name]

    def __contains__(self, name: str) -> bool:
        return name in self._copies

    @torch.no_grad()
    def equals(self, parameters: Mapping[str, Tensor]) -> bool:
        """Return whether the copy has these names, and on this rank the same elements."""
        if [*self._copies] != [*parameters]:
            return False
        # One flag for all parameters, so that the host waits for a device once
        flags = []
        for copy, live in zip(self._copies.values(), local_shards(parameters.values()), strict=True):
            if _kind(copy) != _kind(live):
                return False
            flags.append((copy == live.detach()).all())
            if isinstance(self._copies, StoredTensors) and not flags[-1]:
                return False  # on the CPU, and the rest of the file need not be read
        return not flags or bool(torch.stack([flag.to(flags[0].device) for flag in flags]).all())

    def named(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the copies by name, as DTensors where the parameters are DTensors."""
        return {name: sharded_like(copy, parameters[name]) for name, copy in self._copies.items()}

    @torch.no_grad()
    def distances(self, parameters: Mapping[str, Tensor], *, follow: bool = False) -> Tensor:
        """Return ‖θ − θ₋‖₂ of each parameter, shape (parameters,), without a difference of all elements in memory.

        With ``follow``, θ then overwrites the copy θ₋; no other hook may hold it.
        """
        shards = dict(zip(parameters, local_shards(parameters.values()), strict=True))
        stored = self._copies if isinstance(self._copies, StoredTensors) else None
        overwrites = follow and stored is None
        lengths = [_distance(self._copies[name], shard.detach(), overwrites) for name, shard in shards.items()]
        if follow and stored is not None:
            try:
                for name, shard in shards.items():
                    stored.replace(name, _wide(shard))
            except OSError:  # a full disk: the copies are in memory from now on
                self._copies = _in_memory(shards)
        return _over_ranks(tensor_of(lengths), parameters)

    @torch.no_grad()
    def movement(self, parameters: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return ‖Δ‖₂, max |Δᵢ|, the number of Δᵢ ≠ 0, and ‖θ₋‖₂ of each parameter, Δ = θ − θ₋.

        The shape of each result is (parameters,).
        """
        shards = zip(parameters, local_shards(parameters.values()), strict=True)
        columns = [_movement(self._copies[name], shard.detach()) for name, shard in shards]
        lengths, largest, changed, previous_lengths = (tensor_of(column) for column in zip(*columns, strict=True))
        groups = groups_of(parameters.values())
        return (
            _over_ranks(lengths, parameters),
            over_shards(largest, groups, largest=True),
            over_shards(changed, groups),
            _over_ranks(previous_lengths, parameters),
        )

    @torch.no_grad()
    def changes(self, parameters: Mapping[str, Tensor]) -> Iterator[Tensor]:
        """Yield θ − θ₋ of each parameter, θ₋ the copy; of a sharded parameter this rank's shard."""
        for name, shard in zip(parameters, local_shards(parameters.values()), strict=True):
            before = self._copies[name]
            yield shard.detach().to(before.dtype) - before

    def change_norms(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return ‖θ − θ₋‖₂ of each parameter, shape (parameters,), float64, the same tensors for the same weights."""
        versions = _versions(parameters)
        if self._change_norms is None or self._change_norms[0] != versions:
            self._change_norms = versions, _norms_over_ranks(self.changes(parameters), parameters)
        return self._change_norms[1]

    def norms(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return ‖θ₋‖₂ of each parameter, shape (parameters,), float64."""
        if self._norms is None or self._norms[0] != list(parameters):
            self._norms = list(parameters), _norms_over_ranks((self._copies[name] for name in parameters), parameters)
        return self._norms[1]


@torch.no_grad()
def _norms_over_ranks(parts: Iterable[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
    """Return the norms of tensors of which each rank has the part that it has of a parameter, float64."""
    return _over_ranks(norms(parts).double(), parameters)


def _over_ranks(values: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
    """Return the norms of whole parameters from those of this rank's shards, shape (parameters,)."""
    # ‖x‖ = √(Σ_r ‖x_r‖²) over the ranks r with shards; squares of float32 numbers fit into float64
    groups = groups_of(parameters.values())
    return over_shards(values.square(), groups).sqrt() if groups else values


def _distance(old: Tensor, new: Tensor, overwrites: bool) -> float | Tensor:
    """Return ‖new − old‖₂, zero-dimensional; if it ``overwrites``, ``new`` is then written to ``old``."""
    lengths = []
    for before, after in pieces(old, new):
        lengths.append(length_of(_wide(after) - before))
        if overwrites:
            before.copy_(after)
    return joined_length(lengths)


def _movement(old: Tensor, new: Tensor) -> tuple[float | Tensor, Tensor, Tensor, float | Tensor]:
    """Return ‖Δ‖₂, max |Δᵢ|, the number of Δᵢ ≠ 0 of Δ = new − old, and ‖old‖₂."""
    lengths, largest, changed, previous_lengths = [], [], [], []
    for before, after in pieces(old, new):
        previous_lengths.append(length_of(before))
        change = _wide(after) - before
        lengths.append(length_of(change))
        changed.append(torch.count_nonzero(change))
        sizes = change.abs() if change.is_complex() else change.abs_()
        largest.append(sizes.amax() if sizes.numel() else sizes.sum())
    return (
        joined_length(lengths),
        torch.stack(largest).amax(),
        torch.stack(changed).sum(),
        joined_length(previous_lengths),
    )


def _stored(shards: Mapping[str, Tensor]) -> StoredTensors | None:
    """Return copies in a temporary file, or None if the shards are small, not on the CPU, or cannot be written."""
    sizes = [shard.numel() * _kind(shard)[0].itemsize for shard in shards.values()]
    if sum(sizes) < SMALLEST_FILE or not all(type(shard) in PLAIN and shard.is_cpu for shard in shards.values()):
        return None
    try:
        return StoredTensors((name, _wide(shard)) for name, shard in shards.items())
    except OSError:
        return None  # no folder for temporary files, or a full disk


def _in_memory(shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: _wide(shard.detach(), copy=True) for name, shard in shards.items()}


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.device, torch.Size]:
    """Return the properties of the wide copy of a tensor."""
    return torch.promote_types(tensor.dtype, torch.float32), tensor.device, tensor.shape


def _wide(tensor: Tensor, *, copy: bool = False) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=copy)


class WeightMemory(Remembering):
    """Memory of a hook between steps: copies of a fixed set of parameters by name, shared where they are equal."""

    names = Remembered(list[str])
    """Names of the parameters; empty before :meth:`reset_to`."""
    copies = Remembered(dict[str, WeightCopy], saved=False)
    _own = Remembered(set[str], saved=False)
    """Names of the copies that no other hook shares."""
    _parameters = Remembered(dict[str, nn.Parameter], saved=False)
    _loaded = Remembered[Mapping[str, Vector]](dict, saved=False)
    """Loaded copies by parameter name, until a model determines their layout and device."""

    def reset_to(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], *copies: str) -> None:
        """Reset to these parameters of a model, with their current values in each of the named ``copies``."""
        self.reset()
        self.names, self._parameters = list(parameters), dict(parameters)
        if copies:
            self.copies = dict.fromkeys(copies, WeightCopy.kept(model, parameters))

    def holds(self, parameters: Mapping[str, nn.Parameter]) -> bool:
        """Return whether these are the parameters of the memory; a layer that was replaced has others."""
        known = self._parameters
        return self.names == list(parameters) and all(
            known.get(name, item) is item for name, item in parameters.items()
        )

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters, after moving loaded copies to the device of this model."""
        if not self._parameters:
            self._parameters = {name: model.get_parameter(name) for name in self.names}
            self.copies = {name: self._restored(vector, model) for name, vector in self._loaded.items()}
            self._loaded = {}
        return self._parameters

    def _restored(self, vector: Vector, model: nn.Module) -> WeightCopy:
        on_device = {name: vector[name].to(owner.device) for name, owner in self._parameters.items()}
        return WeightCopy.kept(
            model, {name: laid_out_like(value, self._parameters[name]) for name, value in on_device.items()}
        )

    def keep(self, name: str, model: nn.Module) -> None:
        """Replace a copy by the current values."""
        self._own.discard(name)
        self.copies[name] = WeightCopy.kept(model, self.parameters(model))

    def follow(self, name: str, model: nn.Module, *, is_rarely_read: bool = False) -> Tensor:
        """Return ‖θ − θ₋‖₂ of each parameter from a copy θ₋, shape (parameters,), and replace the copy by θ.

        A large copy of parameters on the CPU that ``is_rarely_read`` is in a temporary file.
        """
        parameters, copy = self.parameters(model), self.copies[name]
        distances = copy.distances(parameters, follow=name in self._own)
        if name not in self._own:
            self.copies[name] = WeightCopy(parameters, is_rarely_read=is_rarely_read)
            self._own.add(name)
        return distances

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the parameters, and the copies by parameter name."""
        vectors = {name: copy.named(self._parameters) for name, copy in self.copies.items()}
        loaded = {name: dict(vector) for name, vector in self._loaded.items()}
        return super().state_dict() | {"vectors": vectors or loaded}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self.reset()
        super().load_state_dict(state)
        self._loaded = {name: dict(vector) for name, vector in state["vectors"].items()}


def _versions(parameters: Mapping[str, Tensor]) -> tuple[tuple[int, int], ...]:
    return tuple((id(value), value._version) for value in parameters.values())


_LATEST: "WeakKeyDictionary[nn.Module, ref[WeightCopy]]" = WeakKeyDictionary()
"""The latest copy of each model for one step, as long as a hook uses it."""
_KEPT: "WeakKeyDictionary[nn.Module, ref[WeightCopy]]" = WeakKeyDictionary()
"""The latest copy of each model that is kept between steps, as long as a hook uses it."""
