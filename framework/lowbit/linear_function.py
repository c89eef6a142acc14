"""Autograd function of a linear layer with cast matrices: product, straight-through gradient, recomputation."""

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
from .hadamard import hadamard_transform
from .recipes import ROLES, Recipe, Role

CountsByCast = dict[tuple[Role, Cast], Counts]
_numbers = count(1)


@dataclass(frozen=True)
class LayerCall:
    """One forward call of a layer.

    Args:
        number: a unique number in this process; 0 if every call casts identically.
        seed: the seed of the random numbers of its casts.
        with_gradient: whether autograd recorded the call.
        earlier: the largest earlier magnitude for rules with a history, by role.
        forward_counts: the losses of its forward casts, by role and cast, if they were counted.
        repeated: whether this is the recomputation of the call by activation checkpointing.
        along_sum: whether operands of backward products are cast with the summed dimension last.
        hadamard: the size of the Hadamard transform of both operands of dW before their casts; 0: none.
        recorded: one entry for each backward pass of the call that can be differentiated.
    """

    number: int = 0
    seed: int = 0
    with_gradient: bool = False
    earlier: dict[str, Tensor] = field(default_factory=dict)
    forward_counts: CountsByCast = field(default_factory=dict)
    repeated: bool = False
    along_sum: bool = False
    hadamard: int = 0
    recorded: list[bool] = field(default_factory=list)

    def transposed(self) -> "LayerCall":
        """Return the call for casts of transposed matrices, which have different random draws and losses."""
        # Each cast is seeded with seed + index of its role, an index below len(ROLES): the two calls share no seed.
        return replace(self, seed=self.seed + len(ROLES), forward_counts={})

    def generator(self, role: Role, device: torch.device) -> torch.Generator:
        """Return a new generator for the cast of one matrix."""
        kind = "cpu" if device.type == "meta" else device  # torch has no generators for the meta device
        return torch.Generator(kind).manual_seed(self.seed + ROLES.index(role))


class Calls(Transient):
    """The newest call of each part of a layer, needed until its backward pass; not part of checkpoints."""

    def __init__(self) -> None:
        self.newest: dict[str, LayerCall] = {}

    def start_call(self, part: str, recipe: Recipe, generator: torch.Generator) -> LayerCall:
        """Return a new call, or the newest one if activation checkpointing recomputes it.

        A forward pass within a backward pass is a recomputation. Raises :class:`LoopscopeError` if it cannot be
        repeated.
        """
        # torch has no public API for this. During a recomputation the autograd engine is executing a graph task.
        within_backward = torch._C._current_graph_task_id() != -1
        if not recipe.draws and not recipe.varies:
            return LayerCall(repeated=within_backward, along_sum=recipe.along_sum, hadamard=recipe.hadamard)
        if within_backward and part in self.newest:
            newest = self.newest[part]
            if recipe.varies and not newest.with_gradient:
                raise LoopscopeError(
                    "Reentrant activation checkpointing cannot repeat stochastic rounding or delayed scaling of a "
                    "low-bit layer's forward pass; pass use_reentrant=False to torch.utils.checkpoint."
                )
            return replace(newest, repeated=True)
        seed = _seed(generator) if recipe.draws and (recipe.varies or not torch.compiler.is_exporting()) else 0
        number = next(_numbers) if recipe.varies else 0
        call = LayerCall(number, seed, torch.is_grad_enabled(), along_sum=recipe.along_sum, hadamard=recipe.hadamard)
        self.newest[part] = call
        return call


def _seed(generator: torch.Generator) -> int:
    """Draw a seed, also under transforms of ``torch.func``; raises :class:`LoopscopeError` in ``torch.export``."""
    if torch.compiler.is_exporting():
        raise LoopscopeError(
            "torch.export cannot record stochastic rounding of a low-bit layer's forward pass; export the model with "
            "nearest rounding, or after dequantize_model."
        )
    # By default torch.vmap rejects random functions.
    with torch._C._DisableFuncTorch():
        return int(torch.randint(2**62, (), generator=generator))


Quantize = Callable[[Role, Tensor, LayerCall], Tensor]
"""Returns a matrix of a call after the cast of its role."""


