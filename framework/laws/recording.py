"""Installation of a recorder: the hooks of torch that report passes, backward passes and updates to it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.loss import _Loss
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..isolation import VISITS, current_pass
from ..observing import PassiveListener, listen, stop_listening
from ..state import RandomStreams, Transient
from .recorded_step import RecordedStep, StepRecorder
from .values import has_parameters


class Recording(PassiveListener, Transient):
    """Records the micro-batches of the steps of a model in which :meth:`recording` is entered."""

    def __init__(self, streams: RandomStreams) -> None:
        self._streams = streams
        self._recorder = StepRecorder()
        self._model = nn.Module()
        self._modules: set[int] = set()
        """The ids of the modules whose outermost calls are passes: a loop may call parts of the model alone."""
        self._is_active: Callable[[], bool] = bool
        self._is_updated = False
        self.weights: list[Tensor] = []
        """The weights of a model that is no module, whose calls are recorded from one update to the next."""

    @property
    def steps(self) -> list[RecordedStep]:
        """The micro-batches of the step so far."""
        return self._recorder.steps

    def leave(self) -> None:
        """End the recording of calls, after the backward pass."""
        if self.weights:
            self._recorder.forget()
        self._recorder.leave()

    def clear(self) -> None:
        """Drop the micro-batches of the step."""
        self._recorder.steps = []

    @contextmanager
    def recording(self, model: nn.Module, is_active: Callable[[], bool]) -> Iterator[None]:
        """Record the passes of a model in the body, while ``is_active`` returns ``True``."""
        self._model = model
        self._modules = {id(item) for item in model.modules() if _computes(item)}
        self._is_active = self._recorder.is_active = is_active
        self.weights = [*model.parameters()] if is_function(model) else []
        self._recorder.note_streams(self._streams.save())  # the pass may have begun, which brought this call about
        registrations = (
            partial(register_module_forward_pre_hook, self._before_pass),
            partial(register_module_forward_hook, self._after_pass, with_kwargs=True),
            partial(register_optimizer_step_pre_hook, self._before_update),
            partial(register_optimizer_step_post_hook, self._after_update),
        )
        with registered(*registrations, listener=self):
            try:
                yield
            finally:
                self._recorder.stop()

    def _counts(self, module: nn.Module) -> bool:
        is_ours = id(module) in self._modules and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        return is_ours and self.thread in (None, get_ident()) and self._is_active()

    def _before_pass(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if current_pass() != -1:  # which activation checkpointing repeats, and perhaps does not end
            return
        if self._counts(module):
            if self._is_updated:  # the newest recorded steps are those of the update before
                self.clear()
                self._is_updated = False
            self._recorder.begin_pass(self._streams.save())
        elif has_parameters(module):
            self._recorder.foreign_depth += 1

    def _after_pass(self, module: nn.Module, inputs: tuple[Any, ...], options: Mapping[str, Any], output: Any) -> None:
        if current_pass() != -1:
            return
        if self._counts(module):
            self.thread = get_ident()
            self._recorder.end_pass(module, inputs, options, output, is_whole=module is self._model)
        elif has_parameters(module):
            self._recorder.foreign_depth = max(0, self._recorder.foreign_depth - 1)

    def _before_update(self, *_: Any) -> None:
        self.leave()
        self._is_updated = True

    def _after_update(self, *_: Any) -> None:
        if self.weights:
            self.clear()
            self.after_backward(())

    def after_backward(self, roots: Sequence[Tensor]) -> None:
        """Begin the next micro-batch of a model that is no module."""
        if self.weights and self._is_active():
            self._recorder.begin_calls(self.weights, self._streams.save())

    def before_backward(self, roots: Sequence[Tensor]) -> None:
        """End a micro-batch."""
        if self._is_active():
            self._recorder.end_step(roots)

    def on_gradients_used(self, gradients: Sequence[Tensor]) -> None:
        """End the recording of calls."""
        self.leave()


@contextmanager
def registered(*registrations: Callable[[], Any], listener: PassiveListener | None = None) -> Iterator[None]:
    """Call functions that return handles of hooks, and tell a listener, for the body; this is no change by a hook."""
    with VISITS:
        handles = [register() for register in registrations]
        if listener is not None:
            listen(listener)
    try:
        yield
    finally:
        if listener is not None:
            stop_listening(listener)
        with VISITS:
            for handle in handles:
                handle.remove()
                # torch leaves this entry, because of which it warns at calls of compiled modules.
                _global_forward_hooks_with_kwargs.pop(getattr(handle, "id", -1), None)


def is_function(model: nn.Module) -> bool:
    """Return whether a model has weights alone, which functions of the script use."""
    return type(model).forward is nn.Module.forward and next(model.children(), None) is None


def _computes(module: nn.Module) -> bool:
    """Return whether calls of a module are passes; those of losses and activations are calls of functions."""
    if isinstance(module, _Loss):
        return False
    has_state = has_parameters(module) or any(True for _ in module.buffers())
    return has_state or isinstance(module, _DropoutNd)  # which replays call in eval mode
