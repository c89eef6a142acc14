"""Counter of transfers to the host that works without an accelerator."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from loopscope.engine import metric_delivery
from loopscope.hooks import TrainingHook
from loopscope.tensors import reductions
from loopscope.training import Ranks
from loopscope.training_hooks.checks import batch_facts, gradient_counts
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Scalars(TorchDispatchMode):
    """Calls ``read`` with every tensor from which torch reads a number on the host, also within torch's own code."""

    def __init__(self, read: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.read = read

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket is torch.ops.aten._local_scalar_dense:
            self.read(args[0])
        return function(*args, **(kwargs or {}))


class TransferCount(TorchFunctionMode):
    """Counts the reads that would be transfers if all tensors were on an accelerator.

    Tensors that a previous transfer brought to the host are not counted, nor are the results of collectives between
    ranks. Of the forms of ``to``, only ``to("cpu")`` counts: ``to(other.device)`` stays on the accelerator.
    """

    READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
    active: ClassVar[list["TransferCount"]] = []

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.on_host: list[Tensor] = []
        self.undoing = ExitStack()

    def __enter__(self):
        self.active.append(self)
        self.undoing.callback(self.active.remove, self)
        for function, replacement in ((Ranks._reduce, self.reducing), (Ranks.gather, self.gathering)):
            self.undoing.enter_context(patch.object(Ranks, function.__name__, replacement(function)))
        self.undoing.enter_context(Scalars(self.read))
        # so that sums take the way of an accelerator, which reads nothing
        self.undoing.enter_context(patch.object(reductions, "is_readable", lambda tensor: False))
        self.undoing.enter_context(patch.object(metric_delivery, "FEW", 0))  # likewise, metrics are copied
        for module in (batch_facts, gradient_counts):
            self.undoing.enter_context(patch.object(module, "is_on_host", lambda tensor: False))
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        self.undoing.close()

    def reducing(self, reduce: Callable[[Ranks, Tensor], None]) -> Callable[[Ranks, Tensor], None]:
        def reduced(ranks: Ranks, value: Tensor) -> None:
            self.on_host.append(value)
            reduce(ranks, value)

        return reduced

    def gathering(self, gather: Callable[[Ranks, Any], Any]) -> Callable[[Ranks, Any], Any]:
        def gathered(ranks: Ranks, value: Any) -> Any:
            for tensor in filter(torch.is_tensor, tree_leaves(value)):
                self.read(tensor)
            gathered_values = uncounted(gather)(ranks, value)
            self.on_host += filter(torch.is_tensor, tree_leaves(gathered_values))
            return gathered_values

        return gathered

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


def uncounted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude the reads of a function from every count."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        counts = [(counter, counter.count) for counter in TransferCount.active]
        result = function(*args, **kwargs)
        for counter, count in counts:
            counter.count = count
        return result

    return called


def count_transfers(hook: TrainingHook) -> list[int]:
    """Return a list that grows by the number of transfers of each call of a hook."""
    counts: list[int] = []
    compute = hook.compute

    def counted(ctx: Any) -> Any:
        with TransferCount() as counter:
            metrics = compute(ctx)
        counts.append(counter.count)
        return metrics

    hook.compute = counted  # type: ignore[method-assign]
    return counts
