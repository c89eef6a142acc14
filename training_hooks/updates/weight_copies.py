"""Copies of the parameters from before an update, which hooks that measure the same step share."""

from collections.abc import Iterator, Mapping
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

    @torch.no_grad()
    def change_norms(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return ‖θ − θ₋‖₂ of each parameter, shape (parameters,), float64."""
        values = norms(self.changes(parameters)).double()
        # ‖x‖ = √(Σ_r ‖x_r‖²) over the ranks r with shards; squares of float32 numbers fit into float64
        groups = groups_of(parameters.values())
        return over_shards(values.square(), groups).sqrt() if groups else values


def _versions(parameters: Mapping[str, nn.Parameter]) -> tuple[tuple[int, int], ...]:
    return tuple((id(value), value._version) for value in parameters.values())


_LATEST: "WeakKeyDictionary[nn.Module, ref[WeightCopy]]" = WeakKeyDictionary()
"""The latest copy of each model, as long as a hook uses it."""
