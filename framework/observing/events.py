"""Backward passes, scaled losses, and the first use of gradients, noticed by wrappers around functions of torch.

The wrappers are installed while any loop listens, and call torch's own function in any case:

- ``torch.autograd._engine_run_backward``: ``torch.autograd.backward`` and ``grad`` call this private function, also if
  a script has imported them by name, and the compiler, which knows these two by themselves, finds them unchanged.
- ``torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype``: every function that clips gradients, or computes
  their joint norm, first calls this private one, also if a script has imported it by name before the wrappers exist.
- ``GradScaler.scale``, ``unscale_`` and ``step``.
"""

from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from ..isolation import VISITS
from .places import place


class LoopEvents(Protocol):
    """What a loop receives; each method returns at once if the loop does not expect the event."""

    thread: int | None
    """The thread of its newest pass, whose events it receives; those of all threads if no pass was seen."""

    def on_scale(self, scaler: GradScaler, scaled: Any) -> None:
        """A scaler has multiplied a loss."""

    def before_backward(self, roots: Sequence[Tensor]) -> None:
        """A backward pass from ``roots`` starts, of this or another model."""

    def after_backward(self, roots: Sequence[Tensor]) -> None:
        """The pass has ended."""

    def on_failed_backward(self) -> None:
        """The pass has raised an error."""

    def on_gradients_returned(self, roots: Sequence[Tensor], inputs: Sequence[Any]) -> None:
        """``torch.autograd.grad`` has returned gradients of inputs, without a graph of these."""

    def on_gradients_used(self, gradients: Sequence[Tensor]) -> None:
        """A norm of gradients is computed, or they are clipped."""

    def on_unscale(self, optimizer: Optimizer) -> None:
        """A scaler unscales the gradients of an optimizer, or lets it step."""


class PassiveListener:
    """A listener that ignores all events but those whose methods it overrides."""

    thread: int | None = None

    def on_scale(self, scaler: GradScaler, scaled: Any) -> None:
        """Ignore a scaled loss."""

    def before_backward(self, roots: Sequence[Tensor]) -> None:
        """Ignore the start of a backward pass."""

    def after_backward(self, roots: Sequence[Tensor]) -> None:
        """Ignore the end of a backward pass."""

    def on_failed_backward(self) -> None:
        """Ignore a failure."""

    def on_gradients_returned(self, roots: Sequence[Tensor], inputs: Sequence[Any]) -> None:
        """Ignore returned gradients."""

    def on_gradients_used(self, gradients: Sequence[Tensor]) -> None:
        """Ignore the use of gradients."""

    def on_unscale(self, optimizer: Optimizer) -> None:
        """Ignore unscaled gradients."""


_LISTENING: "list[ref[LoopEvents]]" = []
"""Weak, so that a scope that is never closed does not keep its model alive; a WeakSet takes 2 µs at every event."""


def listen(loop: LoopEvents) -> None:
    """Report the events of this process to a loop from now on."""
    with VISITS:
        if all(item() is not loop for item in _LISTENING):
            _LISTENING.append(ref(loop, _LISTENING.remove))
        for function in _PLACES:
            function.install()


def _listeners() -> list[LoopEvents]:
    """Return the loops that train in this thread, or in an unknown one."""
    here = get_ident()
    listeners: list[LoopEvents] = []
    for item in tuple(_LISTENING):
        loop = item()
        if loop is not None and (loop.thread == here or loop.thread is None):
            listeners.append(loop)
    return listeners


def stop_listening(loop: LoopEvents) -> None:
    """Report no more events to a loop; further calls do nothing."""
    with VISITS:
        _LISTENING[:] = [item for item in _LISTENING if (one := item()) is not None and one is not loop]
        if not _LISTENING:
            for function in _PLACES:
                function.remove()


def _observed_engine(function: Callable[..., Any]) -> Callable[..., Any]:
    def run_backward(outputs: Sequence[Any], *args: Any, accumulate_grad: bool, **kwargs: Any) -> Any:
        roots = outputs
        if len(outputs) != 1 or not isinstance(outputs[0], Tensor):
            roots = [item for item in outputs if isinstance(item, Tensor)]
        listeners = _listeners()
        if not accumulate_grad:
            result = function(outputs, *args, accumulate_grad=accumulate_grad, **kwargs)
            _, _, creates_graph, inputs, *_ = args
            if not creates_graph:
                for loop in listeners:
                    loop.on_gradients_returned(roots, inputs)
            return result
        for loop in listeners:
            loop.before_backward(roots)
        try:
            result = function(outputs, *args, accumulate_grad=accumulate_grad, **kwargs)
        except BaseException:
            for loop in listeners:
                loop.on_failed_backward()
            raise
        for loop in listeners:
            loop.after_backward(roots)
        return result

    return run_backward


def _observed_grouping(function: Callable[..., Any]) -> Callable[..., Any]:
    def group_tensors_by_device_and_dtype(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        for loop in _listeners():
            loop.on_gradients_used(tensors[0])
        return function(tensors, *args, **kwargs)

    return group_tensors_by_device_and_dtype


def _observed_scale(function: Callable[..., Any]) -> Callable[..., Any]:
    def scale(scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
        scaled = function(scaler, *args, **kwargs)
        for loop in _listeners():
            loop.on_scale(scaler, scaled)
        return scaled

    return scale


def _observed_unscale(function: Callable[..., Any]) -> Callable[..., Any]:
    def unscale(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        for loop in _listeners():
            loop.on_unscale(optimizer)
        return function(scaler, optimizer, *args, **kwargs)

    return unscale


_PLACES = (
    place(torch.autograd, "_engine_run_backward", _observed_engine),
    place(clip_grad, "_group_tensors_by_device_and_dtype", _observed_grouping),
    place(GradScaler, "scale", _observed_scale),
    place(GradScaler, "unscale_", _observed_unscale),
    place(GradScaler, "step", _observed_unscale),
)
