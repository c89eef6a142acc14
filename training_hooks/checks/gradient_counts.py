"""Zeros in gradients: per parameter, and rows of layer weights that are zero as a whole."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from loopscope.tensors import groups_of, is_sharded, local_shards, over_shards, widest
from torch import Tensor, nn

from .host_tensors import is_on_host

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
def count_gradients(
    parameters: Mapping[str, nn.Parameter], by_units: Collection[str]
) -> tuple[dict[str, int], dict[str, float]]:
    """Return the number of non-zero elements of each gradient, and the share of dead rows of some, by parameter.

    Infinite and NaN elements are not zero, and a row is dead if it is exactly zero. Parameters without a gradient are
    left out, and of the dead rows sparse gradients and shards that divide rows. All numbers reach the host together.

    Args:
        parameters: parameters by name.
        by_units: names of weights of at least two dimensions, of which dimension 0 has the output units.
    """
    live = {name: value for name, value in parameters.items() if value.grad is not None}
    if not live:
        return {}, {}
    shards = local_shards([value.grad for value in live.values() if value.grad is not None])
    counts = [torch.count_nonzero(_stored(shard)) for shard in shards]
    rows = [name in by_units and _has_whole_rows(parameter.grad) for name, parameter in live.items()]
    dead = [_dead_rows(shard, count) for shard, count, chosen in zip(shards, counts, rows, strict=True) if chosen]
    with_rows = [name for name, chosen in zip(live, rows, strict=True) if chosen]
    totals = _summed([*counts, *dead], [*live.values(), *(live[name] for name in with_rows)])
    nonzero = {name: int(total) for name, total in zip(live, totals, strict=False)}
    shares = {name: total / len(live[name]) for name, total in zip(with_rows, totals[len(live) :], strict=True)}
    return nonzero, shares


def _dead_rows(gradient: Tensor, nonzero: Tensor) -> Tensor:
    """Return the number of rows without a non-zero element, zero-dimensional."""
    # Without zeros there is no dead row. The search for them takes two to three times as long as the count.
    if is_on_host(nonzero) and int(nonzero) == gradient.numel():
        return torch.zeros_like(nonzero)
    return (~gradient.flatten(1).any(dim=1)).sum()


def _has_whole_rows(gradient: Any) -> bool:
    if gradient.is_sparse:
        return False
    if not is_sharded(gradient):
        return True
    return all(placement.is_replicate() or placement.is_shard(0) for placement in gradient.placements)


def _summed(counts: list[Tensor], parameters: list[nn.Parameter]) -> list[float]:
    """Return counts of this rank's shards, summed over the ranks with shards."""
    device = counts[0].device
    values = torch.stack([count.to(device, widest(device)) for count in counts])
    totals: list[float] = over_shards(values, groups_of(parameters)).tolist()
    return totals


def _stored(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


@torch.no_grad()
def exact_norms(parameters: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the norms of parameters in the widest type, which nearly any change alters; nothing of sharded ones."""
    chosen = {name: item for name, item in parameters.items() if item.numel() and not is_sharded(item)}
    found = [torch.linalg.vector_norm(item, dtype=_wide(item)) for item in chosen.values()]
    if not found:
        return {}
    device = found[0].device
    values = torch.stack([norm.to(device, widest(device)) for norm in found]).tolist()
    return dict(zip(chosen, values, strict=True))


def _wide(tensor: Tensor) -> torch.dtype:
    wide = widest(tensor.device)
    return {torch.float64: torch.complex128, torch.float32: torch.complex64}[wide] if tensor.is_complex() else wide
