"""Calls within a backward pass whose queued callbacks of the autograd engine run before the call ends.

A hook can queue a callback on the backward pass in which it is called (``Variable._execution_engine.queue_callback``).
The engine would call it at the end of that pass, after every check of the hook, and no function lists these callbacks.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
# -1 outside of backward passes. Private: torch has no public function for it (torch 2.9 to 2.15).
current_pass: Callable[[], int] = torch._C._current_graph_task_id
_engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]


class _InnerPass(threading.local):
    """A backward pass without operations, inside of which functions are called: one per thread.

    The engine runs callbacks at the end of the innermost pass in which they were queued. The pass asks for the gradient
    of a leaf with respect to itself, so that only the leaf's hook runs: modes of the script see no operation, and no
    kernel is launched. It takes 8 µs; ``torch.autograd.grad`` on a new graph took 49 µs.
    """

    def __init__(self) -> None:
        self._functions: list[Callable[[], None]] = []
        self._leaf = torch.zeros(1).requires_grad_()
        self._gradient = torch.zeros(1)
        self._leaf.register_hook(self._call_last)  # type: ignore[no-untyped-call]

    def _call_last(self, _: Tensor) -> None:
        self._functions[-1]()

    def run(self, function: Callable[[], None]) -> None:
        """Call a function, then the callbacks that it queued."""
        self._functions.append(function)
        try:
            _engine.run_backward((self._leaf,), (self._gradient,), False, False, (self._leaf,), False, False)
        finally:
            self._functions.pop()


_inner_pass: list[_InnerPass] = []


def with_callbacks(function: Callable[[], Result]) -> Result:
    """Return the result of a function after the engine has called the callbacks that the function queued."""
    if current_pass() == -1:
        return function()
    if not _inner_pass:  # created at first use, since it creates tensors and the handle of a hook
        _inner_pass.append(_InnerPass())
    results: list[Any] = []
    grad_mode = torch.is_grad_enabled()

    def call() -> None:
        torch._C._set_grad_enabled(grad_mode)  # the engine disables gradients in its passes
        results.append(function())

    _inner_pass[0].run(call)
    result: Result = results[0]
    return result
