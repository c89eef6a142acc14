"""Taps on the parts of a weight's gradient: from one module, or from the rest of the model."""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from ..hooks import OnGradient
from ..state import skips_frames
from .callbacks import ForwardCallbacks


def weight_callbacks(on_gradient: OnGradient, is_active: Callable[[], bool]) -> ForwardCallbacks:
    """Return callbacks that tap the gradient of a weight from one module, at the graph nodes that produce it.

    The graph does not change. Replacing the weight by another tensor would change results: autocast casts leaves once
    per region, but other tensors at every use, so the parts would be summed in another precision than without the tap.
    """
    start_numbers: list[int] = []

    def before(module: nn.Module, inputs: tuple[object, ...]) -> None:
        # Graph nodes are numbered in order of creation (torch 2.9 to 2.15); no public API returns the next number.
        start_numbers.append(torch._C._autograd._get_sequence_nr())  # type: ignore[attr-defined]

    def after(module: nn.Module, inputs: tuple[object, ...], output: Any) -> None:
        start = start_numbers.pop()
        if torch.is_grad_enabled() and is_active():
            tap_uses(module._parameters["weight"], output, start, on_gradient)  # type: ignore[arg-type]

    return before, after


def tap_uses(
    weight: Tensor, output: object, start: int, on_gradient: OnGradient, excluded: Collection[tuple[Any, int]] = ()
) -> None:
    """Tap the gradients that a weight gets from the nodes of an output with numbers from ``start``."""
    for node, index in weight_uses(weight, output, start):
        if (node, index) not in excluded:
            node.register_hook(partial(_apply_tap, on_gradient, weight.dtype, index))


def elsewhere_callbacks(
    on_gradient: OnGradient, is_active: Callable[[], bool], module: nn.Module
) -> tuple[ForwardCallbacks, ForwardCallbacks]:
    """Return callbacks for a module and for the model that tap the weight's gradient from outside of the module.

    The one before the model's forward is for a :class:`FunctionBeforeForward`.
    """
    module_start, model_start, module_uses = [0], [0], set[tuple[Any, int]]()

    def before_module(_: nn.Module, inputs: tuple[object, ...]) -> None:
        module_start[0] = torch._C._autograd._get_sequence_nr()  # type: ignore[attr-defined]

    @skips_frames
    def before_model(_: nn.Module, inputs: tuple[object, ...], is_compiled: bool) -> None:
        model_start[:] = [] if is_compiled else [torch._C._autograd._get_sequence_nr()]  # type: ignore[attr-defined]

    def after_module(_: nn.Module, inputs: tuple[object, ...], output: Any) -> None:
        if torch.is_grad_enabled() and is_active():
            module_uses.update(weight_uses(module._parameters["weight"], output, module_start[0]))  # type: ignore[arg-type]

    def after_model(_: nn.Module, inputs: tuple[object, ...], output: Any) -> None:
        if torch.is_grad_enabled() and is_active():
            for start in model_start:  # none if the compiler makes graphs of the pass, which call the tap
                tap_uses(module._parameters["weight"], output, start, on_gradient, module_uses)  # type: ignore[arg-type]
        module_uses.clear()

    return (before_module, after_module), (before_model, after_model)


def weight_uses(weight: Tensor, output: object, start: int) -> list[tuple[Any, int]]:
    """Return the nodes with numbers from ``start`` that send gradients to a leaf, each with the index of that gradient.

    A node that casts the leaf counts as the leaf: under autocast, other modules may use the same cast.
    """
    # Breadth-first search from the outputs; older nodes belong to earlier parts of the graph and end it.
    nodes: list[Any] = [leaf.grad_fn for leaf in tree_iter(output) if isinstance(leaf, Tensor) and leaf.grad_fn]
    seen, weight_uses = set(nodes), []
    for node in nodes:  # the list grows
        for index, (source, _) in enumerate(node.next_functions):
            if source is None or source in seen:
                continue
            if _is_leaf(source, weight) or _is_cast(source, weight):
                weight_uses.append((node, index))
            elif source._sequence_nr() >= start:
                seen.add(source)
                nodes.append(source)
    return weight_uses


def _is_leaf(node: Any, weight: Tensor) -> bool:
    # AccumulateGrad is the node that adds gradients to a leaf, and its `variable` is the leaf itself. While
    # AOTAutograd records a graph, parameters are no leaves.
    if node is None or node is weight.grad_fn:
        return node is not None
    return bool(node.name() == "torch::autograd::AccumulateGrad" and node.variable is weight)


def _is_cast(node: Any, weight: Tensor) -> bool:
    # ToCopyBackward0 is the node of a conversion to another dtype or device, here directly of the leaf.
    return node.name() == "ToCopyBackward0" and _is_leaf(node.next_functions[0][0], weight)


def _apply_tap(
    on_gradient: OnGradient, dtype: torch.dtype, index: int, gradients: tuple[Tensor | None, ...], _: object
) -> tuple[Tensor | None, ...] | None:
    """Pass a node's gradient at ``index`` to a tap, in the weight's dtype, and return the gradients with its result."""
    # A node's hook receives the gradients of all inputs of the node, and may return others in their place.
    gradient = gradients[index]
    if gradient is None or (replacement := on_gradient(gradient.to(dtype))) is None:
        return None
    return *gradients[:index], replacement.to(gradient.dtype), *gradients[index + 1 :]
