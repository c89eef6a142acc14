"""The scores of attention as a forward pass computes them: read from its calls, reduced to numbers for each head."""

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

HIDDEN = -5e3  # a score at or below this belongs to a hidden key: additive masks are made of −∞, or of −10⁴ and less
BLOCK_ELEMENTS = 2**22  # scores that are held at once


@dataclass(frozen=True)
class RowStatistics:
    """What the rows of a softmax look like, for each head; float32 or wider."""

    table: Tensor
    """Of each sample, shape (5, samples, heads): sums over its rows of −Σ p ln p, of rows that see a key, of −Σ p ln p
    over ln(visible keys), of rows that see two keys or more; then the largest score of a visible key, −∞ for none."""

    @property
    def entropy(self) -> Tensor:
        """Mean over the rows of −Σ p ln p, in nats, shape (heads,)."""
        return _ratio(*self.table[:2])

    @property
    def normalised_entropy(self) -> Tensor:
        """Mean of the same over ln(visible keys), over the rows that see two keys or more; NaN if there is none."""
        return _ratio(*self.table[2:4])

    @property
    def largest(self) -> Tensor:
        """The largest score of a visible key, shape (heads,)."""
        return self.table[4].amax(dim=0).masked_fill(self.table[1].sum(dim=0) == 0, torch.nan)

    def influence(self, *, normalised: bool = False) -> Tensor:
        """Return by how much each sample moves the mean of its head to first order, shape (samples, heads).

        (sₖ − mean·cₖ)/Σc, s and c the sample's sum and count of rows.
        """
        values, counts = self.table[2:4] if normalised else self.table[:2]
        return torch.div(values - _ratio(values, counts) * counts, counts.sum(dim=0))


def _ratio(values: Tensor, counts: Tensor) -> Tensor:
    return torch.div(values.sum(dim=0), counts.sum(dim=0))


def sampling_error(influence: Tensor) -> Tensor:
    """Return the standard error of a ratio of sums over K ≥ 2 samples, √(K/(K−1)·Σ influence²) (Cochran 1977, 6.4).

    The samples are the first dimension; for equally many rows a sample it is s/√K of the samples' means.
    """
    count = len(influence)
    return torch.sqrt(influence.square().sum(dim=0) * (count / (count - 1)))


def row_statistics(blocks: Iterator[Tensor]) -> RowStatistics:
    """Sum up scores, in blocks of shape (batch, heads, queries, keys); rows that see no key are left out."""
    tables = []
    for scores in blocks:
        hidden = scores <= HIDDEN
        visible = scores.masked_fill(hidden, -torch.inf)
        keys = (~hidden).sum(dim=-1)
        entropy = torch.special.entr(visible.softmax(dim=-1)).sum(dim=-1).where(keys > 0, 0)
        share = (entropy / keys.to(entropy.dtype).log()).where(keys > 1, 0)
        parts = [entropy, (keys > 0).to(entropy.dtype), share, (keys > 1).to(entropy.dtype)]
        tables.append(torch.stack([*(part.sum(dim=2) for part in parts), visible.amax(dim=(2, 3))]))
    return RowStatistics(torch.cat(tables, dim=1))


