"""Calls of the user's loss and evaluation by hooks: without a graph where none is needed, and with checked results."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..errors import LoopscopeError

Result = TypeVar("Result")


def without_graph(
    name: str,
    compute: Callable[[], Result],
    restored: Callable[[], AbstractContextManager[object]],
    differentiating: set[str],
) -> Result:
    """Return the result of a function of the user, computed without an autograd graph if the function allows that.

    A function that differentiates within itself (a gradient penalty, the residual of a differential equation, forces
    as derivatives of an energy) fails without gradients. It is then called again with them, and its result is detached.

    Args:
        name: what the function computes; it is added to ``differentiating`` once the function has needed gradients.
        compute: the function.
        restored: restores, after its body, everything that the function changes.
        differentiating: the names of the functions that need gradients from the start.
    """
    if name not in differentiating:
        try:
            with restored(), torch.no_grad():
                return compute()
        except Exception as error:
            if not _is_about_gradients(error):
                raise
    with restored(), torch.enable_grad():
        result: Result = tree_map_only(Tensor, Tensor.detach, compute())
    differentiating.add(name)
    return result


def _is_about_gradients(error: Exception) -> bool:
    """Return whether an error may come from gradients that are disabled, under which ``tensor.grad`` is ``None``."""
    text = str(error)
    return not isinstance(error, LoopscopeError) and ("grad" in text or "NoneType" in text)


def loss_with_graph(compute_loss: Callable[[nn.Module, Any], Tensor], model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of a batch, to be differentiated for a hook.

    Raises:
        LoopscopeError: the loss has no graph, or the function calls ``backward()`` itself: its inner gradients would be
            added to those of the loss.
    """
    # The same parameters before and after: in its forward pass FSDP2 replaces shards by complete parameters.
    parameters = [*model.parameters()]
    versions = _gradient_versions(parameters)
    loss = compute_loss(model, batch)
    if _gradient_versions(parameters) != versions:
        raise LoopscopeError(
            "The loss function changed the gradients of the model, as backward() does; return the loss and leave "
            "backward() to the loop, and compute inner derivatives by torch.autograd.grad(..., create_graph=True)."
        )
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        kind = "tensor without a graph" if isinstance(loss, Tensor) else type(loss).__name__
        raise LoopscopeError(
            f"The loss function returned a {kind}, which hooks cannot differentiate; return the loss as a tensor with "
            "its graph, without .item(), float(), detach(), no_grad() and backward()."
        )
    check_number(loss)
    return loss


def check_number(loss: Any) -> None:
    """Raise :class:`LoopscopeError` if a loss is not one number."""
    if not isinstance(loss, Tensor):
        raise LoopscopeError(f"The loss function returned a {type(loss).__name__}; return the loss as a tensor.")
    if loss.numel() != 1:
        raise LoopscopeError(
            f"The loss function returned a tensor of shape {tuple(loss.shape)}; return one number, such as its mean."
        )


def _gradient_versions(parameters: Sequence[Tensor]) -> list[tuple[int, int]]:
    gradients = [parameter.grad for parameter in parameters]
    # Private: torch increments _version at every change in place, which costs no copy and no comparison.
    return [(0, 0) if gradient is None else (id(gradient), gradient._version) for gradient in gradients]
