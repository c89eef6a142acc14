"""Modes in which evaluations call a model and leave it, and dropout that eval mode does not switch off."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import wraps
from types import FrameType
from typing import Any, ClassVar, NamedTuple

from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from ...hooks import Alert, Severity
from ...isolation import VISITS
from ...state import LoopState
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


@dataclass(eq=False)
class EvaluationModes:
    """Reports, once per run, an evaluation that runs the model in train mode, and one that leaves it in eval mode.

    Only for models in which modes matter, as the start-up facts show.

    Args:
        model: the trained model.
        loop: the state of the loop, for the steps of the alerts.
        facts: returns the start-up facts of the run, if it has started.
        is_in_hook: whether a hook is being called, whose calls of the model do not count.
        report: receives the alerts.
        compiled: the model is part of a compiled module.
    """

    model: nn.Module
    loop: LoopState
    _: KW_ONLY
    facts: Callable[[], Mapping[str, Any]]
    is_in_hook: Callable[[], bool]
    report: Callable[[Alert], None]
    compiled: bool = False

    def __post_init__(self) -> None:
        """Start without a watched call, and without a report."""
        self._has_reported_train = self._has_reported_eval = False
        self._call = EvaluationCall()
        self.left_mode = LeftMode(self.model, self.is_in_hook, self._report_left_mode)
        """Watches until the next update, at which the loop calls its ``at_update``."""

    def begin_evaluation(self, *, is_isolated: bool) -> None:
        """Start to watch the mode in which an evaluation leaves the model; an isolated one would restore it."""
        self._call.stop()
        if is_isolated and self.model.training and not self._has_reported_eval and self._has_modes():
            self.left_mode.watch()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Report an evaluation, the body, that runs the model in train mode.

        Not for compiled models and for attention layers as models: a module hook would change how they run.
        """
        if not self._can_notice_train_mode():
            yield
            return
        modes = list[bool]()

        def note(module: nn.Module, inputs: Any) -> None:
            modes.append(module.training)

        handle = self.model.register_forward_pre_hook(note)
        try:
            yield
        finally:
            handle.remove()
        if any(modes):
            self.note_train_mode()

    def end_data(self) -> None:
        """Watch the next call of the model, which follows the data of an epoch: it is probably an evaluation."""
        self._call.stop()
        if self._can_notice_train_mode():
            self._call = EvaluationCall(self.model, self.is_in_hook)

    def end_epoch(self, *, has_numbers: bool) -> None:
        """Stop watching; if the loop gives numbers of an evaluation, the call was one."""
        self._call.stop()
        if has_numbers and self._call.is_in_train_mode:
            self.note_train_mode()

    def have_effect(self) -> bool:
        """Return whether a layer whose mode matters is in train mode, as opposed to those of a frozen trunk."""
        kinds = (_DropoutNd, _BatchNorm)
        return any(module.training for module in self.model.modules() if isinstance(module, kinds))

    def note_train_mode(self) -> None:
        """Report an evaluation that was seen to run the model in train mode."""
        if self._can_notice_train_mode():
            self._has_reported_train = True
            sentence = "The evaluation ran the model in train mode."
            self.report(Alert(sentence, metric="train_mode", step=self.loop.step, id="evaluation-in-train-mode"))

    def stop(self) -> None:
        """Stop watching; further calls do nothing."""
        self._call.stop()
        self.left_mode.stop()

    def _has_modes(self) -> bool:
        facts = self.facts()
        return bool(facts.get("dropouts") or facts.get("batchnorms"))

    def _can_notice_train_mode(self) -> bool:
        """Return whether modes affect the model, a module hook does not, and no evaluation was reported yet."""
        if self._has_reported_train or not self._has_modes():
            return False
        return not (self.compiled or is_compiled(self.model) or isinstance(self.model, WITH_FAST_PATH))

    def _report_left_mode(self) -> None:
        self._has_reported_eval = True
        sentence = "The evaluation left the model in eval mode; scope.evaluate has restored train mode."
        self.report(Alert(sentence, metric="eval_mode_left", step=self.loop.step, id="model-in-eval-mode"))


class EvaluationCall:
    """Records whether the next call of a model runs in train mode; without a model, it records nothing.

    It uses a hook of all modules, which is removed at that call: a hook of the model would be in every copy and every
    file of it. Calls while ``is_in_hook`` returns ``True`` are ignored.
    """

    def __init__(self, model: nn.Module | None = None, is_in_hook: Callable[[], bool] | None = None) -> None:
        self._model, self._is_in_hook = model, is_in_hook
        self.is_in_train_mode = False
        with VISITS:
            self._handle = None if model is None else register_module_forward_pre_hook(self._record)

    def _record(self, module: nn.Module, inputs: Any) -> None:
        if module is self._model and not (self._is_in_hook is not None and self._is_in_hook()):
            self.is_in_train_mode = module.training
            self.stop()

    def stop(self) -> None:
        """Remove the hook, if any; further calls do nothing."""
        if self._handle is not None:
            with VISITS:
                self._handle.remove()


class LeftMode:
    """Reports a model that code outside of hooks has set to eval mode in an evaluation, and not back before an update.

    ``scope.evaluate`` restores the mode, which would hide a missing ``model.train()``. The calls are seen at
    ``nn.Module.train``, which ``eval()`` calls, too; it is replaced while any training watches.
    """

    _watching: ClassVar[list["LeftMode"]] = []  # of all trainings of the process, which may run in several threads
    _train: ClassVar[Callable[..., nn.Module]] = nn.Module.train

    def __init__(self, model: nn.Module, is_in_hook: Callable[[], bool], report: Callable[[], None]) -> None:
        self._model, self._is_in_hook, self._report = model, is_in_hook, report
        self.is_watching = self._is_eval = False

    def watch(self) -> None:
        """Start to watch, with no known call; a second call does nothing."""
        with VISITS:
            if self.is_watching:
                return
            self.is_watching, self._is_eval = True, False
            if not self._watching:
                LeftMode._train = nn.Module.train
                nn.Module.train = _noted_train  # type: ignore[method-assign, assignment]
            self._watching.append(self)

    def note(self, module: nn.Module, *, train: bool) -> None:
        """Note a call of ``train``."""
        if module is self._model and not self._is_in_hook():
            self._is_eval = not train

    def at_update(self) -> None:
        """Stop, and report if the last call has set eval mode; called at an update while this watches."""
        self.stop()
        if self._is_eval:
            self._report()

    def stop(self) -> None:
        """Stop watching; further calls do nothing."""
        with VISITS:
            if self.is_watching:
                self.is_watching = False
                self._watching.remove(self)
                if not self._watching and nn.Module.train is _noted_train:
                    nn.Module.train = LeftMode._train  # type: ignore[method-assign, assignment]


@wraps(nn.Module.train)
def _noted_train(module: nn.Module, mode: bool = True) -> nn.Module:
    for watching in [*LeftMode._watching]:
        watching.note(module, train=mode)
    return LeftMode._train(module, mode)


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
