"""Callbacks around the forward pass of a module that tap the gradient of its output, or its input."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from ..hooks import OnGradient
from .passes import is_training_use

ForwardCallbacks = tuple[Callable[..., None] | None, Callable[..., None] | None]
"""Functions that are called before and after a module's forward; ``None`` for none."""

FORWARD_TENSORS = {"input": "an input"}
"""The kinds of taps that read a tensor of the forward pass, which they cannot replace, with its name in errors."""


def first_tensor(value: Any) -> Tensor | None:
    """Return the first tensor in nested containers."""
    return next((leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor)), None)


def output_callbacks(on_gradient: OnGradient, is_active: Callable[[], bool]) -> ForwardCallbacks:
    """Return callbacks that tap the gradient of a module's first output tensor."""

    def after(module: nn.Module, inputs: tuple[object, ...], output: Any) -> None:
        if not is_active():  # checked first: most hooks are due on few steps
            return
        # The tensor is tapped, not the module: full-backward module hooks cost 6 ms of an 85 ms step, and fail for
        # modules that work in place.
        first = first_tensor(output)
        if first is not None and first.requires_grad:
            # The hook belongs to this pass's graph and disappears with it.
            first.register_hook(on_gradient)  # type: ignore[no-untyped-call]

    return None, after


def input_callbacks(on_input: OnGradient, is_active: Callable[[], bool]) -> ForwardCallbacks:
    """Return callbacks that tap a module's first input tensor, once per use."""

    def before(module: nn.Module, inputs: tuple[object, ...]) -> None:
        if not (is_active() and is_training_use()):
            return
        first = first_tensor(inputs)
        if first is not None:
            with torch.no_grad():
                on_input(first.detach())

    return before, None
