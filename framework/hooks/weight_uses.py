"""The uses of a weight in a graph: listening where its gradient leaves a module, or the rest of a model."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

OnGradient = Callable[[Tensor], Tensor | None]
Around = tuple[Callable[..., None] | None, Callable[..., None]]
"""What is called before (if anything) and after a module's forward."""


def around_weight(on_gradient: OnGradient, is_heard: Callable[[], bool]) -> Around:
    """Listen where the gradient of a module's weight leaves this module: at the nodes of the graph that make it.

    The graph stays as it is. A stand-in for the weight would not do: autocast casts leaves once a region and all else
    at every use, so that the parts would be summed in another precision than in the run without the tap.
    """
    begins: list[int] = []

    def before(module: nn.Module, inputs: tuple[object, ...]) -> None:
        # Nodes are numbered as they are made (torch 2.9 to 2.15); torch shows it nowhere else.
        begins.append(torch._C._autograd._get_sequence_nr())  # type: ignore[attr-defined]

    def after(module: nn.Module, inputs: tuple[object, ...], output: Any) -> None:
        begin = begins.pop()
        if torch.is_grad_enabled() and is_heard():
            weight: Any = module.weight
            for node, index in _uses(weight, output, begin):
                node.register_hook(partial(_pass_on, on_gradient, weight.dtype, index))

    return before, after


def around_elsewhere(on_gradient: OnGradient, is_heard: Callable[[], bool], module: nn.Module) -> tuple[Around, Around]:
    """Listen where a module's weight is used outside of the module; what goes around the module, and the model."""
    inner, outer, own = [0], [0], set[tuple[Any, int]]()

    def note(place: list[int], module: nn.Module, inputs: tuple[object, ...]) -> None:
        place[0] = torch._C._autograd._get_sequence_nr()  # type: ignore[attr-defined]

    def uses(output: object, begin: int) -> list[tuple[Any, int]]:
        heard = torch.is_grad_enabled() and is_heard()
        return _uses(module._parameters["weight"], output, begin) if heard else []  # type: ignore[arg-type]

    def after(_: nn.Module, inputs: tuple[object, ...], output: Any) -> None:
        own.update(uses(output, inner[0]))

    def after_all(_: nn.Module, inputs: tuple[object, ...], output: Any) -> None:
        for node, index in uses(output, outer[0]):
            if (node, index) not in own:
                node.register_hook(partial(_pass_on, on_gradient, module.get_parameter("weight").dtype, index))
        own.clear()

    return (partial(note, inner), after), (partial(note, outer), after_all)


def _uses(weight: Tensor, output: object, begin: int) -> list[tuple[Any, int]]:
    """Return the nodes made since ``begin`` that give a leaf gradients, with the places of these among what they give.

    A node that casts the leaf stands for it, since under autocast others may use the same cast.
    """
    nodes: list[Any] = [leaf.grad_fn for leaf in tree_iter(output) if isinstance(leaf, Tensor) and leaf.grad_fn]
    seen, found = set(nodes), []
    for node in nodes:  # which grows
        for index, (source, _) in enumerate(node.next_functions):
            if source is None or source in seen:
                continue
            if _is_leaf(source, weight) or _is_cast(source, weight):
                found.append((node, index))
            elif source._sequence_nr() >= begin:
                seen.add(source)
                nodes.append(source)
    return found


def _is_leaf(node: Any, weight: Tensor) -> bool:
    return node is not None and node.name() == "torch::autograd::AccumulateGrad" and node.variable is weight


def _is_cast(node: Any, weight: Tensor) -> bool:
    return node.name() == "ToCopyBackward0" and _is_leaf(node.next_functions[0][0], weight)


def _pass_on(
    on_gradient: OnGradient, dtype: torch.dtype, index: int, given: tuple[Tensor | None, ...], _: object
) -> tuple[Tensor | None, ...] | None:
    """Show what a node gives at a place, in the weight's dtype, and give the replacement in its stead."""
    gradient = given[index]
    if gradient is None or (replacement := on_gradient(gradient.to(dtype))) is None:
        return None
    return *given[:index], replacement.to(gradient.dtype), *given[index + 1 :]