def score_blocks(query: Tensor, key: Tensor, bias: Tensor | None, scale: float) -> Iterator[Tensor]:
    """Yield scale·q·k + bias in float32 or wider for a few samples at a time.

    Queries have shape (batch, heads, queries, head_dim), keys (batch, heads, keys, head_dim), or a divisor of as many
    heads, each shared by neighbouring ones. The bias broadcasts to (batch, heads, queries, keys), −∞ where a key is
    hidden; the scale is usually 1/√head_dim.
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
    """Return a mask as a bias: −∞ where a boolean mask is ``hides``, a mask of numbers as it is."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(mask if hides else ~mask, -torch.inf)


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention: how many heads of which width it has, and what their rows look like."""

    heads: int
    head_dim: int | None  # none where only the scores are seen
    statistics: RowStatistics
    value: Tensor | None = None
    """The values of the first sample, shape (heads, keys, value_dim) or fewer heads that are shared, where seen."""


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
    """Read a call of :func:`torch.nn.functional.scaled_dot_product_attention` on (batch, heads, tokens, head_dim)."""
    if query.ndim != 4 or query.is_nested:
        return None
    bias = None if attn_mask is None else additive(attn_mask, hides=False)
    if is_causal:  # hides key j from query i for j > i
        hidden = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).triu(diagonal=1)
        bias = additive(hidden, hides=True)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    statistics = row_statistics(score_blocks(query, key, bias, scale))
    return AttentionCall(query.shape[1], query.shape[-1], statistics, value[0].clone())


def read_softmax(input: Tensor, dim: int | None = None, *_: Any, **__: Any) -> AttentionCall | None:
    """Read a softmax over the keys of (batch, heads, queries, keys); any other is none of attention."""
    if input.ndim != 4 or dim not in (-1, 3):
        return None
    return AttentionCall(input.shape[1], None, row_statistics(iter([_wide(input)])))


SIGNATURE = inspect.signature(functional.multi_head_attention_forward)


def read_multi_head(*args: Any, **kwargs: Any) -> AttentionCall | None:
    """Read a call of :func:`torch.nn.functional.multi_head_attention_forward`, what ``nn.MultiheadAttention`` makes."""
    bound = SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    query, key, heads = given["query"], given["key"], given["num_heads"]
    if query.is_nested or given["static_k"] is not None:
        return None
    if query.ndim == 2:
        query, key = query.unsqueeze(1), key.unsqueeze(1)
    apart = given["use_separate_proj_weight"]
    weights = (given["q_proj_weight"], given["k_proj_weight"]) if apart else given["in_proj_weight"].chunk(3)
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
    """Return both masks as one bias that broadcasts to (batch, heads, queries, keys); ``extra`` keys are visible."""
    bias: Tensor | None = None
    if given["attn_mask"] is not None:
        mask = _wide(additive(given["attn_mask"], hides=True))
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
PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__}  # what mixes the values where attention is written out


class AttentionReader(TorchFunctionMode):
    """Reads the attention that modules compute while it is entered; nothing that they compute changes.

    A call of ``nn.MultiheadAttention`` or of ``scaled_dot_product_attention`` counts before a softmax of the same
    module, which counts only where attention is written out; of several calls of one kind the last one does. While
    functions are watched PyTorch leaves the fused fast path of its encoder layers by itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, AttentionCall] = {}  # by name of the module
        self.outputs: dict[str, Tensor] = {}
        """Of the fused projections, by name of the module: what they made of the first sample."""
        self._inside: list[str] = []
        self._scores: dict[str, torch.Size] = {}

    def listen(self, name: str, module: nn.Module, fused: nn.Module | None) -> Iterator[RemovableHandle]:
        """Take what functions compute for calls of a module while it runs, and keep what its fused projection makes.

        Yields the handles that end this.
        """

        # no lambda: what a forward hook returns, unless it is None, replaces the output
        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            self._inside.pop()

        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.ndim == 3:
                self.outputs[name] = output[0].clone()

        yield module.register_forward_pre_hook(lambda module, inputs: self._inside.append(name))
        yield module.register_forward_hook(leave, always_call=True)
        if fused is not None:
            yield fused.register_forward_hook(keep)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Read a call if it is one of attention, then make it."""
        if self._inside and func in READERS:
            call = READERS[func](*args, **(kwargs or {}))
            known = self.calls.get(self._inside[-1])
            if call is not None and (known is None or call.head_dim is not None or known.head_dim is None):
                self.calls[self._inside[-1]] = call
                self._scores[self._inside[-1]] = args[0].shape if args else torch.Size()
        elif self._inside and func in PRODUCTS and self._inside[-1] in self.calls:
            self._mixed(self._inside[-1], *args[:2])
        return func(*args, **(kwargs or {}))

    def _mixed(self, name: str, weights: Any = None, values: Any = None) -> None:
        """Take the values that the weights of a softmax are multiplied with."""
        seen = isinstance(weights, Tensor) and isinstance(values, Tensor) and values.ndim == 4
        if seen and weights.shape == self._scores[name] and self.calls[name].head_dim is None:
            self.calls[name] = replace(self.calls[name], value=values[0].clone())


@contextmanager
def reading(
    modules: Mapping[str, nn.Module], fused: Mapping[str, nn.Module] = MappingProxyType({})
) -> Iterator[AttentionReader]:
    """Read the attention of modules, by the names for their calls, in the body, in which nothing runs compiled.

    Of modules with a ``fused`` projection, what that makes is kept too.
    """
    reader = AttentionReader()
    with ExitStack() as undoing:
        if "torch._dynamo" in sys.modules:  # compiled code passes by the functions and hooks of Python
            undoing.enter_context(torch.compiler.set_stance("force_eager"))
        for name, module in modules.items():
            for handle in reader.listen(name, module, fused.get(name)):
                undoing.callback(handle.remove)
        yield undoing.enter_context(reader)
