"""Zeros in gradients: per parameter, and rows of layer weights that are zero as a whole."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from loopscope.tensors import groups_of, is_sharded, local_shards, over_shards
from torch import Tensor, nn

LAYERS = (nn.Linear, nn.modules.conv._ConvNd, nn.RNNBase)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
"""Convolutions whose output units are not in dimension 0 of the weight."""


@dataclass(frozen=True)
class LayerWeights:
    """The names of the weights of linear, convolutional and recurrent layers that no embedding shares."""

    weights: frozenset[str]
    """Weights with at least two dimensions."""
    by_units: frozenset[str]
    """Those of linear layers and convolutions with one output unit in each row."""

    @classmethod
    def of(cls, model: nn.Module) -> "LayerWeights":
        """Return the names in a model."""
        weights, by_units, embedded = set[int](), set[int](), set[int]()
        for module in model.modules():
            # Read as stored: a parametrised weight is computed by a property, from parameters of other modules.
            own = {name: value for name, value in module._parameters.items() if value is not None and value.ndim >= 2}
            if isinstance(module, LAYERS):
                weights |= {*map(id, own.values())}
                if not isinstance(module, (*TRANSPOSED, nn.RNNBase)) and "weight" in own:
                    by_units.add(id(own["weight"]))
            elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                embedded |= {*map(id, own.values())}
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        chosen = ({names[item] for item in group - embedded if item in names} for group in (weights, by_units))
        return cls(*map(frozenset, chosen))


@torch.no_grad()
def nonzero_counts(parameters: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """Return the number of non-zero elements of each gradient, by parameter; without parameters that have none.

    Infinite and NaN elements are not zero. All gradients are read to the host in one transfer.
    """
    with_gradient = {name: value for name, value in parameters.items() if value.grad is not None}
    gradients = local_shards([value.grad for value in with_gradient.values() if value.grad is not None])
    if not gradients:
        return {}
    counts = [torch.count_nonzero(_stored(gradient)) for gradient in gradients]
    totals = _summed(counts, list(with_gradient.values()))
    return {name: int(total) for name, total in zip(with_gradient, totals, strict=True)}


@torch.no_grad()
def dead_row_shares(parameters: Mapping[str, nn.Parameter], names: Collection[str]) -> dict[str, float]:
    """Return for each named weight the share of rows whose gradient is exactly zero.

    Weights without a dense gradient are left out, and shards that divide rows.

    Args:
        parameters: parameters by name.
        names: weights of at least two dimensions, of which dimension 0 has the output units.
    """
    chosen = {name: parameters[name] for name in names if _has_whole_rows(parameters[name].grad)}
    if not chosen:
        return {}
    shards = local_shards([value.grad for value in chosen.values() if value.grad is not None])
    counts = [(shard.flatten(1) == 0).all(dim=1).sum() for shard in shards]
    totals = _summed(counts, list(chosen.values()))
    return {name: total / len(chosen[name]) for name, total in zip(chosen, totals, strict=True)}


def _has_whole_rows(gradient: Any) -> bool:
    if gradient is None or gradient.is_sparse:
        return False
    if not is_sharded(gradient):
        return True
    return all(placement.is_replicate() or placement.is_shard(0) for placement in gradient.placements)


def _summed(counts: list[Tensor], parameters: list[nn.Parameter]) -> list[float]:
    """Return counts of this rank's shards, summed over the ranks with shards."""
    device = counts[0].device
    wide = torch.float32 if device.type == "mps" else torch.float64
    values = torch.stack([count.to(device, wide) for count in counts])
    totals: list[float] = over_shards(values, groups_of(parameters)).tolist()
    return totals


def _stored(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient
