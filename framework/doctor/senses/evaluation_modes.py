"""The mode in which an evaluation calls a model."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_pre_hook

from ...hooks import Alert
from ...isolation import VISITS
from ...state import LoopState
from ...training import is_compiled
from .evaluation_dropout import WITH_FAST_PATH


class EvaluationModes:
    """Reports, once per run, an evaluation that runs the model in train mode.

    Only for models in which modes matter, as the start-up facts show.

    Args:
        model: the trained model.
        loop: the state of the loop, for the steps of the alerts.
        facts: returns the start-up facts of the run, if it has started.
        is_in_hook: whether a hook is being called, whose calls of the model do not count.
        report: receives the alerts.
        compiled: the model is part of a compiled module.
    """

    def __init__(
        self,
        model: nn.Module,
        loop: LoopState,
        *,
        facts: Callable[[], Mapping[str, Any]],
        is_in_hook: Callable[[], bool],
        report: Callable[[Alert], None],
        compiled: bool = False,
    ) -> None:
        self._model, self._loop, self._compiled = model, loop, compiled
        self._facts, self._is_in_hook, self._report = facts, is_in_hook, report
        self._has_reported_train = False
        self._call = EvaluationCall()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Report an evaluation, the body, that runs the model in train mode.

        Not for compiled models and for attention layers as models: a module hook would change how they run.
        """
        self._call.stop()
        if not self._can_notice_train_mode():
            yield
            return
        modes = list[bool]()

        def note(module: nn.Module, inputs: Any) -> None:
            modes.append(module.training)

        handle = self._model.register_forward_pre_hook(note)
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
            self._call = EvaluationCall(self._model, self._is_in_hook)

    def end_epoch(self, *, has_numbers: bool) -> None:
        """Stop watching; if the loop gives numbers of an evaluation, the call was one."""
        self._call.stop()
        if has_numbers and self._call.is_in_train_mode and self._can_notice_train_mode():
            self._report_train_mode()

    def have_effect(self) -> bool:
        """Return whether a layer whose mode matters is in train mode, as opposed to those of a frozen trunk."""
        kinds = (_DropoutNd, _BatchNorm)
        return any(module.training for module in self._model.modules() if isinstance(module, kinds))

    def note_train_mode(self) -> None:
        """Report an evaluation that was seen to run the model in train mode."""
        if self._can_notice_train_mode():
            self._report_train_mode()

    def stop(self) -> None:
        """Stop watching; further calls do nothing."""
        self._call.stop()

    def _can_notice_train_mode(self) -> bool:
        """Return whether modes affect the model, a module hook does not, and no evaluation was reported yet."""
        facts = self._facts()
        if self._has_reported_train or not (facts.get("dropouts") or facts.get("batchnorms")):
            return False
        return not (self._compiled or is_compiled(self._model) or isinstance(self._model, WITH_FAST_PATH))

    def _report_train_mode(self) -> None:
        if not self._has_reported_train:
            self._has_reported_train = True
            sentence = "The evaluation ran the model in train mode."
            self._report(Alert(sentence, metric="train_mode", step=self._loop.step, id="evaluation-in-train-mode"))


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
