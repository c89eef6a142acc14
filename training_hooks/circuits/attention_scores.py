"""Attention scores of a forward pass, recorded from its function calls and reduced to statistics per head."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from loopscope.hooks import AttentionCall, FusedCall
from loopscope.taps import AttentionReader
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True)
class HeadsCall:
    """The attention call of one layer: the number and width of its heads, and the statistics of their rows."""

    heads: int
    head_dim: int | None  # unknown if only the scores were recorded
    statistics: "RowStatistics"
    value: Tensor | None = None
    """Values of the first sample if recorded, shape (heads, keys, value_dim), or fewer heads if they are shared."""


@dataclass(frozen=True)
class RowStatistics:
    """Statistics of the rows of a softmax by head; float32 or wider."""

    table: Tensor
    """Sums over the rows of each sample, shape (6, samples, heads): −Σ p ln p; the number of rows with a visible key;
    −Σ p ln p over ln(visible keys); the number of rows with two or more. Then the largest score of a visible key and
    the largest scale·q·k, before soft caps and biases: −∞ without visible keys, NaN if unknown."""

    @property
    def entropy(self) -> Tensor:
        """Mean over rows of −Σ p ln p, in nats, shape (heads,)."""
        return _ratio(*self.table[:2])

    @property
    def normalised_entropy(self) -> Tensor:
        """Mean of (−Σ p ln p)/ln(visible keys) over rows with two or more visible keys; NaN without such rows."""
        return _ratio(*self.table[2:4])

    @property
    def largest(self) -> Tensor:
        """Largest score of a visible key, shape (heads,); NaN without visible keys."""
        return self._largest(4)

    @property
    def largest_product(self) -> Tensor:
        """Largest scale·q·k of a visible key, before soft caps and biases; NaN if unknown."""
        return self._largest(5)

    def _largest(self, row: int) -> Tensor:
        return self.table[row].amax(dim=0).masked_fill(self.table[1].sum(dim=0) == 0, torch.nan)

    def influence(self, *, normalised: bool = False) -> Tensor:
        """Return the first-order effect of each sample on the mean of each head, shape (samples, heads).

        It is (sₖ − mean·cₖ)/Σc, where sₖ and cₖ are the sum and the number of rows of sample k.
        """
        values, counts = self.table[2:4] if normalised else self.table[:2]
        return torch.div(values - _ratio(values, counts) * counts, counts.sum(dim=0))


def _ratio(values: Tensor, counts: Tensor) -> Tensor:
    return torch.div(values.sum(dim=0), counts.sum(dim=0))


def sampling_error(influence: Tensor) -> Tensor:
    """Return the standard error of a ratio of sums over K ≥ 2 samples, √(K/(K−1)·Σ influence²) (Cochran 1977, 6.4).

    The first dimension is that of the samples. For samples with equally many rows the result is s/√K of their means.
    """
    count = len(influence)
    return torch.sqrt(influence.square().sum(dim=0) * (count / (count - 1)))


def row_statistics(call: AttentionCall) -> RowStatistics:
    """Return the statistics of the rows of a call, without rows of hidden keys."""
    samples, heads, *_ = call.shape
    device = call.tensors[0].device
    dtype = torch.promote_types(call.tensors[0].dtype, torch.float32)
    table = torch.zeros(6, samples, heads, device=device, dtype=dtype)
    table[4:] = -torch.inf
    only_maxima = torch.full((heads,), call.may_be_shifted, device=device)
    has_others = torch.zeros_like(only_maxima)
    for block in call.blocks():
        scores = block.scores
        keys = (~scores.isneginf()).sum(dim=-1)
        # entropy: −Σ p ln p over the keys, shape (samples, heads, queries); share: the same over ln(visible keys)
        entropy = torch.special.entr(scores.softmax(dim=-1)).sum(dim=-1).where(keys > 0, 0)
        share = (entropy / keys.to(entropy.dtype).log()).clamp(max=1).where(keys > 1, 0)  # without rounding above 1
        parts = [entropy, (keys > 0).to(entropy.dtype), share, (keys > 1).to(entropy.dtype)]
        part = table[:, block.samples]
        part[:4] += torch.stack([value.sum(dim=2) for value in parts])
        largest = scores.amax(dim=-1)
        part[4] = torch.maximum(part[4], largest.amax(dim=2))
        products = torch.full_like(part[5], torch.nan) if block.products is None else block.products.amax(dim=(2, 3))
        part[5] = torch.maximum(part[5], products)
        if call.may_be_shifted:
            only_maxima &= ((largest == 0) | (keys == 0)).all(dim=2).all(dim=0)
            has_others |= ((scores != 0) & ~scores.isneginf()).any(dim=-1).any(dim=2).any(dim=0)
    # All rows have the maximum 0, so the layer has subtracted it.
    table[4] = table[4].masked_fill(only_maxima & has_others & (table[1] > 0), torch.nan)
    return RowStatistics(table)


class LayerReader:
    """Reads the attention calls of modules inside its context, without changing their results.

    A call of ``nn.MultiheadAttention`` or of ``scaled_dot_product_attention`` takes precedence over a softmax of the
    same module, which is the fallback for handwritten attention; of several calls of one kind the last is recorded.
    PyTorch disables the fused fast path of its encoder layers while a function mode is active.
    """

    def __init__(self) -> None:
        self.calls: dict[str, HeadsCall] = {}  # by name of the module
        self.outputs: dict[str, Tensor] = {}
        """Outputs of the fused projections for the first sample, by name of the module."""
        self.mode = ValueReader(self._record, self.is_running, self._record_values)
        self._running: list[str] = []
        self._score_shape = torch.Size()

    def is_running(self) -> bool:
        """Return whether a module is running."""
        return bool(self._running)

    def attach(self, name: str, module: nn.Module, fused: nn.Module | None) -> Iterator[RemovableHandle]:
        """Assign function calls to ``module`` while it runs, and record the output of its fused projection.

        Yields the handles of the hooks on the modules, to remove them.
        """

        # A forward hook that returns a value other than None replaces the output.
        def enter(module: nn.Module, inputs: Any) -> None:
            self._running.append(name)

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            self._running.pop()

        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.ndim == 3:
                self.outputs[name] = output[0].clone()

        yield module.register_forward_pre_hook(enter)
        yield module.register_forward_hook(leave, always_call=True)
        if fused is not None:
            yield fused.register_forward_hook(keep)

    def _record(self, call: AttentionCall) -> None:
        name = self._running[-1]
        is_fused, previous = isinstance(call, FusedCall), self.calls.get(name)
        if previous is not None and previous.head_dim is not None and not is_fused:
            return
        value = call.value[0].clone() if isinstance(call, FusedCall) and call.value is not None else None
        head_dim = call.query.shape[-1] if isinstance(call, FusedCall) else None
        self.calls[name] = HeadsCall(call.shape[1], head_dim, row_statistics(call), value)
        self._score_shape = call.tensors[0].shape

    def _record_values(self, weights: Tensor, values: Tensor) -> None:
        """Record the values that are multiplied with the result of a softmax."""
        call = self.calls.get(self._running[-1])
        if call is None or call.head_dim is not None or call.value is not None or values.ndim != 4:
            return
        if weights.shape[:-1] == self._score_shape[:-1] and weights.shape[-1] == values.shape[-2]:
            self.calls[self._running[-1]] = replace(call, value=values[0].clone())


class ValueReader(AttentionReader):
    """A reader that also passes the factors of matrix products to a function."""

    def __init__(
        self,
        on_call: Callable[[AttentionCall], None],
        is_active: Callable[[], bool],
        on_product: Callable[[Tensor, Tensor], None],
    ) -> None:
        super().__init__(on_call, is_active)
        self._on_product = on_product

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Read a call if it computes attention or a product, and run it."""
        if func in PRODUCTS and self._is_active() and all(isinstance(part, Tensor) for part in args[:2]):
            self._on_product(*args[:2])
        return super().__torch_function__(func, types, args, kwargs)


PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__}  # products with values in handwritten attention


@contextmanager
def record_attention(
    modules: Mapping[str, nn.Module], fused: Mapping[str, nn.Module] = MappingProxyType({})
) -> Iterator[LayerReader]:
    """Record the attention calls of modules by name inside the context, where nothing runs compiled.

    ``fused`` are the fused projections of modules by the same names; their outputs are recorded too.
    """
    reader = LayerReader()
    with ExitStack() as stack:
        # Compiled code skips function modes and module hooks. Importing torch._dynamo takes seconds, so only if loaded.
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for name, module in modules.items():
            for handle in reader.attach(name, module, fused.get(name)):
                stack.callback(handle.remove)
        stack.enter_context(reader.mode)
        yield reader
