"""Tensors that the host reads without waiting for an accelerator."""

from torch import Tensor


def is_on_host(tensor: Tensor) -> bool:
    """Return whether a tensor is in the memory of the host."""
    return tensor.device.type == "cpu"
