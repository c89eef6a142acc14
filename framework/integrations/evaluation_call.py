"""The first call of a model after the data of an epoch, which is probably its evaluation."""

from typing import Any, Protocol

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
