"""Counts where the host waits for a device to hand over a number, as ``.item()``, ``float()`` and ``bool()`` do.

Tensors are on the CPU; meanwhile loopscope treats them like those of a device, which it does not read at once.
"""

from typing import Any
from unittest.mock import patch

import torch
from loopscope.tensors import reductions
from torch.utils._python_dispatch import TorchDispatchMode


class DeviceWaits(TorchDispatchMode):
    """Counts in the body of a ``with`` statement."""

    count = 0

    def __enter__(self) -> "DeviceWaits":
        self._patch = patch.object(reductions, "is_readable", lambda tensor: False)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))
