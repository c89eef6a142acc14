"""A linear layer whose matrix products see its matrices as narrow floating-point formats would hold them."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from framework.errors import LoopscopeError
from framework.lowbit.casts import Cast, largest_magnitudes
from framework.lowbit.counts import Counts
from framework.lowbit.linear_function import QuantizedLinear
from framework.lowbit.metis import low_rank_cast
from framework.lowbit.recipes import Recipe
from framework.lowbit.roles import FORWARD_ROLES, ROLES, Role
from framework.lowbit.splitting import LowRankFactors, SplitLinear, split_product

SEEDS = 2**62
_numbers = count(1)


class QuantizationListener(Protocol):
    """Somebody who is told what every cast of a layer lost."""

    def is_heard(self) -> bool:
        """Tell whether the casts of now are to be counted."""
        ...

    def record(self, role: str, counts: Counts) -> None:
        """Take the counts of one cast."""
        ...


@dataclass
class LayerCall:
    """One forward call of a layer.

    Args:
        number: tells it from every other call of this process; 0 if none needs to be told.
        seed: of the random numbers of its casts.
        with_gradient: autograd recorded it.
        earlier: by role, the largest magnitude that a rule with a history was given.
        repeated: it is the recomputation of that call by activation checkpointing.
    """

    number: int = 0
    seed: int = 0
    with_gradient: bool = False
    earlier: dict[str, Tensor] = field(default_factory=dict)
    repeated: bool = False

    def mark(self) -> Tensor | None:
        """Return the number as a tensor, or ``None`` without one."""
        return torch.tensor(self.number) if self.number else None

    def is_marked(self, mark: Tensor | None) -> bool:
        """Tell whether a mark is that of this call."""
        return mark is None or int(mark) == self.number

    def generator(self, role: Role, device: torch.device) -> torch.Generator:
        """Return a fresh generator for the cast of one matrix."""
        return torch.Generator(device).manual_seed(self.seed + ROLES.index(role))


class LastCall:
    """Holds the newest call of each part of a layer until its backward pass; at the end of a step it has served."""

    def __init__(self) -> None:
        self.calls: dict[str, LayerCall] = {}


class BitLinear(SplitLinear):
    """A linear layer that casts input, weight and output gradient by a recipe, in simulation: y = Q(x) Q(W)ᵀ + b.

    Parameters, their names and the ``state_dict`` are those of ``nn.Linear``; with a recipe without casts so is every
    bit. Rules with a history keep it in buffers ``<role>_history`` that are not part of the ``state_dict``; it goes on
    with the forward and backward passes in train mode only. Under autocast the matrices are converted first, then
    cast. Activation checkpointing (``use_reentrant=False``) repeats the casts of the call that it repeats.

    Args:
        in_features: columns of the weight.
        out_features: rows of the weight.
        bias: learn a bias; it is never cast.
        device: of the parameters.
        dtype: of the parameters.
        recipe: the casts.
        generator: of the seeds for stochastic rounding, on the CPU wherever the layer is; shared by a model's layers.
    """

    recipe: Recipe
    generator: torch.Generator
    last_call: LastCall
    _quantization_hooks: dict[int, QuantizationListener]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        equip(self, recipe, generator or torch.Generator().manual_seed(0))

    def extra_repr(self) -> str:
        """Return the shape and the recipe's name."""
        return f"{super().extra_repr()}, recipe={self.recipe.name!r}"

    def register_quantization_hook(self, listener: QuantizationListener) -> RemovableHandle:
        """Tell a listener of every cast from now on, until the handle is removed."""
        handle = RemovableHandle(self._quantization_hooks)
        self._quantization_hooks[handle.id] = listener
        return handle

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features)."""
        if self.factors is None or not self.is_split:
            return self.product(x, self.weight, self.bias)
        return split_product(x, self.factors.decomposition, self.weight, self.bias, self.product)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None, part: str = "weight") -> Tensor:
        """Return x Wᵀ + b by the layer's recipe, for any weight; ``part`` names the products of one forward."""
        if not self.recipe.casts:
            return functional.linear(x, weight, bias)
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, weight = _narrowed(x, dtype), _narrowed(weight, dtype)
            bias = None if bias is None else _narrowed(bias, dtype)
        found: Tensor = QuantizedLinear.apply(x, weight, bias, self, self._begin(part))  # type: ignore[no-untyped-call]
        return found

    def _begin(self, part: str) -> LayerCall:
        """Return the call that begins: a new one, or under recomputation the newest one again."""
        varies = self.recipe.draws or any(_history(cast) for cast in self.recipe.casts.values())
        if not varies:
            return LayerCall(repeated=_within_backward())
        if _within_backward():
            last = self.last_call.calls.get(part, LayerCall())
            if not last.with_gradient:
                raise LoopscopeError(
                    "Reentrant activation checkpointing cannot repeat stochastic rounding or delayed scaling of a "
                    "low-bit layer; pass use_reentrant=False to torch.utils.checkpoint."
                )
            return LayerCall(last.number, last.seed, True, last.earlier, repeated=True)
        seed = int(torch.randint(SEEDS, (), generator=self.generator)) if self.recipe.draws else 0
        call = self.last_call.calls[part] = LayerCall(next(_numbers), seed, torch.is_grad_enabled())
        return call

    def quantize(self, role: Role, values: Tensor, call: LayerCall) -> Tensor:
        """Return a matrix after the cast of its role, and let the listeners know."""
        cast = self.recipe.casts.get(role)
        if cast is None:
            return values
        metis = self.recipe.metis
        heard = [] if call.repeated and role in FORWARD_ROLES else self._heard()
        if metis is not None and metis.backward and role == "output_grad":
            source = call.generator(role, values.device)
            part_cast = lambda part: self._cast(role, cast, part, source, None, heard)
            return low_rank_cast(values, part_cast, metis, source)
        generator = call.generator(role, values.device) if cast.rounding == "stochastic" else None
        earlier = self._earlier(role, values, call) if _history(cast) else None
        return self._cast(role, cast, values, generator, earlier, heard)

    def _cast(
        self,
        role: Role,
        cast: Cast,
        values: Tensor,
        generator: torch.Generator | None,
        earlier: Tensor | None,
        heard: list[QuantizationListener],
    ) -> Tensor:
        """Cast, and count if somebody hears."""
        if not heard:
            return cast(values, generator=generator, earlier=earlier)
        rounded, counts = cast.counted(values, generator=generator, earlier=earlier)
        for listener in heard:
            listener.record(role, counts)
        return rounded

    def _heard(self) -> list[QuantizationListener]:
        return [listener for listener in self._quantization_hooks.values() if listener.is_heard()]

    def _earlier(self, role: Role, values: Tensor, call: LayerCall) -> Tensor:
        """Return the largest magnitude of earlier tensors, zero-dimensional, and in training note the present one."""
        if call.repeated and role in call.earlier:
            return call.earlier[role]
        history = self.get_buffer(f"{role}_history")
        earlier = call.earlier[role] = history.max()
        if self.training:
            largest = largest_magnitudes(values, None).to(history)
            history.copy_(torch.cat([history[1:], largest.reshape(1)]))
        return earlier


