"""Dropout that stays active in evaluations: ``F.dropout(x)`` without ``training=self.training``."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ...hooks import Alert, Severity
from ...training import is_compiled

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


class ActiveDropout(NamedTuple):
    """Dropout that was active in an evaluation."""

    functions: set[str]
    """Names of functions that the model calls with ``training=True``, or with a probability."""
    unregistered: set[str]
    """Classes of modules that the model calls, but does not register, so that ``model.eval()`` does not reach them."""


class EvaluationDropout:
    """Finds dropout that is active in the first call of a model within its first evaluation.

    Registered modules that the script keeps in train mode are left out, since they drop on purpose. Compiled models are
    not examined, nor those with modules of :data:`WITH_FAST_PATH`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._is_done = False
        self._active = ActiveDropout(set(), set())

    @contextmanager
    def watched(self) -> Iterator[ActiveDropout]:
        """Watch the first call of the model in the body, if it is in eval mode.

        Yields an object that then contains what was active.
        """
        active = self._active = ActiveDropout(set(), set())
        if self._is_done or self._runs_differently():
            yield active
            return
        calls = DropoutCalls(active, {id(module) for module in self._model.modules()})
        entered = list[DropoutCalls]()

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
            yield active
        finally:
            leave()
            for handle in handles:
                handle.remove()

    def alerts(self, step: int) -> Iterator[Alert]:
        """Yield alerts about dropout that was active in the last watched evaluation, after ``step``."""
        functions = "The model calls functions that drop elements in eval mode, too"
        modules = "The model drops elements in eval mode, too, in modules that model.eval() does not reach"
        kinds: tuple[tuple[str, str, set[str], Severity], ...] = (
            ("active_dropout", functions, self._active.functions, "warning"),
            ("unregistered_dropout", modules, self._active.unregistered, "info"),  # a consequence
        )
        for metric, sentence, names, severity in kinds:
            if names:
                text = f"{sentence}: {', '.join(sorted(names))}."
                yield Alert(text, metric=metric, step=step, severity=severity, id="dropout-in-evaluation")

    def _runs_differently(self) -> bool:
        has_fast_path = any(isinstance(module, WITH_FAST_PATH) for module in self._model.modules())
        return has_fast_path or is_compiled(self._model)


class DropoutCalls(TorchFunctionMode):
    """Notes active dropout that is called while it is entered, by modules with these ids or by others."""

    def __init__(self, active: ActiveDropout, registered: set[int]) -> None:
        super().__init__()
        self._active, self._registered = active, registered

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, and note it if it drops elements."""
        kwargs = kwargs or {}
        if _is_active(func, args, kwargs):
            module = _calling_module()
            if module is not None and id(module) not in self._registered:
                self._active.unregistered.add(type(module).__name__)
            elif module is None or not module.training:
                self._active.functions.add(func.__name__)
        return func(*args, **kwargs)


def _calling_module() -> nn.Module | None:
    """Return the innermost module that runs a method, or ``None``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not isinstance(frame.f_locals.get("self"), nn.Module):
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


def _is_active(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of one of torch's functions drops elements."""
    if func is functional.scaled_dot_product_attention:
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    # torch's own dispatch passes the options of dropout functions by name.
    return func in DROPOUTS and bool(kwargs.get("training")) and bool(kwargs.get("p", 0.5))
