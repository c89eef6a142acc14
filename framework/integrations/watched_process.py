"""The trainings of a process under ``loopscope watch``, to which loopscope attaches itself.

An optimizer that is created, or a Trainer that starts, is reported by ``watch_site/sitecustomize.py``. The first
training pass of a module over the parameters of an optimizer starts the scope of that training.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..isolation import VISITS
from ..observing import modules_over, optimizers_over
from ..preserved_streams import preserved_streams
from ..runs import status_after
from .attach import attach
from .attached_loop import END_OF_PROCESS, is_attached
from .forward_arguments import arguments_of
from .reported_numbers import numbers_of_call
from .scope import AttachedScope, Scope

OPTIONS = "LOOPSCOPE_WATCH"
"""The environment variable with the options of ``loopscope watch``, as JSON."""
STARTED = "LOOPSCOPE_WATCH_STARTED"
"""The environment variable with the file to which every process that has attached writes."""


class WatchedProcess:
    """The trainings of this process, and the optimizers whose training has not begun."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._waiting: WeakSet[Optimizer] = WeakSet()
        self._unrelated: WeakSet[nn.Module] = WeakSet()
        """Modules over no parameter of a waiting optimizer."""
        self._handles: list[Any] = []
        self._scopes: list[AttachedScope] = []
        self._error: BaseException | None = None
        self._excepthook = sys.excepthook
        sys.excepthook = self._note_error
        END_OF_PROCESS[:] = [self._status]

    def _note_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._error = error
        self._excepthook(kind, error, trace)

    def wait_for(self, optimizer: Optimizer) -> None:
        """Attach to the training of an optimizer when it begins."""
        self._waiting.add(optimizer)
        self._unrelated.clear()
        if not self._handles:
            with VISITS:
                self._handles = [
                    register_module_forward_pre_hook(self._on_pass),
                    register_optimizer_step_post_hook(self._on_step),
                ]

    def _stop_waiting(self) -> None:
        with VISITS:
            for handle in self._handles:
                handle.remove()
        self._handles = []

    def _on_pass(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Attach at the first training pass of a module; torch calls this before every pass of any module."""
        if not module.training or module in self._unrelated or not torch.is_grad_enabled():
            return
        if torch.compiler.is_compiling():
            return
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        optimizers = self._waiting_over(parameters)
        if not optimizers:
            self._unrelated.add(module)
            return
        scope = self._attach(module, optimizers)
        if scope is not None and scope.arguments is not None:
            options = sys._getframe(1).f_locals.get("kwargs", {})
            scope.arguments.receive(arguments_of(module, inputs, options), train=True)

    def _on_step(self, optimizer: Optimizer, inputs: Any, options: Any) -> None:
        """Attach after the first step of an optimizer whose training pass was not seen."""
        if optimizer in self._waiting:
            parameters = [item for group in optimizer.param_groups for item in group["params"]]
            modules = modules_over(parameters)
            if modules:
                self._attach(modules[0] if len(modules) == 1 else nn.ModuleList(modules), [optimizer])
            self._waiting.discard(optimizer)

    def _waiting_over(self, parameters: list[Any]) -> list[Optimizer]:
        """Return the optimizers over the parameters, if their trainings wait, and stop waiting for them."""
        own = {id(parameter) for parameter in parameters}
        if not any(id(item) in own for one in self._waiting for group in one.param_groups for item in group["params"]):
            return []
        found = [item for item in optimizers_over(parameters) if item in self._waiting and not is_attached(item)]
        for item in [*self._waiting]:
            if any(id(one) in own for group in item.param_groups for one in group["params"]):
                self._waiting.discard(item)
        return found

    def _attach(self, module: nn.Module, optimizers: list[Optimizer]) -> Scope | None:
        """Return the scope of a training; if attaching fails, report it, and let the training continue."""
        if not self._waiting:
            self._stop_waiting()
        own = {id(parameter) for parameter in module.parameters()}
        others = [p for one in optimizers for group in one.param_groups for p in group["params"] if id(p) not in own]
        try:
            target: nn.Module = module
            if others:  # parts that are called one by one, such as encoder and decoder
                target = nn.ModuleList([module, *modules_over(others)])
            with preserved_streams():
                scope = attach(target, optimizers, **self._arguments())
        except Exception as error:
            sys.stderr.write(f"loopscope watch: {error} This training continues without loopscope.\n")
            return None
        self._began(scope)
        return scope  # type: ignore[return-value]

    def attach_to(self, trainer: Any) -> None:
        """Attach to a Trainer that starts to train, unless the script has done so."""
        if getattr(trainer, "_loopscope_is_watched", False):
            return
        trainer._loopscope_is_watched = True
        with preserved_streams():
            self._began(attach(trainer, **self._arguments()))

    def _arguments(self) -> dict[str, Any]:
        """Return the options of attach; further trainings of a named folder have numbered ones next to it."""
        out = self._options.get("out")
        if out is None or not self._scopes:
            return dict(self._options)
        return {**self._options, "out": str(Path(f"{out}-{len(self._scopes) + 1}"))}

    def _began(self, scope: AttachedScope) -> None:
        self._scopes.append(scope)
        if STARTED in os.environ:
            with open(os.environ[STARTED], "a", encoding="utf-8") as file:
                file.write(f"{os.getpid()}\n")

    def report(self, numbers: Mapping[str, Any]) -> None:
        """Record numbers that the script gives to its logger, unless a hook or a sink of loopscope does."""
        for scope in self._scopes:
            if isinstance(scope, Scope) and not scope.is_in_hook:
                scope.log(numbers)

    def _status(self) -> tuple[str, BaseException | None]:
        """Return the status of the trainings at the end of the process, and the error that has ended it, if any."""
        return status_after(self._error), self._error


_PROCESS: list[WatchedProcess] = []


def _process() -> WatchedProcess:
    if not _PROCESS:
        _PROCESS.append(WatchedProcess(json.loads(os.environ[OPTIONS])))
    return _PROCESS[0]


def on_optimizer(optimizer: Optimizer) -> None:
    """Note an optimizer that the script has created."""
    _process().wait_for(optimizer)


def on_trainer(trainer: Any) -> None:
    """Attach to a Trainer whose training starts."""
    _process().attach_to(trainer)


def on_report(kind: str, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Record numbers that a logger receives; ``inputs`` are those of its function."""
    if _PROCESS:
        is_method = "wandb_run" in kind or "tensorboard" in kind
        _PROCESS[0].report(numbers_of_call(kind, inputs[is_method:], options))


os.register_at_fork(after_in_child=_PROCESS.clear)
