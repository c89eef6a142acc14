"""Linear layer that simulates matrix products in narrow number formats."""

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from ..errors import LoopscopeError
from ..hooks import Quantized
from ..tensors import is_sharded
from .casts import Cast, Counts, QuantizationListener, as_float32, largest_magnitudes
from .linear_function import Calls, CountsByCast, LayerCall, QuantizedLinear
from .metis import LowRankFactors, SplitLinear, low_rank_cast
from .recipes import FORWARD_ROLES, SAME_MATRIX, Recipe, Role


def quantized_modules(model: nn.Module) -> list[str]:
    """Return the names of the modules that quantise, each once, in the order of the model."""
    return [name for name, module in model.named_modules() if isinstance(module, Quantized)]


class BitLinear(SplitLinear):
    """A linear layer that simulates casts of input, weight and output gradient: y = Q(x) Q(W)ᵀ + b.

    Parameters, their names and the ``state_dict`` equal those of ``nn.Linear``; with a recipe without casts, the
    results are bit-identical, too. Scaling rules with a history store it in buffers ``<role>_history``, which are not
    part of the ``state_dict``; only forward and backward passes in train mode update it. Under autocast the matrices
    are first converted to the autocast dtype, then cast. Recomputation by activation checkpointing
    (``use_reentrant=False``) repeats the casts of the original call. With several processes each one casts its local
    matrices, with separate scales and histories.

    The first arguments are those of ``nn.Linear``; a bias is never cast.

    Args:
        recipe: the casts.
        generator: the generator of the seeds for stochastic rounding, on the CPU even if the layer is not; all layers
            of a model share it.
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
        make_bit_linear(self, recipe, generator or torch.Generator().manual_seed(0))

    def extra_repr(self) -> str:
        """Return the shape and the recipe's name."""
        return f"{super().extra_repr()}, recipe={self.recipe.name!r}"

    def _apply(self, fn: Any, recurse: bool = True) -> "BitLinear":
        """Move or convert the layer; histories move with it, stay float32, and restart at zero after a meta device.

        Histories of a meta device have no values, and ``to_empty`` would fill them with uninitialised memory.
        """
        # Private: to(), cuda(), float() and to_empty() all call _apply, and torch has no public hook for them.
        histories = {name: self.get_buffer(name) for name in _history_lengths(self.recipe)}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, history in histories.items():
            device, is_empty = self.get_buffer(name).device, history.is_meta
            self._buffers[name] = torch.zeros_like(history, device=device) if is_empty else history.to(device)
        return self

    def count_quantizations(
        self, is_active: Callable[[], bool], counts: MutableMapping[str, Counts]
    ) -> RemovableHandle:
        """Add the counts of every cast to ``counts`` by role, while ``is_active`` returns ``True``."""
        return self.register_quantization_hook(QuantizationListener(is_active, counts))

    def register_quantization_hook(self, listener: QuantizationListener) -> RemovableHandle:
        """Report every cast to a listener until the handle is removed."""
        handle = RemovableHandle(self._quantization_hooks)
        self._quantization_hooks[handle.id] = listener
        return handle

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features); a compiled model runs this between its graphs."""
        if not self.recipe.casts and self.factors is None:
            return functional.linear(x, self.weight, self.bias)
        # Nothing is compiled before torch._dynamo is imported, so the wrapper is not needed until then.
        run = _forward_between_graphs if "torch._dynamo" in sys.modules else _forward
        output: Tensor = run(self, x)
        return output

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None, part: str = "weight") -> Tensor:
        """Return x Wᵀ + b with the layer's casts, for any weight; ``part`` names the products of one forward pass."""
        if not self.recipe.casts:
            return functional.linear(x, weight, bias)
        kind = x.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, weight = _to_autocast_dtype(x, dtype), _to_autocast_dtype(weight, dtype)
            bias = None if bias is None else _to_autocast_dtype(bias, dtype)
        call = self.calls.start_call(part, self.recipe, self.generator)
        output: Tensor = QuantizedLinear.apply(x, weight, bias, self.quantize, call)  # type: ignore[no-untyped-call]
        return output

    def quantize(self, role: Role, values: Tensor, call: LayerCall) -> Tensor:
        """Return a matrix after the cast of its role, and report the losses to the listeners."""
        cast = self.recipe.casts.get(role)
        if cast is None:
            return values
        metis = self.recipe.metis
        is_recomputed = call.repeated and role in FORWARD_ROLES  # its losses were counted in the original call
        is_uncounted = self._in_vmap() or is_recomputed
        listeners = [] if is_uncounted else [hook for hook in self._quantization_hooks.values() if hook.is_active()]
        if metis is not None and metis.backward and role == "output_grad":
            source = call.generator(role, values.device)

            def part_cast(part: Tensor) -> Tensor:
                return _cast(role, cast, part, listeners, None, generator=source)

            return low_rank_cast(values, part_cast, metis, source)
        generator = call.generator(role, values.device) if cast.rounding == "stochastic" else None
        earlier = self._earlier_maximum(role, values, call) if cast.scaling_rule.history else None
        forward_counts = call.forward_counts if generator is None and earlier is None else None
        return _cast(role, cast, values, listeners, forward_counts, generator=generator, earlier=earlier)

    def _in_vmap(self) -> bool:
        """Return whether ``torch.vmap`` is active; raises :class:`LoopscopeError` for casts that it cannot vectorise.

        Vectorised casts are not counted, since their counts would mix those of many casts.
        """
        stack = torch._C._functorch.get_interpreter_stack() or ()  # torch has no public API for the active transforms
        is_vectorised = any(level.key() == torch._C._functorch.TransformType.Vmap for level in stack)
        if is_vectorised and (self.recipe.draws or (self.training and _history_lengths(self.recipe))):
            raise LoopscopeError(
                f"torch.vmap cannot vectorise the random numbers or histories of recipe {self.recipe.name!r}; choose "
                'nearest rounding and a rule without a history, such as recipe.with_every(rounding="nearest").'
            )
        return is_vectorised

    def _earlier_maximum(self, role: Role, values: Tensor, call: LayerCall) -> Tensor:
        """Return the largest magnitude of earlier tensors, zero-dimensional.

        In training, add the current maximum to the history: once per call, even if the call is recomputed or
        differentiated twice.
        """
        if role in call.earlier:
            return call.earlier[role]
        history = self.get_buffer(f"{role}_history")
        earlier = call.earlier[role] = self.recipe.casts[role].relevant_history(history).max()
        if self.training:
            # torch.func.grad rejects in-place changes of tensors that it did not receive as arguments.
            with torch._C._DisableFuncTorch():
                largest = as_float32(largest_magnitudes(_unwrapped(values), None)).to(history)
                history.copy_(torch.cat([history[1:], largest.reshape(1)]))
        return earlier


