"""The mode in which an evaluation calls a model, and the mode in which it leaves it."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar, Protocol

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ..isolation import VISITS


class Switch(Protocol):
    """Something that is on or off."""

    is_on: bool


class EvaluationCall:
    """Records whether the next call of a model runs in train mode; without a model, it records nothing.

    It uses a hook of all modules, which is removed at that call: a hook of the model would be in every copy and every
    file of it. Calls during ``hook_calls`` are ignored.
    """

    def __init__(self, model: nn.Module | None = None, hook_calls: Switch | None = None) -> None:
        self._model, self._hook_calls = model, hook_calls
        self.is_in_train_mode = False
        with VISITS:
            self._handle = None if model is None else register_module_forward_pre_hook(self._record)

    def _record(self, module: nn.Module, inputs: Any) -> None:
        if module is self._model and not (self._hook_calls is not None and self._hook_calls.is_on):
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

    def __init__(self, model: nn.Module, hook_calls: Switch, report: Callable[[], None]) -> None:
        self._model, self._hook_calls, self._report = model, hook_calls, report
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
        if module is self._model and not self._hook_calls.is_on:
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
