"""The trainings of a process under ``loopscope watch``, to which loopscope attaches itself.

An optimizer that is created, or a Trainer that starts, is reported by ``watch_site/sitecustomize.py``. The first
training pass of a module over the parameters of an optimizer starts the scope of that training.
"""

import json
import multiprocessing
import os
import shlex
import sys
from collections.abc import Mapping
from math import inf
from multiprocessing.util import Finalize
from pathlib import Path
from threading import get_ident
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..isolation import VISITS
from ..observing import modules_over, optimizers_over, referred_by_callers
from ..preserved_streams import preserved_streams
from ..runs import status_of_script
from .attach import attach
from .attached_loop import END_OF_PROCESS, close_open_runs, is_attached, parameters_of
from .forward_arguments import arguments_of
from .reported_numbers import numbers_of_call
from .scope import AttachedScope, Scope

OPTIONS = "LOOPSCOPE_WATCH"
"""The environment variable with the options of ``loopscope watch``, as JSON."""
COMMAND = "LOOPSCOPE_WATCH_COMMAND"
"""The environment variable with the words of the command, as JSON."""
STARTED = "LOOPSCOPE_WATCH_STARTED"
"""The environment variable with the file to which every process that has attached writes."""


class WatchedProcess:
    """The trainings of this process, and the optimizers whose training has not begun."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._waiting: WeakSet[Optimizer] = WeakSet()
        self._created: WeakKeyDictionary[Optimizer, float] = WeakKeyDictionary()
        """The number of trainings that had begun when an optimizer was created; infinite for one that continues."""
        self._unrelated: WeakSet[nn.Module] = WeakSet()
        """Modules over no parameter of a waiting optimizer."""
        self._handles: list[Any] = []
        self._begun = 0
        self._scopes: dict[AttachedScope, tuple[float, int]] = {}
        """The trainings that have not ended, with the number of those before them, and their threads."""
        self._error: BaseException | None = None
        self._excepthook = sys.excepthook
        sys.excepthook = self._note_error
        END_OF_PROCESS[:] = [self._status]
        if multiprocessing.parent_process() is not None:
            Finalize(None, end_runs, exitpriority=0)  # such a process does not call atexit

    def _note_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._error = error
        self._excepthook(kind, error, trace)

    def wait_for(self, optimizer: Optimizer) -> None:
        """Attach to the training of an optimizer when it begins."""
        self._waiting.add(optimizer)
        self._created.setdefault(optimizer, self._begun)
        self._unrelated.clear()
        if not self._handles:
            with VISITS:
                self._handles = [
                    register_module_forward_pre_hook(self._on_pass),
                    register_optimizer_step_pre_hook(self._before_step),
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

    def _before_step(self, optimizer: Optimizer, inputs: Any, options: Any) -> None:
        """Attach before the first step of an optimizer whose closure runs the first training pass."""
        has_gradients = any(item.grad is not None for item in parameters_of(optimizer))
        if not has_gradients and any(item is not None for item in (*inputs[1:], *options.values())):
            self._on_step(optimizer, inputs, options)

    def _on_step(self, optimizer: Optimizer, inputs: Any, options: Any) -> None:
        """Attach after the first step of an optimizer whose training pass was not seen."""
        if optimizer in self._waiting:
            modules = [] if is_attached(optimizer) else modules_over(parameters_of(optimizer))
            if modules:
                self._attach(modules[0] if len(modules) == 1 else nn.ModuleList(modules), [optimizer])
            self._waiting.discard(optimizer)

    def _waiting_over(self, parameters: list[Any]) -> list[Optimizer]:
        """Return the optimizers over the parameters, if their trainings wait, and stop waiting for them."""
        own = {id(parameter) for parameter in parameters}
        if not any(id(item) in own for one in self._waiting for item in parameters_of(one)):
            return []
        found = [item for item in optimizers_over(parameters) if item in self._waiting and not is_attached(item)]
        for item in [*self._waiting]:
            if any(id(one) in own for one in parameters_of(item)):
                self._waiting.discard(item)
        return found

    def _attach(self, module: nn.Module, optimizers: list[Optimizer]) -> Scope | None:
        """Return the scope of a training; if attaching fails, report it, and let the training continue."""
        if not self._waiting:
            self._stop_waiting()
        created = [self._created.get(one, 0) for one in optimizers]
        self._end_earlier(min(created))
        own = {id(parameter) for parameter in module.parameters()}
        others = [item for one in optimizers for item in parameters_of(one) if id(item) not in own]
        try:
            target: nn.Module = module
            # Parts may be called one by one, such as encoder and decoder, or within a checkpointed model.
            if others:
                found = modules_over([*module.parameters(), *others])
                target = found[0] if len(found) == 1 else nn.ModuleList(found)
            with preserved_streams():
                scope = attach(target, optimizers, **self._arguments())
        except Exception as error:
            sys.stderr.write(f"loopscope watch: {error} This training continues without loopscope.\n")
            return None
        self._began(scope, max(created))
        assert isinstance(scope, Scope)
        scope.isolate_failures()
        return scope

    def _end_earlier(self, created: float) -> None:
        """End trainings whose optimizers the script has given up, so that their models do not stay in memory.

        They are those of this thread that began before the new optimizers were created, and whose own optimizer no
        calling function refers to. One that continues nevertheless has a second record, and is not ended again.
        """
        earlier = [
            scope
            for scope, (before, thread) in self._scopes.items()
            if before < created < inf and thread == get_ident() and isinstance(scope, Scope)
        ]
        referred = referred_by_callers() if earlier else set()
        for scope in earlier:
            optimizers = scope.optimizers
            if any(id(item) in referred for item in optimizers):
                continue
            del self._scopes[scope]
            close_open_runs("completed", None, scope.is_of)
            for item in optimizers:
                self._created[item] = inf
                self.wait_for(item)

    def attach_to(self, trainer: Any) -> None:
        """Attach to a Trainer that starts to train, unless the script has done so."""
        if getattr(trainer, "_loopscope_is_watched", False):
            return
        trainer._loopscope_is_watched = True
        with preserved_streams():
            self._began(attach(trainer, **self._arguments(), isolate_evaluation=False))

    def _arguments(self) -> dict[str, Any]:
        """Return the options of attach, with the command for the record; further trainings have numbered folders."""
        command = json.loads(os.environ.get(COMMAND, "[]"))
        options = {**self._options, "config": {"command": shlex.join(command)}}
        out = options.get("out")
        return options if out is None or not self._begun else {**options, "out": str(Path(f"{out}-{self._begun + 1}"))}

    def _began(self, scope: AttachedScope, created: float = 0) -> None:
        self._scopes[scope] = (created if created == inf else self._begun), get_ident()
        self._begun += 1
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
        return status_of_script(self._error), self._error


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


def end_runs() -> None:
    """End the open runs, with the error that is being handled, if any."""
    error = sys.exc_info()[1]
    close_open_runs(status_of_script(error), error)


def on_group_end(*_: Any) -> None:
    """End the runs of several ranks, which exchange data, before the script destroys the process group."""
    if _PROCESS:
        error = sys.exc_info()[1]
        close_open_runs(status_of_script(error), error, lambda attached: attached.ranks.are_many)


def on_report(kind: str, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Record numbers that a logger receives; ``inputs`` are those of its function."""
    if _PROCESS:
        is_method = "wandb_run" in kind or "tensorboard" in kind
        _PROCESS[0].report(numbers_of_call(kind, inputs[is_method:], options))


os.register_at_fork(after_in_child=_PROCESS.clear)
