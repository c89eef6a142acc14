"""Counts transfers to the host where there is no accelerator to make them."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Scalars(TorchDispatchMode):
    """Shows ``read`` every tensor of which torch reads a number on the host, wherever in its own code it does."""

    def __init__(self, read: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.read = read

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket is torch.ops.aten._local_scalar_dense:
            self.read(args[0])
        return function(*args, **(kwargs or {}))


class TransferCount(TorchFunctionMode):
    """Counts what would be transfers if all tensors lay on an accelerator but those that came to the host in one.

    Of ``to`` only ``to("cpu")`` is one, in these words: ``to(other.device)`` stays on the accelerator.
    """

    READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.on_host: list[Tensor] = []
        self.scalars = Scalars(self.read)

    def __enter__(self):
        self.scalars.__enter__()
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        self.scalars.__exit__(*exception)

    def read(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage().data_ptr()
        self.count += storage not in {host.untyped_storage().data_ptr() for host in self.on_host}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in self.READS:
            self.read(args[0])
        result = function(*args, **kwargs)
        if function is Tensor.cpu or (function is Tensor.to and "cpu" in (*args[1:], *kwargs.values())):
            self.read(args[0])
            result = result.clone()
            self.on_host.append(result)
        return result
