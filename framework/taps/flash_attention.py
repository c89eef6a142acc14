"""Reading of the flash attention that models of Hugging Face call, which no function mode of torch sees.

The models look their attention function up in ``AttentionInterface.get_interface``. While a reader is active in any
thread, this method is replaced; for a flash implementation it returns a function that reads the call first. Other
implementations are returned as they are: a function mode reads them.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..hooks import FusedCall
from .score_traces import as_computed

OnCall = Callable[[FusedCall], None]


class _Readers(threading.local):
    """The functions that receive the calls of this thread."""

    def __init__(self) -> None:
        self.functions: list[OnCall] = []


_READERS = _Readers()
_LOCK = threading.Lock()
_contexts = 0
_original: Any = None


@contextmanager
def flash_attention_read(on_call: OnCall) -> Iterator[None]:
    """Pass the flash attention calls of this thread in the body to a function, which decides whether to read them."""
    interface = getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None)
    if interface is None:  # transformers is not used, or too old to have it
        yield
        return
    _READERS.functions.append(on_call)
    _replace(interface)
    try:
        yield
    finally:
        _restore(interface)
        _READERS.functions.remove(on_call)


def _replace(interface: Any) -> None:
    global _contexts, _original
    with _LOCK:
        _contexts += 1
        if _contexts == 1:
            _original = interface.get_interface
            interface.get_interface = _get_interface


def _restore(interface: Any) -> None:
    global _contexts
    with _LOCK:
        _contexts -= 1
        if _contexts == 0:
            interface.get_interface = _original


def _get_interface(interface: Any, attn_implementation: str | None, default: Callable[..., Any]) -> Callable[..., Any]:
    function: Callable[..., Any] = _original(interface, attn_implementation, default)
    is_flash = attn_implementation is not None and "flash" in attn_implementation
    return partial(_read_and_call, function) if is_flash and _READERS.functions else function


def _read_and_call(function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    if (call := read_flash(*inputs[:5], **options)) is not None:
        for on_call in [*_READERS.functions]:
            on_call(call)
    return function(*inputs, **options)


def read_flash(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> FusedCall | None:
    """Read a call with queries and keys of shape (batch, heads, tokens, head_dim).

    ``attention_mask`` has shape (batch, keys), and is ``False`` or 0 for padding, which the kernels leave out. Without
    it, a batch of one row may consist of several sequences, which see only themselves: a position that does not follow
    the one before it starts a sequence. Returns ``None`` if the sequences are given by their lengths instead.
    """
    if query.ndim != 4 or any(options.get(name) is not None for name in ("cu_seq_lens_q", "cu_seqlens", "cache")):
        return None
    visible = None if attention_mask is None else attention_mask.detach().bool()
    mask = None if visible is None else visible[:, None, None, :]
    positions = options.get("position_ids")
    if visible is None and positions is not None and len(query) == 1 and positions.shape[-1] == key.shape[2]:
        sequences = (positions.detach()[0].diff(prepend=positions.detach()[0, :1] - 1) != 1).cumsum(dim=0)
        mask = (sequences[:, None] == sequences)[None, None]
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return FusedCall(
        query=as_computed(query),
        key=as_computed(key),
        value=value.detach(),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        cap=softcap,
        mask=mask,
        rows=visible if visible is not None and visible.shape[1] == query.shape[2] else None,
        causal=is_causal and query.shape[2] > 1,
        window=sliding_window,
    )
