"""Copies of a model's tensors that live beside it: sharded as they are, remembered by name, fitted to it again.

Also the one place that knows of XLA: steps of its lazy graph, and copies that are sharded as their originals. Nothing
here imports ``torch_xla`` before a tensor lies on an XLA device. docs/smoothing.md says what of it has been run.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from loopscope.errors import UnsuitableError, listed
from loopscope.hooks import Remembered, Remembering
from loopscope.lowbit import layers_with_factors
from loopscope.state import local_shards
from torch import Tensor, nn

from ..measures import sharded_like


def on_xla(tensors: Iterable[Tensor]) -> bool:
    """Return whether any of the tensors lies on an XLA device."""
    return any(tensor.device.type == "xla" for tensor in tensors)


@contextmanager
def step_markers(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Cut the lazy graph before and after the body, so that what it does is compiled by itself, once.

    The training step then compiles to one graph, whether or not the body ran after it.
    """
    sync: Any = import_module("torch_xla").sync if on_xla(tensors) else lambda: None
    sync()
    yield
    sync()


def shard_alike(copy: Tensor, original: Tensor) -> None:
    """Give a copy on an XLA device the sharding annotation (SPMD) of its original, if that has one."""
    if on_xla([original]):
        bindings: Any = import_module("torch_xla")._XLAC
        if sharding := bindings._get_xla_op_sharding(original):
            bindings._xla_mark_sharding(copy, sharding)


def refuse_factors(hook: str, does: str, model: nn.Module) -> None:
    """Raise :class:`UnsuitableError` if a Metis split, which may change from step to step, stands for weights."""
    if apart := layers_with_factors(model):
        raise UnsuitableError(
            f"Hook {hook!r} {does} weights of different steps, but a Metis split makes other quantities of those of "
            f"{listed(apart, 3)}; leave the hook out, or choose a recipe whose metis has forward=False."
        )


def floating_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of floating-point numbers, each shared one once."""
    return {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **floating_buffers(model)}


class ShadowCopies(Remembering):
    """One copy of some of a model's tensors, by name, in their layout."""

    copies = Remembered(dict[str, Tensor])
    _others = Remembered(list[str])
    """The parameters and buffers of floating-point numbers that have no copy."""

    def take(self, model: nn.Module, tensors: Mapping[str, Tensor], *, widen: bool = False) -> None:
        """Copy tensors of the model; with ``widen`` in float32 or wider."""
        self.copies = {}
        for name, tensor in tensors.items():
            (shard,) = local_shards([tensor.detach()])
            self.copies[name] = sharded_like(shard.to(_dtype(shard, widen), copy=True), tensor)
            shard_alike(self.copies[name], shard)
        self._others = [name for name in _tensors(model) if name not in self.copies]

    def of(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the copies of these tensors."""
        return {name: self.copies[name] for name in names}

    def fit(self, model: nn.Module, *, widen: bool = False) -> None:
        """Move loaded copies to the devices of the model's tensors, in the dtypes that :meth:`take` would give them.

        Raises ``ValueError`` with the names of those that the model lacks, has beside them, or has in another shape.
        """
        live, known = _tensors(model), {*self.copies, *self._others}
        _refuse("which the model does not have", [name for name in [*self.copies, *self._others] if name not in live])
        _refuse("which the state lacks", [name for name in live if name not in known])
        here, there = local_shards(self.copies.values()), local_shards(live[name] for name in self.copies)
        pairs = dict(zip(self.copies, zip(here, there, strict=True), strict=True))
        shapes = [name for name, (shard, other) in pairs.items() if shard.shape != other.shape]
        _refuse("which have another shape in the model (or on this rank)", shapes)
        self.copies = {
            name: sharded_like(shard.to(other.device, _dtype(other, widen)), live[name])
            for name, (shard, other) in pairs.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy what :meth:`state_dict` returned; :meth:`fit` refuses copies of another model."""
        super().load_state_dict(state)
        self.copies = {name: tensor.clone() for name, tensor in self.copies.items()}


def _dtype(shard: Tensor, widen: bool) -> torch.dtype:
    return torch.promote_types(shard.dtype, torch.float32) if widen else shard.dtype


def _refuse(what: str, names: Sequence[str]) -> None:
    if names:
        raise ValueError(f"The state is of another model: it is about {listed(names, 5)}, {what}.")
