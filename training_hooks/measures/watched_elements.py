"""The elements of parameters that are looked at, a sample or all, and copies of them from before a step."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from framework.param_vectors import is_sharded, local_shards
from training_hooks.measures.element_samples import held_here, sample_indices
from training_hooks.measures.flat_shards import laid_out_like

AT_ONCE = 2**17
"""Elements that are worked on together: what a cache holds, and little beside a model where they are copied."""
Named = Mapping[str, nn.Parameter]
Piece = tuple[list[str], list[Tensor]]


@dataclass(frozen=True)
class Choice:
    """What is looked at of one parameter."""

    shard: torch.Size
    """The shape of the part of the parameter that lies on this rank."""
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

    def of(self, shard: Tensor) -> Tensor:
        """Return what is looked at of a tensor laid out like the part of the parameter on this rank."""
        if self.indices is None:
            return shard
        if shard.is_contiguous():
            return shard.view(-1).index_select(0, self.indices)
        return torch.take(shard, self.indices.long())


class WatchedElements:
    """Chooses elements by name and shape of their parameter, once, and keeps copies of them in lasting buffers.

    Args:
        sample_size: elements of each parameter; ``None``: all.
    """

    def __init__(self, sample_size: int | None) -> None:
        self._sample_size = sample_size
        self._choices: dict[str, Choice] = {}
        self._buffers: dict[str, Tensor] = {}
        self.kept: list[str] = []
        """The parameters of which there are copies to compare with."""

    def __getitem__(self, name: str) -> Choice:
        """Return what was chosen of a parameter."""
        return self._choices[name]

    @property
    def bytes(self) -> int:
        """The memory of indices and buffers."""
        indices = [choice.indices for choice in self._choices.values() if choice.indices is not None]
        return sum(tensor.nbytes for tensor in [*indices, *self._buffers.values()])

    def gradients(self, parameters: Named) -> Iterator[Piece]:
        """Yield the elements of the gradients, some parameters at a time, with the names; every one has a gradient."""
        return self._pieces(parameters, gradient_shard)

    def weights(self, parameters: Named) -> Iterator[Piece]:
        """Yield the elements of the parameters, in the same way."""
        return self._pieces(parameters, _shard)

    def keep(self, parameters: Named) -> None:
        """Copy the elements of the parameters, in place of all copies there were."""
        for names, now in self.weights(parameters):
            for name, values in zip(names, now, strict=True):
                buffer = self._buffers.get(name)
                if buffer is None or _kind(buffer) != _kind(values):
                    self._buffers[name] = torch.empty_like(values)
            torch._foreach_copy_([self._buffers[name] for name in names], now)
        self.kept = list(parameters)

    def before(self, names: list[str], now: list[Tensor]) -> list[Tensor]:
        """Return the copies of these parameters' elements, which may be overwritten, on the devices of ``now``."""
        pairs = zip(names, now, strict=True)
        return [self._buffers[name].to(values.device) for name, values in pairs]

    def state_dict(self) -> dict[str, Tensor]:
        """Return the copies by parameter name."""
        return {name: self._buffers[name] for name in self.kept}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take copies back."""
        self._buffers = {name: values.clone() for name, values in state.items()}
        self.kept = list(state)

    def _pieces(self, parameters: Named, shard_of: Callable[[Any], Tensor]) -> Iterator[Piece]:
        names: list[str] = []
        values: list[Tensor] = []
        together = 0
        for name, parameter in parameters.items():
            shard = shard_of(parameter)
            names.append(name)
            values.append(self._choice(name, parameter, shard).of(shard))
            together += values[-1].numel()
            if together >= AT_ONCE:
                yield names, values
                names, values, together = [], [], 0
        if names:
            yield names, values

    def _choice(self, name: str, parameter: nn.Parameter, shard: Tensor) -> Choice:
        """Return what is looked at of a parameter, chosen anew only if it has changed its shape or place."""
        known = self._choices.get(name)
        if (
            known is not None
            and known.shard == shard.shape
            and (known.indices is None or known.indices.device == shard.device)
        ):
            return known
        self._choices[name] = self._chosen(name, parameter, shard)
        return self._choices[name]

    def _chosen(self, name: str, parameter: nn.Parameter, shard: Tensor) -> Choice:
        whole = (*parameter.shape, 2) if parameter.is_complex() else tuple(parameter.shape)
        elements = math.prod(whole)
        indices = None if self._sample_size is None else sample_indices(name, whole, self._sample_size)
        if indices is None:
            return Choice(shard.shape, None, elements, elements)
        here = held_here(parameter, indices) if is_sharded(parameter) else indices
        return Choice(shard.shape, here.to(shard.device), len(indices), elements)


def gradient_shard(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of a parameter as far as it belongs to the parameter's part on this rank, dense and real."""
    gradient = parameter.grad
    assert gradient is not None
    dense = gradient.to_dense() if gradient.layout is not torch.strided else gradient
    return _shard(laid_out_like(dense, parameter))


def _shard(tensor: Tensor) -> Tensor:
    (shard,) = local_shards([tensor])
    return torch.view_as_real(shard) if shard.is_complex() else shard


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device
