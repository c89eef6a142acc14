"""Counts where the host waits for a device to hand over a number, as ``.item()``, ``float()`` and ``bool()`` do."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class DeviceWaits(TorchDispatchMode):
    """Counts in the body of a ``with`` statement."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))
