"""The product of a linear layer with its matrices cast, its gradient straight through the casts, and its repetition."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from ..errors import LoopscopeError
from ..state import Transient
from .casts import Cast, Counts
from .recipes import ROLES, Recipe, Role

Lost = dict[tuple[Role, Cast], Counts]
_numbers = count(1)


@dataclass(frozen=True)
class LayerCall:
    """One forward call of a layer.

    Args:
        number: different for every call of this process; 0 if another call would cast alike.
        seed: of the random numbers of its casts.
        with_gradient: autograd recorded it.
        earlier: by role, the largest magnitude that a rule with a history was given.
        counted: what its forward casts lost, by role and cast, if that was counted.
        repeated: it is the recomputation of that call by activation checkpointing.
    """

    number: int = 0
    seed: int = 0
    with_gradient: bool = False
    earlier: dict[str, Tensor] = field(default_factory=dict)
    counted: Lost = field(default_factory=dict)
    repeated: bool = False

    def generator(self, role: Role, device: torch.device) -> torch.Generator:
        """Return a fresh generator for the cast of one matrix."""
        return torch.Generator(device).manual_seed(self.seed + ROLES.index(role))


class Calls(Transient):
    """Holds the newest call of each part of a layer until its backward pass; between steps nobody needs it."""

    def __init__(self) -> None:
        self.newest: dict[str, LayerCall] = {}

    def begin(self, part: str, recipe: Recipe, generator: torch.Generator) -> LayerCall:
        """Return the call that begins: a new one, or under recomputation the newest one again.

        A forward within a backward pass is a recomputation. Raises :class:`LoopscopeError` where it cannot be repeated.
        """
        # torch has no public way to ask; checkpointing recomputes a forward while the engine works on a graph task
        within_backward = torch._C._current_graph_task_id() != -1
        if not recipe.draws and not recipe.varies:
            return LayerCall(repeated=within_backward)
        if within_backward and part in self.newest:
            newest = self.newest[part]
            if recipe.varies and not newest.with_gradient:
                raise LoopscopeError(
                    "Reentrant activation checkpointing cannot repeat stochastic rounding or delayed scaling of a "
                    "low-bit layer's forward pass; pass use_reentrant=False to torch.utils.checkpoint."
                )
            return replace(newest, repeated=True)
        seed = int(torch.randint(2**62, (), generator=generator)) if recipe.draws else 0
        number = next(_numbers) if recipe.varies else 0
        call = self.newest[part] = LayerCall(number, seed, torch.is_grad_enabled())
        return call


Quantize = Callable[[Role, Tensor, LayerCall], Tensor]
"""Returns a matrix of a call after the cast of its role."""


class QuantizedLinear(torch.autograd.Function):
    """y = Q(x) Q(W)ᵀ + b; dx = Q(g) Q(W) and dW = Q(g)ᵀ Q(x), each matrix with the cast of its role.

    Straight through: the derivative of every cast is taken to be one. db is the sum of g as it arrives, since no matrix
    product, and so no narrow format, is part of it. Kept for backward are x and W themselves, which live anyway, and of
    them only what the wanted gradients need.

    The gradient can itself be differentiated, straight through once more; the pass that does so casts no output
    gradients, so that Hessian-vector products are linear in the vector and the Hessian is symmetric.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, quantize: Quantize, call: LayerCall
    ) -> Tensor:
        """Return y of shape (..., out) for x (..., in), W (out, in), b (out)."""
        ctx.quantize, ctx.call, ctx.is_differentiated = quantize, call, False
        x_is_wanted, weight_is_wanted = ctx.needs_input_grad[:2]
        # The number goes along as a tensor, since checkpointing then brings that of the recomputation to ``backward``.
        mark = torch.tensor(call.number) if call.number else None
        ctx.save_for_backward(x if weight_is_wanted else None, weight if x_is_wanted else None, mark)
        return functional.linear(quantize("forward_input", x, call), quantize("forward_weight", weight, call), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of x, W and b, as far as they are wanted."""
        x, weight, mark = ctx.saved_tensors
        if mark is not None and int(mark) != ctx.call.number:
            raise LoopscopeError(
                "Activation checkpointing repeats the newest call of a low-bit layer only, but here an earlier one was "
                "needed, whose stochastic rounding or delayed scaling was another; run backward before the layer is "
                "called again, or use nearest rounding and a rule without a history in the forward pass."
            )
        x_is_wanted, weight_is_wanted, bias_is_wanted = ctx.needs_input_grad[:3]
        second_pass = ctx.is_differentiated
        ctx.is_differentiated = second_pass or torch.is_grad_enabled()
        rows = gradient.reshape(-1, gradient.shape[-1])
        dx = dw = db = None
        if x_is_wanted or weight_is_wanted:
            rounded = rows if second_pass else _through(ctx, "output_grad", rows)
        if x_is_wanted:
            dx = rounded.mm(_through(ctx, "backward_weight", weight))
            dx = dx.reshape(*gradient.shape[:-1], weight.shape[1])
        if weight_is_wanted:
            inputs = _through(ctx, "backward_input", x)
            dw = rounded.t().mm(inputs.reshape(-1, inputs.shape[-1]))
        if bias_is_wanted:
            db = rows.sum(0)
        return dx, dw, db, None, None


class StraightThrough(torch.autograd.Function):
    """Another tensor in the place of one, with the derivative of the identity."""

    @staticmethod
    def forward(ctx: FunctionCtx, values: Tensor, rounded: Tensor) -> Tensor:
        """Return ``rounded``."""
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradient as that of ``values``."""
        return gradient, None


def _through(ctx: Any, role: Role, values: Tensor) -> Tensor:
    """Cast a matrix in the backward pass, differentiably where that is itself differentiated.

    What is not finite in a float16 gradient passes: saturated, it would hide from the scaler that the step is lost.
    """
    with torch.no_grad():
        rounded: Tensor = ctx.quantize(role, values.detach(), ctx.call)
        if role == "output_grad" and values.dtype is torch.float16:
            rounded = torch.where(values.isfinite(), rounded, values)
    if not torch.is_grad_enabled():
        return rounded
    through: Tensor = StraightThrough.apply(values, rounded)  # type: ignore[no-untyped-call]
    return through
