"""A linear layer whose matrix products see its matrices as narrow floating-point formats would hold them."""

import sys
from collections import OrderedDict
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from ..errors import LoopscopeError
from ..state import is_sharded
from .casts import Cast, Counts, QuantizationListener, as_float32, largest_magnitudes
from .linear_function import Calls, LayerCall, Lost, QuantizedLinear
from .metis import LowRankFactors, SplitLinear, low_rank_cast
from .recipes import FORWARD_ROLES, SAME_MATRIX, Recipe, Role


@runtime_checkable
class Quantized(Protocol):
    """A module that quantises, outside of compiled graphs, and says what was lost to those who listen."""

    def register_quantization_hook(self, listener: QuantizationListener) -> RemovableHandle:
        """Have a listener told of every quantisation while it is heard."""


@dataclass(frozen=True)
class QuantizationTap:
    """Counts of what the quantisers of one module lose, in the run's own passes and no others.

    Args:
        target: the name of the module in the model; a :class:`Quantized` one.
        counts: filled by role; the hook reads it and clears it.
    """

    target: str
    counts: MutableMapping[str, Counts]


def quantized_modules(model: nn.Module) -> list[str]:
    """Return the names of the modules that quantise, in the order of the model, each once."""
    return [name for name, module in model.named_modules() if isinstance(module, Quantized)]


class BitLinear(SplitLinear):
    """A linear layer that casts input, weight and output gradient by a recipe, in simulation: y = Q(x) Q(W)ᵀ + b.

    Parameters, their names and the ``state_dict`` are those of ``nn.Linear``; with a recipe without casts so is every
    bit. Rules with a history keep it in buffers ``<role>_history`` that are not part of the ``state_dict``; it goes on
    with the forward and backward passes in train mode only. Under autocast the matrices are converted first, then
    cast. Activation checkpointing (``use_reentrant=False``) repeats the casts of the call that it repeats. Of several
    processes each casts what it sees, by scales and histories of its own.

    Its first arguments are those of ``nn.Linear``; a bias is never cast.

    Args:
        recipe: the casts.
        generator: of the seeds for stochastic rounding, on the CPU wherever the layer is; shared by a model's layers.
    """

    recipe: Recipe
    generator: torch.Generator
    calls: Calls
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

    def _apply(self, fn: Any, recurse: bool = True) -> "BitLinear":
        """Move or convert the layer; histories go along, in float32, and begin anew where they had no memory.

        ``to_empty`` would leave in them what lies in the memory that they get.
        """
        histories = {name: self.get_buffer(name) for name in _histories(self.recipe)}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, history in histories.items():
            device, fresh = self.get_buffer(name).device, history.is_meta  # of which nothing can be moved
            self._buffers[name] = torch.zeros_like(history, device=device) if fresh else history.to(device)
        return self

    def register_quantization_hook(self, listener: QuantizationListener) -> RemovableHandle:
        """Tell a listener of every cast from now on, until the handle is removed."""
        handle = RemovableHandle(self._quantization_hooks)
        self._quantization_hooks[handle.id] = listener
        return handle

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features); a compiled model runs it between its graphs."""
        if not self.recipe.casts and self.factors is None:
            return functional.linear(x, self.weight, self.bias)
        run = _between_graphs if "torch._dynamo" in sys.modules else _mapped
        found: Tensor = run(self, x)
        return found

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None, part: str = "weight") -> Tensor:
        """Return x Wᵀ + b by the layer's recipe, for any weight; ``part`` names the products of one forward."""
        if not self.recipe.casts:
            return functional.linear(x, weight, bias)
        kind = x.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, weight = _narrowed(x, dtype), _narrowed(weight, dtype)
            bias = None if bias is None else _narrowed(bias, dtype)
        call = self.calls.begin(part, self.recipe, self.generator)
        found: Tensor = QuantizedLinear.apply(x, weight, bias, self.quantize, call)  # type: ignore[no-untyped-call]
        return found

    def quantize(self, role: Role, values: Tensor, call: LayerCall) -> Tensor:
        """Return a matrix after the cast of its role, and let the listeners know."""
        cast = self.recipe.casts.get(role)
        if cast is None:
            return values
        metis = self.recipe.metis
        again = call.repeated and role in FORWARD_ROLES  # counted when the call was made, so nobody hears of it now
        unheard = self._suit_vmap() or again
        heard = [] if unheard else [each for each in self._quantization_hooks.values() if each.is_heard()]
        if metis is not None and metis.backward and role == "output_grad":
            source = call.generator(role, values.device)
            part_cast = lambda part: _cast(role, cast, part, heard, None, generator=source)
            return low_rank_cast(values, part_cast, metis, source)
        generator = call.generator(role, values.device) if cast.rounding == "stochastic" else None
        earlier = self._earlier(role, values, call) if cast.scaling_rule.history else None
        counted = call.counted if generator is None and earlier is None else None
        return _cast(role, cast, values, heard, counted, generator=generator, earlier=earlier)

    def _suit_vmap(self) -> bool:
        """Return whether ``torch.vmap`` is at work; raises :class:`LoopscopeError` for casts that it cannot vectorise.

        Of a vectorised cast nobody hears: its counts would be those of many casts in one.
        """
        stack = torch._C._functorch.get_interpreter_stack() or ()  # torch has no public way to ask
        found = any(level.key() == torch._C._functorch.TransformType.Vmap for level in stack)
        if found and (self.recipe.draws or (self.training and _histories(self.recipe))):
            raise LoopscopeError(
                f"torch.vmap cannot vectorise the random numbers or histories of recipe {self.recipe.name!r}; choose "
                'nearest rounding and a rule without a history, such as recipe.with_every(rounding="nearest").'
            )
        return found

    def _earlier(self, role: Role, values: Tensor, call: LayerCall) -> Tensor:
        """Return the largest magnitude of earlier tensors, zero-dimensional.

        In training the present one is noted, once a call, whether it is repeated or differentiated twice.
        """
        if role in call.earlier:
            return call.earlier[role]
        history = self.get_buffer(f"{role}_history")
        earlier = call.earlier[role] = self.recipe.casts[role].past(history).max()
        if self.training:
            with torch._C._DisableFuncTorch():  # else torch.func.grad would refuse to change what it was not given
                largest = as_float32(largest_magnitudes(_unwrapped(values), None)).to(history)
                history.copy_(torch.cat([history[1:], largest.reshape(1)]))
        return earlier


