"""The mode in which an evaluation calls a model, and the mode in which it leaves it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import wraps
from typing import Any, ClassVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_pre_hook

from ...hooks import Alert
from ...isolation import VISITS
from ...state import LoopState
from ...training import is_compiled
from .evaluation_dropout import WITH_FAST_PATH


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
            self._report_train_mode()

    def end_data(self) -> None:
        """Watch the next call of the model, which follows the data of an epoch: it is probably an evaluation."""
        self._call.stop()
        if self._can_notice_train_mode():
            self._call = EvaluationCall(self.model, self.is_in_hook)

    def end_epoch(self, *, has_numbers: bool) -> None:
        """Stop watching; if the loop gives numbers of an evaluation, the call was one."""
        self._call.stop()
        if has_numbers and self._call.is_in_train_mode and self._can_notice_train_mode():
            self._report_train_mode()

    def have_effect(self) -> bool:
        """Return whether a layer whose mode matters is in train mode, as opposed to those of a frozen trunk."""
        kinds = (_DropoutNd, _BatchNorm)
        return any(module.training for module in self.model.modules() if isinstance(module, kinds))

    def note_train_mode(self) -> None:
        """Report an evaluation that was seen to run the model in train mode."""
        if self._can_notice_train_mode():
            self._report_train_mode()

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

    def _report_train_mode(self) -> None:
        if not self._has_reported_train:
            self._has_reported_train = True
            sentence = "The evaluation ran the model in train mode."
            self.report(Alert(sentence, metric="train_mode", step=self.loop.step, id="evaluation-in-train-mode"))


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
