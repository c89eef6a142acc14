"""A function mode that reads the attention calls of modules, without changing their results."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..hooks import AttentionCall, FusedCall
from ..state import skips_frames
from .flash_attention import flash_attention_read
from .score_traces import ScoreTraces, as_computed


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
) -> FusedCall | None:
    """Read a call of :func:`torch.nn.functional.scaled_dot_product_attention` on (batch, heads, tokens, head_dim)."""
    if query.ndim != 4 or query.is_nested:
        return None
    query, key = map(as_computed, (query, key))
    return FusedCall(
        query=query,
        key=key,
        value=value.detach(),
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        mask=None if attn_mask is None else attn_mask.detach(),
        causal=is_causal,
    )


SIGNATURE = inspect.signature(functional.multi_head_attention_forward)


def read_multi_head(*args: Any, **kwargs: Any) -> FusedCall | None:
    """Read a call of :func:`torch.nn.functional.multi_head_attention_forward`, as ``nn.MultiheadAttention`` does."""
    bound = SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    query, key, heads = given["query"], given["key"], given["num_heads"]
    if query.is_nested or given["static_k"] is not None:
        return None
    if query.ndim == 2:
        query, key = query.unsqueeze(1), key.unsqueeze(1)
    # The function does not return its queries and keys, so project them again, as it does.
    is_separate = given["use_separate_proj_weight"]
    weights = (given["q_proj_weight"], given["k_proj_weight"]) if is_separate else given["in_proj_weight"].chunk(3)
    biases = (None, None) if given["in_proj_bias"] is None else given["in_proj_bias"].chunk(3)
    with torch.no_grad():
        queries, keys = map(functional.linear, (query, key), weights, biases)  # (tokens, batch, heads · head_dim)
        if given["bias_k"] is not None:
            keys = torch.cat([keys, given["bias_k"].to(keys.dtype).expand(1, keys.shape[1], -1)])
        if given["add_zero_attn"]:
            keys = torch.cat([keys, torch.zeros_like(keys[:1])])
        mask = _merged_mask(given, queries.shape[1], heads, extra=len(keys) - len(key))
        query, key = (tensor.reshape(*tensor.shape[:2], heads, -1).permute(1, 2, 0, 3) for tensor in (queries, keys))
    return FusedCall(query=query, key=key, scale=query.shape[-1] ** -0.5, mask=mask)


def _merged_mask(given: Mapping[str, Any], batch: int, heads: int, extra: int) -> Tensor | None:
    """Return the sum of both masks, which broadcasts to (batch, heads, queries, keys); ``extra`` keys get 0."""
    bias: Tensor | None = None
    if given["attn_mask"] is not None:
        mask = _additive(given["attn_mask"])
        # A mask has shape (queries, keys) or (batch · heads, queries, keys).
        bias = mask if mask.ndim == 2 else mask.reshape(batch, heads, *mask.shape[1:])
    if given["key_padding_mask"] is not None:
        padding = _additive(given["key_padding_mask"]).view(batch, 1, 1, -1)
        bias = padding if bias is None else bias + padding
    return None if bias is None else functional.pad(bias, (0, extra))


def _additive(mask: Tensor) -> Tensor:
    """Return a mask as a bias; here a boolean mask is ``True`` for hidden keys, unlike in the other function."""
    if mask.dtype is not torch.bool:
        return mask.detach()
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(mask, -torch.inf)


FUSED_READERS: dict[Callable[..., Any], Callable[..., FusedCall | None]] = {
    functional.multi_head_attention_forward: read_multi_head,
    functional.scaled_dot_product_attention: read_scaled_dot_product,
}
SOFTMAXES = {functional.softmax, torch.softmax, Tensor.softmax, torch.special.softmax}


class AttentionReader(TorchFunctionMode):
    """Passes the attention calls inside its context to a function, without changing their results.

    It reads ``nn.MultiheadAttention``, ``scaled_dot_product_attention``, softmaxes over the last of four dimensions,
    (batch, heads, queries, keys), and the flash attention of models of Hugging Face. PyTorch disables the fused fast
    path of its encoder layers while a function mode is active.

    Args:
        on_call: the function, called before the attention is computed.
        is_active: returns whether calls are read now.
    """

    def __init__(self, on_call: Callable[[AttentionCall], None], is_active: Callable[[], bool]) -> None:
        super().__init__()
        self._on_call = on_call
        self._is_active = is_active
        self._traces = ScoreTraces()
        self._flash = ExitStack()

    def __enter__(self) -> Any:
        """Read calls from now on."""
        self._flash.enter_context(flash_attention_read(self._read_flash))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        """Read no more calls."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._flash.close()

    def _read_flash(self, call: FusedCall) -> None:
        if self._is_active():
            self._on_call(replace(call, projections=self._traces.projections))

    @skips_frames  # in a compiled region whose own code calls the function
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Read a call if it computes attention, and run it."""
        # Module hooks receive only inputs and outputs of modules; a function mode receives the arguments of functions.
        kwargs = kwargs or {}
        if not self._is_active():
            return func(*args, **kwargs)
        if (call := self._read(func, args, kwargs)) is not None:
            self._on_call(replace(call, projections=self._traces.projections))
        result = func(*args, **kwargs)
        self._traces.follow(func, args, kwargs, result)
        return result

    def _read(self, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> AttentionCall | None:
        if func in FUSED_READERS:
            return FUSED_READERS[func](*args, **kwargs)
        if func in SOFTMAXES and args and isinstance(args[0], Tensor) and args[0].ndim == 4:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            return self._traces.call_of(args[0]) if dim in (-1, 3) else None
        return None


@contextmanager
def attention_not_read() -> Iterator[None]:
    """Run the body without the innermost mode if that is a reader, which would be called for every operation."""
    depth = torch._C._len_torch_function_stack()
    reader = torch._C._get_function_stack_at(depth - 1) if depth else None
    if not isinstance(reader, AttentionReader):
        yield
        return
    torch._C._pop_torch_function_stack()
    try:
        yield
    finally:
        torch._C._push_on_torch_function_stack(reader)
