"""Attention scores of a forward pass, recorded from its function calls and reduced to statistics per head."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

HIDDEN = -5e3  # a score of at most this is that of a hidden key: additive masks use −∞, or −10⁴ and less
BLOCK_ELEMENTS = 2**22  # largest number of scores in memory at a time


@dataclass(frozen=True)
class RowStatistics:
    """Statistics of the rows of a softmax by head; float32 or wider."""

    table: Tensor
    """Sums over the rows of each sample, shape (5, samples, heads): −Σ p ln p; the number of rows with a visible key;
    −Σ p ln p over ln(visible keys); the number of rows with two or more; then the largest score of a visible key, −∞
    without visible keys."""

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
        return self.table[4].amax(dim=0).masked_fill(self.table[1].sum(dim=0) == 0, torch.nan)

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


def row_statistics(blocks: Iterator[Tensor]) -> RowStatistics:
    """Return the statistics of scores in blocks of shape (batch, heads, queries, keys), without rows of hidden keys."""
    tables = []
    for scores in blocks:
        hidden = scores <= HIDDEN
        visible = scores.masked_fill(hidden, -torch.inf)
        keys = (~hidden).sum(dim=-1)
        # entropy: −Σ p ln p over the keys, shape (batch, heads, queries); share: the same over ln(visible keys)
        entropy = torch.special.entr(visible.softmax(dim=-1)).sum(dim=-1).where(keys > 0, 0)
        share = (entropy / keys.to(entropy.dtype).log()).where(keys > 1, 0)
        parts = [entropy, (keys > 0).to(entropy.dtype), share, (keys > 1).to(entropy.dtype)]
        tables.append(torch.stack([*(part.sum(dim=2) for part in parts), visible.amax(dim=(2, 3))]))
    return RowStatistics(torch.cat(tables, dim=1))


def score_blocks(query: Tensor, key: Tensor, bias: Tensor | None, scale: float) -> Iterator[Tensor]:
    """Yield scale·q·k + bias in float32 or wider for a few samples at a time.

    Queries have shape (batch, heads, queries, head_dim), keys (batch, key heads, keys, head_dim), where heads / key
    heads consecutive heads share each key head. The bias broadcasts to (batch, heads, queries, keys) and is −∞ for
    hidden keys; the scale is usually 1/√head_dim.
    """
    query, key = _wide(query), _wide(key)
    if key.shape[1] < query.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    if bias is not None:
        bias = _wide(bias).expand(*query.shape[:-1], key.shape[-2])
    samples = max(1, BLOCK_ELEMENTS // max(1, query[0, ..., 0].numel() * key.shape[-2]))
    for first in range(0, len(query), samples):
        part = slice(first, first + samples)
        scores = query[part] @ key[part].mT * scale
        yield scores if bias is None else scores + bias[part]


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def additive(mask: Tensor, *, hides: bool) -> Tensor:
    """Return a mask as a bias: −∞ where a boolean mask equals ``hides``; a mask of numbers is returned unchanged."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(mask if hides else ~mask, -torch.inf)


@dataclass(frozen=True)
class AttentionCall:
    """One attention call: the number and width of its heads, and the statistics of their rows."""

    heads: int
    head_dim: int | None  # unknown if only the scores were recorded
    statistics: RowStatistics
    value: Tensor | None = None
    """Values of the first sample if recorded, shape (heads, keys, value_dim), or fewer heads if they are shared."""


def read_scaled_dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionCall | None:
    """Record a call of :func:`torch.nn.functional.scaled_dot_product_attention` on (batch, heads, tokens, head_dim)."""
    if query.ndim != 4 or query.is_nested:
        return None
    # True in a boolean mask means visible here, but hidden in multi_head_attention_forward.
    bias = None if attn_mask is None else additive(attn_mask, hides=False)
    if is_causal:  # hides key j from query i for j > i
        hidden = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).triu(diagonal=1)
        bias = additive(hidden, hides=True)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    statistics = row_statistics(score_blocks(query, key, bias, scale))
    return AttentionCall(query.shape[1], query.shape[-1], statistics, value[0].clone())


def read_softmax(input: Tensor, dim: int | None = None, *_: Any, **__: Any) -> AttentionCall | None:
    """Record a softmax over the last of four dimensions, (batch, heads, queries, keys); ``None`` for any other."""
    if input.ndim != 4 or dim not in (-1, 3):
        return None
    return AttentionCall(input.shape[1], None, row_statistics(iter([_wide(input)])))


SIGNATURE = inspect.signature(functional.multi_head_attention_forward)


