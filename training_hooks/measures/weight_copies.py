"""Copies of the parameters from before an update, which hooks that measure the same step share."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from loopscope.tensors import groups_of, local_shards, norms, over_shards, trainable
from torch import Tensor, nn


class WeightCopy:
    """The trainable parameters at one moment, in float32 or wider; of a sharded parameter this rank's shard.

    Args:
        model: the model to copy.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module) -> None:
        parameters = trainable(model)
        self._versions = _versions(parameters)
        shards = zip(parameters, local_shards(parameters.values()), strict=True)
        self._copies = {
            name: shard.detach().to(torch.promote_types(shard.dtype, torch.float32), copy=True)
            for name, shard in shards
        }
        # The latest results, for another hook that asks for the same
        self._change_norms: tuple[Any, Tensor] | None = None
        self._norms: tuple[list[str], Tensor] | None = None

    @classmethod
    def of(cls, model: nn.Module) -> "WeightCopy":
        """Return a copy of the parameters as they are now; hooks that call this for the same weights share one."""
        latest = _LATEST.get(model)
        copy = None if latest is None else latest()
        if copy is None or copy._versions != _versions(trainable(model)):
            copy = cls(model)
            _LATEST[model] = ref(copy)
        return copy

    def __getitem__(self, name: str) -> Tensor:
        """Return the copy of a parameter, or of this rank's shard of it."""
        return self._copies[name]

    def __contains__(self, name: str) -> bool:
        return name in self._copies

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
    values = norms(parts).double()
    # ‖x‖ = √(Σ_r ‖x_r‖²) over the ranks r with shards; squares of float32 numbers fit into float64
    groups = groups_of(parameters.values())
    return over_shards(values.square(), groups).sqrt() if groups else values


def _versions(parameters: Mapping[str, Tensor]) -> tuple[tuple[int, int], ...]:
    return tuple((id(value), value._version) for value in parameters.values())


_LATEST: "WeakKeyDictionary[nn.Module, ref[WeightCopy]]" = WeakKeyDictionary()
"""The latest copy of each model, as long as a hook uses it."""
