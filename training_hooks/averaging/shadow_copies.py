"""Copies of a model's tensors, with the sharding of their originals, saved by name and restored to the model.

This module also contains all XLA-specific code: step markers of the lazy graph, and sharding annotations of copies. It
imports ``torch_xla`` only if a tensor is on an XLA device. docs/studies.md lists the tested parts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from loopscope.errors import UnsuitableError, listed
from loopscope.hooks import Remembered, Remembering
from loopscope.lowbit import layers_with_factors
from loopscope.tensors import local_shards
from torch import Tensor, nn

from ..measures import sharded_like


def on_xla(tensors: Iterable[Tensor]) -> bool:
    """Return whether any of the tensors is on an XLA device."""
    return any(tensor.device.type == "xla" for tensor in tensors)


@contextmanager
def step_markers(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Cut the lazy graph before and after the body, so that the body is compiled separately, once.

    The training step then compiles to the same graph whether or not the body runs after it.
    """
    if not on_xla(tensors):
        yield
        return
    sync: Any = import_module("torch_xla").sync
    sync()
    yield
    sync()


def shard_alike(copy: Tensor, original: Tensor) -> None:
    """Give a copy on an XLA device the sharding annotation (SPMD) of its original, if any."""
    if on_xla([original]):
        # Uses the private bindings ``_XLAC`` to copy the annotation of one tensor to another.
        bindings: Any = import_module("torch_xla")._XLAC
        if sharding := bindings._get_xla_op_sharding(original):
            bindings._xla_mark_sharding(copy, sharding)


def refuse_factors(hook: str, verb: str, model: nn.Module) -> None:
    """Raise :class:`UnsuitableError` if layers have a Metis split, which may change from step to step."""
    if split_layers := layers_with_factors(model):
        raise UnsuitableError(
            f"Hook {hook!r} {verb} weights of different steps, but a Metis split changes the meaning of the weights of "
            f"{listed(split_layers, 3)}; omit the hook, or choose a recipe whose metis has forward=False."
        )


def floating_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the floating-point buffers, shared ones once."""
    return {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **floating_buffers(model)}


class ShadowCopies(Remembering):
    """Copies of some of a model's tensors, by name, with their layout."""

    copies = Remembered(dict[str, Tensor])
    _others = Remembered(list[str])
    """The names of parameters and floating-point buffers without a copy."""

    def take(self, model: nn.Module, tensors: Mapping[str, Tensor], *, widen: bool = False) -> None:
        """Copy tensors of the model, in float32 or wider if ``widen``."""
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
        """Move loaded copies to the devices of the model's tensors, with the dtypes of :meth:`take`.

        Raises:
            ValueError: if names are missing in the model or in the state, or if shapes differ.
        """
        live, saved_names = _tensors(model), {*self.copies, *self._others}
        _refuse("which the model does not have", [name for name in [*self.copies, *self._others] if name not in live])
        _refuse("which the state lacks", [name for name in live if name not in saved_names])
        copy_shards, live_shards = local_shards(self.copies.values()), local_shards(live[name] for name in self.copies)
        pairs = dict(zip(self.copies, zip(copy_shards, live_shards, strict=True), strict=True))
        mismatched = [name for name, (copy, original) in pairs.items() if copy.shape != original.shape]
        _refuse("which have another shape in the model (or on this rank)", mismatched)
        self.copies = {
            name: sharded_like(copy.to(original.device, _dtype(original, widen)), live[name])
            for name, (copy, original) in pairs.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy the tensors of :meth:`state_dict`; :meth:`fit` rejects copies of another model."""
        super().load_state_dict(state)
        self.copies = {name: tensor.clone() for name, tensor in self.copies.items()}


def _dtype(shard: Tensor, widen: bool) -> torch.dtype:
    return torch.promote_types(shard.dtype, torch.float32) if widen else shard.dtype


def _refuse(problem: str, names: Sequence[str]) -> None:
    if names:
        raise ValueError(f"The state belongs to another model: it concerns {listed(names, 5)}, {problem}.")