class QuantizedLinear(torch.autograd.Function):
    """y = Q(x) Q(W)ᵀ + b; dx = Q(g) Q(W) and dW = Q(g)ᵀ Q(x), each matrix with the cast of its role.

    Gradients are straight-through: the derivative of every cast is 1. db is the sum of the uncast g, since it involves
    no matrix product. The function saves x and W, which exist anyway, and only if a requested gradient needs them.

    The gradient can be differentiated, again straight-through. That second pass does not cast output gradients, so
    Hessian-vector products are linear in the vector and the Hessian is symmetric.

    The forward-mode tangent is Q(x) dWᵀ + dx Q(W)ᵀ + db: straight-through with the casts of the forward product.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, quantize: Quantize, call: LayerCall) -> Tensor:  # type: ignore[override]
        """Return y of shape (..., out) for x (..., in), W (out, in), b (out)."""
        return functional.linear(quantize("forward_input", x, call), quantize("forward_weight", weight, call), bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the tensors for the backward pass and for forward mode."""
        x, weight, _, ctx.quantize, call = inputs
        ctx.call = call
        ctx.is_differentiated = ctx.comes_after = False
        x_is_wanted, weight_is_wanted = ctx.needs_input_grad[:2]
        # Saved as a tensor, the number is recomputed by checkpointing, so ``backward`` receives that of the repetition.
        number = torch.tensor(call.number) if call.number else None
        ctx.save_for_backward(x if weight_is_wanted else None, weight if x_is_wanted else None, number)
        ctx.save_for_forward(x, weight)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:  # type: ignore[override]
        """Return the tangent of y for those of x, W and b; ``None`` stands for zero."""
        # dy = Q(x) dWᵀ + dx Q(W)ᵀ + db
        (x, weight), (dx, dw, db) = ctx.saved_tensors, tangents[:3]
        call = replace(ctx.call, repeated=True)
        parts = [] if db is None else [db]
        if dx is not None:
            parts.append(functional.linear(dx, ctx.quantize("forward_weight", weight, call)))
        if dw is not None:
            parts.append(functional.linear(ctx.quantize("forward_input", x, call), dw))
        # db alone has shape (out), but the tangent needs the shape of y.
        total = sum(parts[1:], start=parts[0])
        return total.expand(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of x, W and b that autograd needs; ``None`` for the others."""
        x, weight, number = ctx.saved_tensors
        if number is not None and int(number) != ctx.call.number:
            raise LoopscopeError(
                "Activation checkpointing can repeat only the newest call of a low-bit layer, but it recomputed an "
                "earlier one, with different stochastic rounding or delayed scaling; run backward before the layer is "
                "called again, or use nearest rounding and a rule without a history in the forward pass."
            )
        x_is_wanted, weight_is_wanted, bias_is_wanted = ctx.needs_input_grad[:3]
        second_pass = _differentiates_a_gradient(ctx)
        rows = gradient.reshape(-1, gradient.shape[-1])
        dx = dw = db = None
        if ctx.call.along_sum:
            dx, dw = _products_along_sum(ctx, rows, x, weight, second_pass)
        elif x_is_wanted or weight_is_wanted:
            # dx = Q(g) Q(W) and dW = Q(g)ᵀ Q(x), g of shape (tokens, out)
            rounded = rows if second_pass else _through(ctx, "output_grad", rows)
            dx = rounded.mm(_through(ctx, "backward_weight", weight)) if x_is_wanted else None
            inputs = _through(ctx, "backward_input", x) if weight_is_wanted else None
            dw = None if inputs is None else rounded.t().mm(inputs.reshape(-1, inputs.shape[-1]))
        if dx is not None:
            dx = dx.reshape(*gradient.shape[:-1], weight.shape[1])
        if bias_is_wanted:
            db = rows.sum(0)
        return dx, dw, db, None, None


class StraightThrough(torch.autograd.Function):
    """Replace a tensor by its rounded value, with the derivative of the identity."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, rounded: Tensor) -> Tensor:  # type: ignore[override]
        """Return ``rounded``."""
        return rounded.clone()

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep nothing."""

    @staticmethod
    def jvp(ctx: FunctionCtx, tangent: Tensor, of_rounded: Tensor | None) -> Tensor:  # type: ignore[override]
        """Return the tangent of ``values``."""
        return tangent.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradient as that of ``values``."""
        return gradient, None


def _differentiates_a_gradient(ctx: Any) -> bool:
    """Return whether this backward pass differentiates an earlier, recorded one; mark whether this one is recorded.

    Under plain autograd both passes share a context. Under torch.func each level has a separate context, and one level
    may run several independent backward passes (``jacrev`` in chunks). All of them share the call.
    """
    if ctx.is_differentiated:
        # Private: contexts of plain autograd have this class, those of torch.func have others.
        return ctx.comes_after or type(ctx) is QuantizedLinear._backward_cls
    ctx.comes_after = bool(ctx.call.recorded)
    if torch.is_grad_enabled():
        ctx.is_differentiated = True
        ctx.call.recorded.append(True)
    return bool(ctx.comes_after)


def _products_along_sum(
    ctx: Any, gradient: Tensor, x: Tensor | None, weight: Tensor | None, second_pass: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return dx and dW for g (tokens, out), with blocks along the summed dimension; ``None`` without W or x."""
    # dx = Q(g) Q(Wᵀ)ᵀ and dW = Q((gᵀ)·R) Q((xᵀ)·R)ᵀ, R the random Hadamard transform along the tokens
    dx = dw = None
    if weight is not None:
        rounded = gradient if second_pass else _through(ctx, "output_grad", gradient)
        dx = rounded.mm(_through(ctx, "backward_weight", weight.t(), ctx.call.transposed()).t())
    if x is not None:
        left, right = (
            hadamard_transform(operand.reshape(-1, operand.shape[-1]).t(), ctx.call.hadamard)
            for operand in (gradient, x)
        )
        left = left if second_pass else _through(ctx, "output_grad", left, ctx.call.transposed())
        dw = left.mm(_through(ctx, "backward_input", right, ctx.call.transposed()).t())
    return dx, dw


def _through(ctx: Any, role: Role, values: Tensor, call: LayerCall | None = None) -> Tensor:
    """Cast a matrix in the backward pass, differentiably if autograd records that pass.

    Non-finite values of a float16 gradient are not cast: saturating them would hide the gradient overflow from the loss
    scaler.
    """
    with torch.no_grad():
        rounded: Tensor = ctx.quantize(role, values.detach(), call or ctx.call)
        if role == "output_grad" and values.dtype is torch.float16:
            rounded = torch.where(values.isfinite(), rounded, values)
    if not torch.is_grad_enabled():
        return rounded
    through: Tensor = StraightThrough.apply(values, rounded)  # type: ignore[no-untyped-call]
    return through
