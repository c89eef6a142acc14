"""Results of one visit to a hook point that several observers report."""

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

from loopscope import RunDataContext
from loopscope.tensors import gradients, joint_norm, live_gradients, norm, norm_of_each, trainable
from torch import Tensor, nn

Result = TypeVar("Result")


def compute_once(ctx: RunDataContext, function: Callable[[nn.Module], Result]) -> Result:
    """Return ``function(ctx.model)``, which is computed once for all observers of a visit to a hook point.

    The observers share the result, so none may change it. Call this only in ``compute``: observers of a visit see the
    same weights and gradients, while interventions change them within a call, and commits after it.
    """
    visit = _LATEST.get(ctx.model)
    # By the identity of the context: writes through ``tensor.data`` leave no trace by which to recognise other values.
    if visit is None or visit[0]() is not ctx:
        visit = _LATEST[ctx.model] = ref(ctx), {}
    results = visit[1]
    if function not in results:
        results[function] = function(ctx.model)
    result: Result = results[function]
    return result


def joint_gradient_norm(model: nn.Module) -> Tensor:
    """Return the joint norm of the live gradients, zero-dimensional."""
    return joint_norm(live_gradients(model.parameters()))


def gradient_norms(model: nn.Module) -> dict[str, Tensor]:
    """Return the norm of each live gradient by parameter name, zero-dimensional each."""
    return norm_of_each(gradients(model))


def joint_weight_norm(model: nn.Module) -> Tensor:
    """Return the joint norm of the trainable parameters, zero-dimensional."""
    return norm(trainable(model))


def weight_norms(model: nn.Module) -> dict[str, Tensor]:
    """Return the norm of each trainable parameter by name, zero-dimensional each."""
    return norm_of_each(trainable(model))


_LATEST: "WeakKeyDictionary[nn.Module, tuple[ref[RunDataContext], dict[Callable[..., Any], Any]]]" = WeakKeyDictionary()
"""The latest visit for each model, by its context, and its results by function."""
