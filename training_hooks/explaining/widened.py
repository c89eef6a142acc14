"""Forward and backward passes in a wider precision than the model or autocast asks for."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

LOW = (torch.float16, torch.bfloat16)


class Widened(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Let every operation on float16 or bfloat16 (with float64, on float32 too) compute, and return, a wider dtype.

    It stands below autograd and autocast: a cast to a low precision gives the wide one, and so does an operation on a
    parameter of one. In a backward pass only operations on both are widened, since autograd itself casts the gradient
    of such a parameter back. What writes to a tensor computes in that tensor's dtype.
    """

    def __init__(self, wide: torch.dtype = torch.float32) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._wide, self._narrow = wide, LOW if wide is torch.float32 else (*LOW, torch.float32)
        self.met = 0
        """How many tensors or casts were widened."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function with what is of low precision widened."""
        given = (tuple(args), dict(kwargs or {}))
        # Private, as torch tells by no public name whether a backward pass is going on.
        backward = torch._C._current_graph_task_id() != -1
        kinds = {leaf.dtype for leaf in tree_iter(given) if isinstance(leaf, Tensor) and leaf.is_floating_point()}
        if function._schema.is_mutable:
            given = tree_map(self._like(_written(function, *given)), given)
        elif kinds and (not backward or len(kinds) > 1):  # what makes a tensor of nothing may make a scaler's own
            given = tree_map(self._widened, given)
        return function(*given[0], **given[1])

    def _like(self, written: list[Tensor]) -> Callable[[Any], Any]:
        """Return what casts wide tensors to the dtype of what is written to, such as the statistics of a batch norm."""
        narrow = next((tensor.dtype for tensor in written if tensor.dtype in self._narrow), None)

        def cast(value: Any) -> Any:
            is_wide = isinstance(value, Tensor) and value.dtype is self._wide
            return value.to(narrow) if is_wide and narrow is not None else value

        return cast

    def _widened(self, value: Any) -> Any:
        dtype = value.dtype if isinstance(value, Tensor) else value
        if not isinstance(dtype, torch.dtype) or dtype not in self._narrow:
            return value
        self.met += 1
        return value.to(self._wide) if isinstance(value, Tensor) else self._wide


def _written(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that a function writes to."""
    names = [item.name for item in function._schema.arguments if item.is_write]
    named = {item.name: value for item, value in zip(function._schema.arguments, args, strict=False)} | dict(kwargs)
    return [leaf for name in names for leaf in tree_iter(named.get(name)) if isinstance(leaf, Tensor)]


@contextmanager
def layer_widened(layer: nn.Module, mode: Widened) -> Iterator[None]:
    """Let the calls of one layer run in the mode."""

    def enter(*_: Any) -> None:
        mode.__enter__()  # type: ignore[no-untyped-call]

    def leave(*_: Any) -> None:
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    begin = layer.register_forward_pre_hook(enter, prepend=True)
    end = layer.register_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        begin.remove()
        end.remove()