def read_multi_head(*args: Any, **kwargs: Any) -> AttentionCall | None:
    """Record a call of :func:`torch.nn.functional.multi_head_attention_forward`, as ``nn.MultiheadAttention`` does."""
    bound = SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    query, key, heads = given["query"], given["key"], given["num_heads"]
    if query.is_nested or given["static_k"] is not None:
        return None
    if query.ndim == 2:
        query, key = query.unsqueeze(1), key.unsqueeze(1)
    # The function does not return its scores, so project queries and keys again.
    is_separate = given["use_separate_proj_weight"]
    weights = (given["q_proj_weight"], given["k_proj_weight"]) if is_separate else given["in_proj_weight"].chunk(3)
    biases = (None, None) if given["in_proj_bias"] is None else given["in_proj_bias"].chunk(3)
    queries, keys = map(functional.linear, (query, key), weights, biases)  # (tokens, batch, heads · head_dim)
    if given["bias_k"] is not None:
        keys = torch.cat([keys, given["bias_k"].expand(1, keys.shape[1], -1)])
    if given["add_zero_attn"]:
        keys = torch.cat([keys, torch.zeros_like(keys[:1])])
    bias = _merged_bias(given, queries.shape[1], heads, extra=len(keys) - len(key))
    query, key = (tensor.reshape(*tensor.shape[:2], heads, -1).permute(1, 2, 0, 3) for tensor in (queries, keys))
    head_dim = query.shape[-1]
    return AttentionCall(heads, head_dim, row_statistics(score_blocks(query, key, bias, head_dim**-0.5)))


def _merged_bias(given: Mapping[str, Any], batch: int, heads: int, extra: int) -> Tensor | None:
    """Return the sum of both masks as a bias that broadcasts to (batch, heads, queries, keys); ``extra`` keys get 0."""
    bias: Tensor | None = None
    if given["attn_mask"] is not None:
        mask = _wide(additive(given["attn_mask"], hides=True))
        # A mask has shape (queries, keys) or (batch · heads, queries, keys).
        bias = mask if mask.ndim == 2 else mask.reshape(batch, heads, *mask.shape[1:])
    if given["key_padding_mask"] is not None:
        padding = _wide(additive(given["key_padding_mask"], hides=True)).view(batch, 1, 1, -1)
        bias = padding if bias is None else bias + padding
    return None if bias is None else functional.pad(bias, (0, extra))


READERS: dict[Callable[..., Any], Callable[..., AttentionCall | None]] = {
    functional.multi_head_attention_forward: read_multi_head,
    functional.scaled_dot_product_attention: read_scaled_dot_product,
    functional.softmax: read_softmax,
    torch.softmax: read_softmax,
    Tensor.softmax: read_softmax,
}
PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__}  # products with values in handwritten attention


class AttentionReader(TorchFunctionMode):
    """Records the attention calls of modules inside its context, without changing their results.

    A call of ``nn.MultiheadAttention`` or of ``scaled_dot_product_attention`` takes precedence over a softmax of the
    same module, which is the fallback for handwritten attention; of several calls of one kind the last is recorded.
    PyTorch disables the fused fast path of its encoder layers while a function mode is active.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, AttentionCall] = {}  # by name of the module
        self.outputs: dict[str, Tensor] = {}
        """Outputs of the fused projections for the first sample, by name of the module."""
        self._running: list[str] = []
        self._score_shapes: dict[str, torch.Size] = {}

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

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Record a call if it computes attention, and run it."""
        # Module hooks receive only inputs and outputs of modules; a function mode receives the arguments of the
        # attention.
        if self._running and func in READERS:
            call = READERS[func](*args, **(kwargs or {}))
            previous = self.calls.get(self._running[-1])
            if call is not None and (previous is None or call.head_dim is not None or previous.head_dim is None):
                self.calls[self._running[-1]] = call
                self._score_shapes[self._running[-1]] = args[0].shape if args else torch.Size()
        elif self._running and func in PRODUCTS and self._running[-1] in self.calls:
            self._record_values(self._running[-1], *args[:2])
        return func(*args, **(kwargs or {}))

    def _record_values(self, name: str, weights: Any = None, values: Any = None) -> None:
        """Record the values that are multiplied with the result of a softmax."""
        are_tensors = isinstance(weights, Tensor) and isinstance(values, Tensor) and values.ndim == 4
        if are_tensors and weights.shape == self._score_shapes[name] and self.calls[name].head_dim is None:
            self.calls[name] = replace(self.calls[name], value=values[0].clone())


@contextmanager
def record_attention(
    modules: Mapping[str, nn.Module], fused: Mapping[str, nn.Module] = MappingProxyType({})
) -> Iterator[AttentionReader]:
    """Record the attention calls of modules by name inside the context, where nothing runs compiled.

    ``fused`` are the fused projections of modules by the same names; their outputs are recorded too.
    """
    reader = AttentionReader()
    with ExitStack() as stack:
        # Compiled code skips function modes and module hooks. Importing torch._dynamo takes seconds, so only if loaded.
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for name, module in modules.items():
            for handle in reader.attach(name, module, fused.get(name)):
                stack.callback(handle.remove)
        yield stack.enter_context(reader)