def _unwrapped(values: Tensor) -> Tensor:
    """Remove the wrappers of ``torch.func.grad`` and ``jvp`` from a tensor."""
    while torch._C._functorch.is_functorch_wrapped_tensor(values):
        values = torch._C._functorch.get_unwrapped(values)
    return values


def _cast(
    role: Role,
    cast: Cast,
    values: Tensor,
    listeners: list[QuantizationListener],
    forward_counts: CountsByCast | None,
    **options: Any,
) -> Tensor:
    """Cast a matrix; if there are listeners, count the losses.

    ``forward_counts`` are the counts of the forward casts in the same call. An equal backward cast has equal losses, so
    it reuses them.
    """
    if not listeners:
        return cast(values, **options)
    counts = None if forward_counts is None else forward_counts.get((SAME_MATRIX.get(role, role), cast))
    if counts is not None:
        rounded = cast(values, **options)
    else:
        rounded, counts = cast.with_counts(values, **options)
    if forward_counts is not None and role in FORWARD_ROLES:
        forward_counts[role, cast] = counts
    for listener in listeners:
        listener.record(role, counts)
    return rounded


def _forward(layer: BitLinear, x: Tensor) -> Tensor:
    """Return the output of a layer: y = U(s·(V·x)) + weight·x + bias for a split weight."""
    if is_sharded(layer.weight):
        raise LoopscopeError(
            "A low-bit layer needs its whole weight, but the weight is a DTensor: tensor parallelism cannot be "
            "simulated; use FSDP2 (fully_shard), which gathers weights before they are used."
        )
    if layer.factors is None or not layer.is_split:
        return layer.product(x, layer.weight, layer.bias)
    u, s, v = layer.factors.decomposition
    low_rank = layer.product(x, v, None, "v") * s  # s is not cast
    return layer.product(low_rank, u, None, "u") + layer.product(x, layer.weight, layer.bias)


def run_between_graphs(run: Any) -> Any:
    """Return a version of a function that compiled models run uncompiled, between their graphs.

    Equivalent to ``torch.compiler.disable``, which imports the compiler immediately and so takes seconds.
    """
    wrapper: Any = torch._disable_dynamo(run)  # type: ignore[attr-defined]
    wrapper._torchdynamo_disable = True
    wrapper._torchdynamo_disable_msg = (
        "a low-bit layer runs between graphs, so that casts have the bits of uncompiled ones; omit fullgraph=True, or "
        "export with strict=False"
    )
    return wrapper


_forward_between_graphs = run_between_graphs(_forward)
set_code_exec_strategy(BitLinear.forward.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))
"""Prevent graphs from starting in ``forward``: the compiler would inspect the gradient of the input there, and warn
about that inspection. ``torch._dynamo`` has decorators for this, but importing it takes seconds."""


def make_bit_linear(layer: nn.Linear, recipe: Recipe, generator: torch.Generator, *, may_split: bool = True) -> None:
    """Convert a linear layer to a :class:`BitLinear`, in place: the same object with the same parameters.

    With ``may_split``, it receives frozen factors if the recipe splits weights.
    """
    layer.__class__ = BitLinear  # optimizers, ties and hooks keep their references to the object
    assert isinstance(layer, BitLinear)
    layer.recipe, layer.generator = recipe, generator
    layer.calls = Calls()
    metis = recipe.metis
    rank = metis.rank_of(layer.weight.shape) if metis is not None and metis.forward and may_split else 0
    layer.factors = LowRankFactors(layer.weight.detach(), rank) if rank else None
    layer._quantization_hooks = OrderedDict()  # a RemovableHandle needs a weak reference, which dict does not support
    for name, length in _history_lengths(recipe).items():
        zeros = torch.zeros(length, device=layer.weight.device, dtype=torch.float32)
        layer.register_buffer(name, zeros, persistent=False)


def make_plain_linear(layer: BitLinear) -> None:
    """Convert the layer back to an ``nn.Linear``, in place."""
    for name in _history_lengths(layer.recipe):
        delattr(layer, name)
    layer.weight.data.copy_(layer.merged_weight())
    for name in ("recipe", "generator", "calls", "_quantization_hooks", "factors"):
        delattr(layer, name)
    layer.__class__ = nn.Linear  # type: ignore[assignment]


def _history_lengths(recipe: Recipe) -> Mapping[str, int]:
    """Return the lengths of a recipe's history buffers, by name."""
    return {f"{role}_history": cast.history_length() for role, cast in recipe.casts.items() if cast.history_length()}


def _to_autocast_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert like autocast, which does not change float64."""
    return tensor if tensor.dtype is torch.float64 else tensor.to(dtype)
