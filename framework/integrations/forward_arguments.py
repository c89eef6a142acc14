"""The arguments of a model's forward passes, for loops whose batches are unknown."""

import sys
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ..isolation import VISITS


class ForwardArguments:
    """Passes the arguments of the next pass with gradients on to ``receive``, at each call of :meth:`arm`.

    It uses a hook of all modules, which the next pass in train mode removes: a hook of the model would be in every
    copy, file and compiled graph of it.

    Args:
        modules: the model, and the wrapper around it that the loop calls, if any.
        receive: receives the only argument, or the arguments by name.
        is_in_hook: returns whether a hook is being called, whose passes do not count.
    """

    def __init__(
        self, modules: Sequence[nn.Module], receive: Callable[[Any], None], is_in_hook: Callable[[], bool]
    ) -> None:
        self._modules, self._receive, self._is_in_hook = modules, receive, is_in_hook
        self._handle: Any = None
        self._has_received = False
        self._is_given_up = False

    def arm(self) -> None:
        """Wait for the next pass."""
        if self._handle is None and not self._is_given_up:
            with VISITS:
                self._handle = register_module_forward_pre_hook(self._note)

    def disarm(self) -> None:
        """Wait no longer."""
        if self._handle is not None:
            with VISITS:
                self._handle.remove()
            self._handle = None

    def after_backward(self) -> None:
        """Wait for the pass of the next micro-batch; give up if this one had none, as in a compiled function."""
        if not self._has_received:
            self._is_given_up = True
            self.disarm()
        self._has_received = False
        self.arm()

    def _note(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():  # without an effect in a graph; after_backward removes the hook
            return
        if not torch.is_grad_enabled() or self._is_in_hook() or not any(module is item for item in self._modules):
            return
        if module.training:  # a pass in eval mode may be one of an evaluation with gradients on
            self.disarm()
        self._has_received = True
        # torch has no hook of all modules with keyword arguments; its Module._call_impl has them under this name.
        options = sys._getframe(1).f_locals.get("kwargs", {})
        self._receive(_as_batch(module, inputs, options))


def _as_batch(module: nn.Module, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Return the only argument of a pass, or its arguments by name."""
    if len(inputs) == 1 and not options:
        return inputs[0]
    try:
        return dict(signature(module.forward).bind(*inputs, **options).arguments)
    except (TypeError, ValueError):  # a function that is not written in Python
        return {**{str(index): value for index, value in enumerate(inputs)}, **options}
