"""Offload of hook state to the CPU between calls."""

from collections.abc import Callable
from operator import methodcaller
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..hooks import TrainingHook

Result = TypeVar("Result")
CPU = torch.device("cpu")


class StateOffload:
    """Keeps the state of hooks on the CPU between calls, to save device memory.

    Tensors are moved through ``state_dict`` and ``load_state_dict``, which contain the complete state of a hook, so
    that no metric changes.
    """

    def __init__(self, home: torch.device = CPU) -> None:
        self._home = home
        self._devices: dict[str, list[torch.device]] = {}

    def call(self, hook: TrainingHook, function: Callable[[], Result]) -> Result:
        """Load a hook's state, call ``function``, and offload the state again, even after an error."""
        if hook.name in self._devices:
            # tree_leaves and tree_map_only visit leaves in the same order: the n-th device belongs to the n-th tensor.
            devices = iter(self._devices.pop(hook.name))

            def to_its_device(tensor: Tensor) -> Tensor:
                return tensor.to(next(devices))

            hook.load_state_dict(tree_map_only(Tensor, to_its_device, hook.state_dict()))
        try:
            return function()
        finally:
            state: dict[str, Any] = hook.state_dict()
            if homes := [leaf.device for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]:
                hook.load_state_dict(tree_map_only(Tensor, methodcaller("to", self._home), state))
                self._devices[hook.name] = homes
