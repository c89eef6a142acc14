"""Keeping what hooks remember on the CPU between their calls."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..hooks import TrainingHook

Result = TypeVar("Result")
CPU = torch.device("cpu")


class StateOffload:
    """Keeps what hooks remember on the CPU between their calls, where device memory is short.

    Tensors are moved through ``state_dict`` and ``load_state_dict``, which carry all of a hook's memory, so that no
    metric changes.
    """

    def __init__(self, home: torch.device = CPU) -> None:
        self._home = home
        self._away: dict[str, list[torch.device]] = {}

    def call(self, hook: TrainingHook, function: Callable[[], Result]) -> Result:
        """Bring a hook's state back, call ``function``, and move the state away again whatever happened."""
        if hook.name in self._away:
            devices = iter(self._away.pop(hook.name))
            hook.load_state_dict(tree_map_only(Tensor, lambda tensor: tensor.to(next(devices)), hook.state_dict()))
        try:
            return function()
        finally:
            state: dict[str, Any] = hook.state_dict()
            if homes := [leaf.device for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]:
                hook.load_state_dict(tree_map_only(Tensor, lambda tensor: tensor.to(self._home), state))
                self._away[hook.name] = homes