def _unwrapped(values: Tensor) -> Tensor:
    """Return a tensor without what ``torch.func.grad`` and ``jvp`` wrap it in."""
    while torch._C._functorch.is_functorch_wrapped_tensor(values):
        values = torch._C._functorch.get_unwrapped(values)
    return values


def _cast(
    role: Role, cast: Cast, values: Tensor, heard: list[QuantizationListener], counted: Lost | None, **options: Any
) -> Tensor:
    """Cast, and count if somebody hears.

    ``counted`` holds what the forward casts of the same call lost; a backward cast that is alike loses the same.
    """
    if not heard:
        return cast(values, **options)
    counts = None if counted is None else counted.get((SAME_MATRIX.get(role, role), cast))
    if counts is not None:
        rounded = cast(values, **options)
    else:
        rounded, counts = cast.counted(values, **options)
    if counted is not None and role in FORWARD_ROLES:
        counted[role, cast] = counts
    for listener in heard:
        listener.record(role, counts)
    return rounded


def _mapped(layer: BitLinear, x: Tensor) -> Tensor:
    """Return what a layer makes of its input."""
    if is_sharded(layer.weight):
        raise LoopscopeError(
            "A low-bit layer needs its whole weight, but finds a DTensor: tensor parallelism cannot be simulated; "
            "use FSDP2 (fully_shard), which gathers weights before they are used."
        )
    if layer.factors is None or not layer.is_split:
        return layer.product(x, layer.weight, layer.bias)
    u, s, v = layer.factors.decomposition
    narrow = layer.product(x, v, None, "v") * s  # s in full precision
    return layer.product(narrow, u, None, "u") + layer.product(x, layer.weight, layer.bias)


def between_graphs(run: Any) -> Any:
    """Return a function for models that may be compiled: it runs uncompiled, between their graphs.

    ``torch.compiler.disable`` does that too, but imports the compiler at once, which takes seconds.
    """
    found: Any = torch._disable_dynamo(run)  # type: ignore[attr-defined]
    found._torchdynamo_disable = True
    found._torchdynamo_disable_msg = (
        "a low-bit layer runs between graphs, so that casts have the bits of uncompiled ones; leave out "
        "fullgraph=True, or export with strict=False"
    )
    return found


_between_graphs = between_graphs(_mapped)
set_code_exec_strategy(BitLinear.forward.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))
"""No graph begins in ``forward``: the compiler would look at the gradient of what enters it, and warn of its own look.
``torch._dynamo`` has decorators for this, but importing it takes seconds."""


def equip(layer: nn.Linear, recipe: Recipe, generator: torch.Generator, *, may_split: bool = True) -> None:
    """Make a linear layer a :class:`BitLinear`, in place: the same object with the same parameters.

    ``may_split`` gives it frozen factors, if the recipe splits weights.
    """
    layer.__class__ = BitLinear  # optimizers, ties and hooks go on holding the same object
    assert isinstance(layer, BitLinear)
    layer.recipe, layer.generator = recipe, generator
    layer.calls = Calls()
    metis = recipe.metis
    rank = metis.rank_of(layer.weight.shape) if metis is not None and metis.forward and may_split else 0
    layer.factors = LowRankFactors(layer.weight.detach(), rank) if rank else None
    layer._quantization_hooks = OrderedDict()  # its handles hold it by a weak reference, which no plain dict allows
    for name, length in _histories(recipe).items():
        zeros = torch.zeros(length, device=layer.weight.device, dtype=torch.float32)
        layer.register_buffer(name, zeros, persistent=False)


def strip(layer: BitLinear) -> None:
    """Make it an ``nn.Linear`` again, in place."""
    for name in _histories(layer.recipe):
        delattr(layer, name)
    layer.weight.data.copy_(layer.merged_weight())
    for name in ("recipe", "generator", "calls", "_quantization_hooks", "factors"):
        delattr(layer, name)
    layer.__class__ = nn.Linear  # type: ignore[assignment]


def _histories(recipe: Recipe) -> Mapping[str, int]:
    """Return the names of a recipe's history buffers with their lengths."""
    return {f"{role}_history": cast.remembered() for role, cast in recipe.casts.items() if cast.remembered()}


def _narrowed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert as autocast does, which leaves float64 alone."""
    return tensor if tensor.dtype is torch.float64 else tensor.to(dtype)
