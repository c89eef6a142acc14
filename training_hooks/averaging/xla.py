"""The one place that knows of XLA: steps of its lazy graph, and copies that are sharded as their originals.

Nothing here imports ``torch_xla`` before a tensor lies on an XLA device. Written after the interface of torch_xla 2.x;
docs/smoothing.md says what of it has been run.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from torch import Tensor


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
    xla_model: Any = import_module("torch_xla.core.xla_model")
    xla_model.mark_step()
    yield
    xla_model.mark_step()


def shard_alike(copy: Tensor, original: Tensor) -> None:
    """Give a copy on an XLA device the sharding annotation (SPMD) of its original, if that has one."""
    if on_xla([original]):
        bindings: Any = import_module("torch_xla")._XLAC
        sharding = bindings._get_xla_op_sharding(original)
        if sharding:
            bindings._xla_mark_sharding(copy, sharding)
