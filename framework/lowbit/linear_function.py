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
from .hadamard import transformed
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
        along_sum: operands of backward products are cast with the dimension that the product sums over as the last.
        hadamard: size of the transform of both operands of dW before their casts; 0: none.
        recorded: an entry for each of its backward passes that can itself be differentiated.
    """

    number: int = 0
    seed: int = 0
    with_gradient: bool = False
    earlier: dict[str, Tensor] = field(default_factory=dict)
    counted: Lost = field(default_factory=dict)
    repeated: bool = False
    along_sum: bool = False
    hadamard: int = 0
    recorded: list[bool] = field(default_factory=list)

    def turned(self) -> "LayerCall":
        """Return the call for casts of a transposed matrix: they draw and lose other than those of the matrix."""
        return replace(self, seed=self.seed + len(ROLES), counted={})

    def generator(self, role: Role, device: torch.device) -> torch.Generator:
        """Return a fresh generator for the cast of one matrix."""
        kind = "cpu" if device.type == "meta" else device  # where there is nothing to draw
        return torch.Generator(kind).manual_seed(self.seed + ROLES.index(role))


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
    """Draw a seed, under transforms of ``torch.func`` too; raises :class:`LoopscopeError` within ``torch.export``."""
    if torch.compiler.is_exporting():
        raise LoopscopeError(
            "torch.export cannot record stochastic rounding of a low-bit layer's forward pass; export the model with "
            "nearest rounding, or after dequantize_model."
        )
    with torch._C._DisableFuncTorch():
        return int(torch.randint(2**62, (), generator=generator))


Quantize = Callable[[Role, Tensor, LayerCall], Tensor]
"""Returns a matrix of a call after the cast of its role."""


class QuantizedLinear(torch.autograd.Function):
    """y = Q(x) Q(W)ᵀ + b; dx = Q(g) Q(W) and dW = Q(g)ᵀ Q(x), each matrix with the cast of its role.

    Straight through: the derivative of every cast is taken to be one. db is the sum of g as it arrives, since no matrix
    product, and so no narrow format, is part of it. Kept for backward are x and W themselves, which live anyway, and of
    them only what the wanted gradients need.

    The gradient can itself be differentiated, straight through once more; the pass that does so casts no output
    gradients, so that Hessian-vector products are linear in the vector and the Hessian is symmetric.

    The tangent of forward mode is Q(x) dWᵀ + dx Q(W)ᵀ + db: straight through the casts of the forward product.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, quantize: Quantize, call: LayerCall) -> Tensor:  # type: ignore[override]
        """Return y of shape (..., out) for x (..., in), W (out, in), b (out)."""
        return functional.linear(quantize("forward_input", x, call), quantize("forward_weight", weight, call), bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the backward pass and forward mode need."""
        x, weight, _, ctx.quantize, call = inputs
        ctx.call = call
        ctx.is_differentiated = ctx.comes_after = False
        x_is_wanted, weight_is_wanted = ctx.needs_input_grad[:2]
        # The number goes along as a tensor, since checkpointing then brings that of the recomputation to ``backward``.
        mark = torch.tensor(call.number) if call.number else None
        ctx.save_for_backward(x if weight_is_wanted else None, weight if x_is_wanted else None, mark)
        ctx.save_for_forward(x, weight)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:  # type: ignore[override]
        """Return the tangent of y for those of x, W and b; ``None`` is none."""
        (x, weight), (dx, dw, db) = ctx.saved_tensors, tangents[:3]
        call = replace(ctx.call, repeated=True)
        parts = [] if db is None else [db]
        if dx is not None:
            parts.append(functional.linear(dx, ctx.quantize("forward_weight", weight, call)))
        if dw is not None:
            parts.append(functional.linear(ctx.quantize("forward_input", x, call), dw))
        total = sum(parts[1:], start=parts[0])
        return total.expand(*x.shape[:-1], weight.shape[0])

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
        second_pass = _differentiates_a_gradient(ctx)
        rows = gradient.reshape(-1, gradient.shape[-1])
        dx = dw = db = None
        if ctx.call.along_sum:
            dx, dw = _products_along_sum(ctx, rows, x, weight, second_pass)
        elif x_is_wanted or weight_is_wanted:
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
    """Another tensor in the place of one, with the derivative of the identity."""

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
    """Tell whether this backward pass is that of another one, which was recorded; and note whether it is itself.

    Under plain autograd the two share a context; under torch.func each level has one, while one level may run backward
    several times for its own sake (``jacrev`` in chunks). The call is the same in all.
    """
    if ctx.is_differentiated:
        return ctx.comes_after or type(ctx) is QuantizedLinear._backward_cls
    ctx.comes_after = bool(ctx.call.recorded)
    if torch.is_grad_enabled():
        ctx.is_differentiated = True
        ctx.call.recorded.append(True)
    return bool(ctx.comes_after)


def _products_along_sum(
    ctx: Any, gradient: Tensor, x: Tensor | None, weight: Tensor | None, second_pass: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return dx and dW for g (tokens, out), with blocks along the sum; ``None`` without W or x."""
    dx = dw = None
    if weight is not None:
        rounded = gradient if second_pass else _through(ctx, "output_grad", gradient)
        dx = rounded.mm(_through(ctx, "backward_weight", weight.t(), ctx.call.turned()).t())
    if x is not None:
        left, right = (transformed(each.reshape(-1, each.shape[-1]).t(), ctx.call.hadamard) for each in (gradient, x))
        left = left if second_pass else _through(ctx, "output_grad", left, ctx.call.turned())
        dw = left.mm(_through(ctx, "backward_input", right, ctx.call.turned()).t())
    return dx, dw


def _through(ctx: Any, role: Role, values: Tensor, call: LayerCall | None = None) -> Tensor:
    """Cast a matrix in the backward pass, differentiably where that is itself differentiated.

    What is not finite in a float16 gradient passes: saturated, it would hide from the scaler that the step is lost.
    """
    with torch.no_grad():
        rounded: Tensor = ctx.quantize(role, values.detach(), call or ctx.call)
        if role == "output_grad" and values.dtype is torch.float16:
            rounded = torch.where(values.isfinite(), rounded, values)
    if not torch.is_grad_enabled():
        return rounded
    through: Tensor = StraightThrough.apply(values, rounded)  # type: ignore[no-untyped-call]
    return through
