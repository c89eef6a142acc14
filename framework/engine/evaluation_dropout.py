"""Dropout that stays active in evaluations: ``F.dropout(x)`` without ``training=self.training``."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..training import is_compiled

WITH_FAST_PATH = (nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""Modules that compute other bits with module hooks, or while calls of torch's functions are watched."""
DROPOUTS = (
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
)


class EvaluationDropout:
    """Finds functions of dropout that are active in the first call of a model within its first evaluation.

    Compiled models are not examined, nor those with modules of :data:`WITH_FAST_PATH`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._is_done = False

    @contextmanager
    def watched(self) -> Iterator[set[str]]:
        """Watch the first call of the model in the body, if it is in eval mode.

        Yields a set, which then contains the names of the functions that were active.
        """
        names: set[str] = set()
        if self._is_done or self._runs_differently():
            yield names
            return
        calls = _DropoutCalls(names)
        entered = list[_DropoutCalls]()

        def enter(module: nn.Module, inputs: Any) -> None:
            if not self._is_done and not module.training:
                calls.__enter__()  # type: ignore[no-untyped-call]
                entered.append(calls)
            self._is_done = True

        def leave(*_: Any) -> None:
            while entered:
                entered.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

        handles = [
            self._model.register_forward_pre_hook(enter),
            self._model.register_forward_hook(leave, always_call=True),
        ]
        try:
            yield names
        finally:
            leave()
            for handle in handles:
                handle.remove()

    def _runs_differently(self) -> bool:
        has_fast_path = any(isinstance(module, WITH_FAST_PATH) for module in self._model.modules())
        return has_fast_path or is_compiled(self._model)


class _DropoutCalls(TorchFunctionMode):
    """Notes the names of active dropout functions that are called while it is entered."""

    def __init__(self, names: set[str]) -> None:
        super().__init__()
        self._names = names

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if _is_active(func, args, kwargs):
            self._names.add(func.__name__)
        return func(*args, **kwargs)


def _is_active(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of one of torch's functions drops elements."""
    if func is functional.scaled_dot_product_attention:
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    # torch's own dispatch passes the options of dropout functions by name.
    return func in DROPOUTS and bool(kwargs.get("training")) and bool(kwargs.get("p", 0.5))
