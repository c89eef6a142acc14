"""Forward and backward passes in a wider precision than that of the model or autocast."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

LOW = (torch.float16, torch.bfloat16)


class Widened(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Make every operation on float16 or bfloat16 (for float64 also on float32) compute and return a wider dtype.

    The mode is below autograd and autocast: a cast to a low precision gives the wide dtype, and so does an operation on
    a low-precision parameter. In a backward pass only operations on mixed dtypes are widened, since autograd itself
    casts the gradient of such a parameter back. In-place operations compute in the dtype of the tensor they write to.
    """

    def __init__(self, wide: torch.dtype = torch.float32) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._wide, self._narrow = wide, LOW if wide is torch.float32 else (*LOW, torch.float32)
        self.converted_count = 0
        """Number of widened tensors and casts."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function with low-precision arguments widened."""
        inputs = (tuple(args), dict(kwargs or {}))
        # A private function, since torch has no public way to detect a running backward pass.
        in_backward = torch._C._current_graph_task_id() != -1
        dtypes = {leaf.dtype for leaf in tree_iter(inputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()}
        # The schema of an operator, private in torch, shows which arguments the operator writes to.
        if function._schema.is_mutable:
            inputs = tree_map(self._caster(_written_tensors(function, *inputs)), inputs)
        elif dtypes and (not in_backward or len(dtypes) > 1):  # factory functions may create a scaler's tensors
            inputs = tree_map(self._widen, inputs)
        return function(*inputs[0], **inputs[1])

    def _caster(self, written: list[Tensor]) -> Callable[[Any], Any]:
        """Return a function that casts wide tensors to the dtype of the written tensor."""
        narrow = next((tensor.dtype for tensor in written if tensor.dtype in self._narrow), None)

        def cast(value: Any) -> Any:
            is_wide = isinstance(value, Tensor) and value.dtype is self._wide
            return value.to(narrow) if is_wide and narrow is not None else value

        return cast

    def _widen(self, value: Any) -> Any:
        dtype = value.dtype if isinstance(value, Tensor) else value
        if not isinstance(dtype, torch.dtype) or dtype not in self._narrow:
            return value
        self.converted_count += 1
        return value.to(self._wide) if isinstance(value, Tensor) else self._wide


def _written_tensors(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that a function writes to."""
    names = [item.name for item in function._schema.arguments if item.is_write]
    named = {item.name: value for item, value in zip(function._schema.arguments, args, strict=False)} | dict(kwargs)
    return [leaf for name in names for leaf in tree_iter(named.get(name)) if isinstance(leaf, Tensor)]


@contextmanager
def widen_layer(layer: nn.Module, mode: Widened) -> Iterator[None]:
    """Run the calls of one layer in the mode."""

    def enter(*_: Any) -> None:
        mode.__enter__()  # type: ignore[no-untyped-call]

    def leave(*_: Any) -> None:
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    pre_hook = layer.register_forward_pre_hook(enter, prepend=True)
    # With always_call the mode also ends if the layer raises an error.
    post_hook = layer.register_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        pre_hook.remove()
        post_hook.remove()