def equip(layer: nn.Linear, recipe: Recipe, generator: torch.Generator, *, may_split: bool = True) -> BitLinear:
    """Make a linear layer a :class:`BitLinear`, in place: the same object with the same parameters.

    ``may_split`` gives it frozen factors, if the recipe splits weights.
    """
    layer.__class__ = BitLinear
    assert isinstance(layer, BitLinear)
    layer.recipe, layer.generator = recipe, generator
    layer.last_call = LastCall()
    splits = may_split and recipe.metis is not None and recipe.metis.forward
    rank = recipe.metis.rank_of(layer.weight.shape) if splits and recipe.metis is not None else 0
    layer.factors = LowRankFactors(layer.weight.detach(), rank) if rank else None
    layer._quantization_hooks = OrderedDict()
    for name, length in _histories(recipe).items():
        layer.register_buffer(name, torch.zeros(length, device=layer.weight.device), persistent=False)
    return layer


def strip(layer: BitLinear) -> nn.Linear:
    """Make it an ``nn.Linear`` again, in place."""
    for name in _histories(layer.recipe):
        delattr(layer, name)
    layer.weight.data.copy_(layer.merged_weight())
    for name in ("recipe", "generator", "last_call", "_quantization_hooks", "factors"):
        delattr(layer, name)
    layer.__class__ = nn.Linear  # type: ignore[assignment]
    return layer


def _histories(recipe: Recipe) -> Mapping[str, int]:
    """Return the names of a recipe's history buffers with their lengths."""
    return {f"{role}_history": _history(cast) for role, cast in recipe.casts.items() if _history(cast)}


def _history(cast: Cast) -> int:
    return cast.scaling_rule.history


def _within_backward() -> bool:
    """Tell whether a backward pass is under way in this thread: a forward in it is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def _narrowed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert as autocast does, which leaves float64 alone."""
    return tensor if tensor.dtype is torch.float64 else tensor.to(dtype)
