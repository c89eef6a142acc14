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
from loopscope.state import is_sharded, local_shards
from torch import Tensor, nn


def on_xla(tensors: Iterable[Tensor]) -> bool:
    """Return whether any of the tensors lies on an XLA device."""
    return any(tensor.device.type == "xla" for tensor in tensors)


@contextmanager
def step_markers(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Cut the lazy graph before and after the body, so that what it does is compiled by itself, once.

    The training step then compiles to one graph, whether or not the body ran after it.
    """
    if not on_xla(tensors):
        yield
        return
    xla: Any = import_module("torch_xla")
    xla.sync()
    yield
    xla.sync()


def shard_alike(copy: Tensor, original: Tensor) -> None:
    """Give a copy on an XLA device the sharding annotation (SPMD) of its original, if that has one."""
    if on_xla([original]):
        bindings: Any = import_module("torch_xla")._XLAC
        sharding = bindings._get_xla_op_sharding(original)
        if sharding:
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
    """One copy of some of a model's tensors, by name; of a DTensor this rank's shard, as a plain tensor."""

    shards = Remembered(dict[str, Tensor], saved=False)
    _others = Remembered(list[str])
    """The parameters and buffers of floating-point numbers that have no copy."""

    def take(self, model: nn.Module, tensors: Mapping[str, Tensor], *, widen: bool = False) -> None:
        """Copy tensors of the model in their layout; with ``widen`` in float32 or wider."""
        self.shards = {}
        for name, tensor in tensors.items():
            (shard,) = local_shards([tensor.detach()])
            self.shards[name] = shard.to(_dtype(shard, widen), copy=True)
            shard_alike(self.shards[name], shard)
        self._others = [name for name in _tensors(model) if name not in self.shards]

    def like(self, live: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the copies of these tensors, DTensors where they are, which share the memory of the shards."""
        return {name: _sharded_like(self.shards[name], tensor) for name, tensor in live.items()}

    def fit(self, model: nn.Module, *, widen: bool = False) -> None:
        """Move loaded copies to the devices of the model's tensors, in the dtypes that :meth:`take` would give them.

        Raises ``ValueError`` with the names of those that the model lacks, has beside them, or has in another shape.
        """
        live, known = _tensors(model), {*self.shards, *self._others}
        _refuse("which the model does not have", [name for name in [*self.shards, *self._others] if name not in live])
        _refuse("which the state lacks", [name for name in live if name not in known])
        there = dict(zip(self.shards, local_shards([live[name] for name in self.shards]), strict=True))
        shapes = [name for name, shard in self.shards.items() if shard.shape != there[name].shape]
        _refuse("which have another shape in the model (or on this rank)", shapes)
        self.shards = {
            name: shard.to(there[name].device, _dtype(there[name], widen)) for name, shard in self.shards.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the copies, and the names of what has none."""
        return super().state_dict() | {"copies": dict(self.shards)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy what :meth:`state_dict` returned; :meth:`fit` refuses copies of another model."""
        super().load_state_dict(state)
        self.shards = {name: tensor.clone() for name, tensor in state["copies"].items()}


def _dtype(shard: Tensor, widen: bool) -> torch.dtype:
    return torch.promote_types(shard.dtype, torch.float32) if widen else shard.dtype


def _sharded_like(shard: Tensor, tensor: Any) -> Tensor:
    if not is_sharded(tensor):
        return shard
    # A parameter's own class is nn.Parameter; that of its data is DTensor, wherever this version of torch has it.
    return type(tensor.data).from_local(  # type: ignore[no-any-return]
        shard, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _refuse(what: str, names: Sequence[str]) -> None:
    if names:
        raise ValueError(f"The state is of another model: it is about {listed(names, 5)}, {what}.")
