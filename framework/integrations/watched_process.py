"""The trainings of a process under ``loopscope watch``, to which loopscope attaches itself.

An optimizer that is created, or a Trainer that starts, is reported by ``watch_site/sitecustomize.py``. The first
training pass of a module over the parameters of an optimizer starts the scope of that training.
"""

import json
import multiprocessing
import os
import shlex
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from math import inf
from multiprocessing.util import Finalize
from pathlib import Path
from threading import get_ident
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..doctor.senses import note_environment
from ..errors import LoopscopeError, UsageError, with_lines
from ..hooks import StepSchedule
from ..isolation import VISITS, is_in_visit
from ..observing import modules_over, referred_by_callers
from ..preserved_streams import preserved_streams
from ..runs import status_of_script
from ..state import skips_frames, uncompiled
from ..training import Ranks
from .attach import attach
from .attached_loop import END_OF_PROCESS, close_open_runs, is_attached, parameters_of
from .forward_arguments import arguments_of
from .observed_optimizer import are_referred, observe_steps
from .other_modules import UnownedTensors
from .reported_numbers import numbers_of_call
from .scope import AttachedScope, Scope
from .waiting_optimizers import WaitingOptimizers

OPTIONS = "LOOPSCOPE_WATCH"
"""The environment variable with the options of ``loopscope watch``, as JSON."""
COMMAND = "LOOPSCOPE_WATCH_COMMAND"
"""The environment variable with the command, its folder and its options, as JSON; the records have them."""
AGAIN = "LOOPSCOPE_WATCH_AGAIN"
"""The environment variable of a command that is run again, as JSON: the number of the training that is repeated, the
options of its attach, and the file for the reason if that is refused."""
STARTED = "LOOPSCOPE_WATCH_STARTED"
"""The environment variable with the file to which every process that has attached writes."""
ALONE = "LOOPSCOPE_WATCH_ALONE"
"""Set if ranks that a model does not show are attached one by one, as in ``loopscope check``."""
ALTERNATING = 10
"""Steps of a training after which a step of another optimizer over its parameters ends it."""


class WatchedProcess:
    """The trainings of this process, and the optimizers whose training has not begun."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._waiting = WaitingOptimizers()
        self._origin: dict[str, Any] = json.loads(os.environ[COMMAND])
        self._again: dict[str, Any] = json.loads(os.environ.get(AGAIN, "{}"))
        self._created: WeakKeyDictionary[Optimizer, float] = WeakKeyDictionary()
        """The number of trainings that had begun when an optimizer was created; infinite for one that continues."""
        self._rivals: WeakSet[Optimizer] = WeakSet()
        """Optimizers with a record whose first step may end another training over the same parameters."""
        self._unrelated: WeakSet[nn.Module] = WeakSet()
        """Modules over no parameter of a waiting optimizer."""
        self._copied: WeakKeyDictionary[nn.Module, Optimizer] = WeakKeyDictionary()
        """The optimizers that train copies of a module's weights, up to its next pass."""
        self._pass_handles: list[Any] = []
        self._step_handles: list[Any] = []
        self._begun = 0
        self._is_left = False
        """Whether it was reported that the script attaches loopscope itself."""
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
        """Attach to the training of an optimizer when it begins; a hook's own trains nothing that counts."""
        if is_in_visit():
            return
        self._waiting.add(optimizer)
        self._created.setdefault(optimizer, self._begun)
        self._unrelated.clear()
        self._listen()

    def _listen(self) -> None:
        """Notice the passes of all modules and the steps of all optimizers while a training may begin with one."""
        with VISITS:
            if self._waiting.wait_for_passes and not self._pass_handles:
                # torch warns of such hooks at every call of a compiled module, and knows of no other effect here.
                warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks")
                self._pass_handles = [register_module_forward_pre_hook(self._on_pass)]
            if self._waiting.wait_for_steps and not self._step_handles:
                self._step_handles = [
                    register_optimizer_step_pre_hook(self._before_step),
                    register_optimizer_step_post_hook(self._on_step),
                ]

    def _stop_listening(self) -> None:
        """Notice what no training may begin with no longer; not called in a step, since torch iterates over hooks."""
        with VISITS:
            if not self._waiting.wait_for_passes:
                while self._pass_handles:
                    self._pass_handles.pop().remove()
            if not self._waiting.wait_for_steps and not self._rivals:
                while self._step_handles:
                    self._step_handles.pop().remove()

    @skips_frames  # around a module that was compiled in place
    def _on_pass(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Attach at the first training pass of a module; torch calls this before every pass of any module."""
        if torch.compiler.is_compiling():  # first, so that the compiler finds nothing else here
            return
        if module.training and module not in self._unrelated and torch.is_grad_enabled():
            try:
                self._begin_at_pass(module, inputs, sys._getframe(1).f_locals.get("kwargs", {}))
            except Exception as error:
                self._give_up(error)

    def _begin_at_pass(self, module: nn.Module, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        target = module
        if module in self._copied:
            optimizers = [self._copied.pop(module)]
            copies = parameters_of(optimizers[0])
            target = nn.ModuleList([module, *(modules_over(copies) or [UnownedTensors(copies)])])
            self._waiting.discard(optimizers[0])
        else:
            optimizers = self._waiting.begin_at_pass(parameters)
        if any(map(self._waiting.is_delayed, optimizers)):
            self._end_earlier(min(self._created.get(one, 0) for one in optimizers))
            optimizers = []
        if not optimizers:
            self._unrelated.add(module)
            return
        scope = self._attach(target, optimizers)
        self._stop_listening()
        if scope is not None and target is not module:
            scope.loop.copied = parameters
        if scope is not None and scope.loop.arguments is not None:
            scope.loop.arguments.receive(arguments_of(module, inputs, options), train=True)

    @uncompiled  # in a compiled step
    def _before_step(self, optimizer: Optimizer, inputs: Any, options: Any) -> None:
        """Attach before the first step of an optimizer whose closure runs the first training pass."""
        try:
            self._begin_before_step(optimizer, any(item is not None for item in (*inputs[1:], *options.values())))
        except Exception as error:
            self._give_up(error)

    def _begin_before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        if optimizer in self._rivals:
            self._rivals.discard(optimizer)
            if has_closure and not self._has_new_gradients(optimizer):
                # The open step is the last one of the other optimizer, with the same passes.
                for scope in self._scopes:
                    if isinstance(scope, Scope) and any(item is optimizer for item in scope.optimizers):
                        scope.loop.drop_step()
            self._end_replaced_by(optimizer)
        if optimizer not in self._waiting or self._waiting.is_delayed(optimizer):
            return
        if (module := self._copied_by(optimizer)) is not None:
            self._copied[module] = optimizer
            self._unrelated.discard(module)
        if has_closure and not self._has_new_gradients(optimizer):
            self._attach_at_step(optimizer, 0)

    def _has_new_gradients(self, optimizer: Optimizer) -> bool:
        """Return whether gradients wait for a step, unless another optimizer of a record has used them."""
        sharing = self._sharing(optimizer)
        if sharing and not any(scope.loop.is_in_step() for scope in sharing):
            return False
        return any(item.grad is not None for item in parameters_of(optimizer))

    @uncompiled
    def _on_step(self, optimizer: Optimizer, inputs: Any, options: Any) -> None:
        """Attach after the first step of an optimizer whose training pass was not seen."""
        try:
            if any(item is optimizer for item in self._copied.values()):
                return
            if optimizer in self._waiting and (steps := self._waiting.begin_at_step(optimizer)):
                self._attach_at_step(optimizer, steps)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Report an error of loopscope, which must not reach the script, and begin no more trainings."""
        self._waiting = WaitingOptimizers()
        sys.stderr.write(
            f"loopscope watch: {with_lines(error)}. Trainings that begin later continue without loopscope.\n"
        )

    def _attach_at_step(self, optimizer: Optimizer, steps: int) -> None:
        """Attach before the next step of an optimizer, which has made some ``steps``."""
        self._waiting.discard(optimizer)
        if is_attached(optimizer):
            self._leave_to_script()
            return
        if ALONE in os.environ and all(item.grad is None for item in parameters_of(optimizer)):
            self._check_lost(optimizer)
        parameters = parameters_of(optimizer)
        modules = modules_over(parameters)
        if not modules and ALONE in os.environ:  # laws need no pass of a module
            modules = [UnownedTensors(parameters)]
        if modules:
            self._end_replaced_by(optimizer)
            scope = self._attach(modules[0] if len(modules) == 1 else nn.ModuleList(modules), [optimizer])
            if scope is not None:
                scope.loop.begin_at(0, steps, steps)

    def _copied_by(self, optimizer: Optimizer) -> nn.Module | None:
        """Return the module whose weights those of an optimizer are copies of, before its first step.

        Of a module in bfloat16, an optimizer may train a copy in float32, to which the script gives the gradients.
        """
        copies = parameters_of(optimizer)
        if ALONE not in os.environ or any(item.grad is None for item in copies):
            return None
        for module in self._unrelated:
            own = [item for item in module.parameters() if item.requires_grad]
            if len(own) == len(copies) and all(map(_is_rounded, own, copies)):
                return module
        return None

    def _check_lost(self, optimizer: Optimizer) -> None:
        """End ``loopscope check`` if modules that no optimizer trains get the gradients of the training.

        Raises:
            SystemExit: unless the command continues after the check.
        """
        from ..laws import report_lost_optimizer

        with_gradients = [item for one in self._unrelated for item in one.parameters() if item.grad is not None]
        modules = modules_over(with_gradients) if with_gradients else []
        options = self._options.get("hook_options", {}).get("laws", {})
        if report_lost_optimizer(modules, options, self._options["out"]) and not options.get("continues"):
            raise SystemExit(0)

    def _sharing(self, optimizer: Optimizer) -> list[Scope]:
        """Return the open trainings of other optimizers over some of the parameters."""
        own = {id(item) for item in parameters_of(optimizer)}
        return [
            scope
            for scope in self._scopes
            if isinstance(scope, Scope)
            and not scope.is_closed
            and not any(item is optimizer for item in scope.optimizers)
            and any(id(item) in own for one in scope.optimizers for item in parameters_of(one))
        ]

    def _end_replaced_by(self, optimizer: Optimizer) -> None:
        """End trainings of other optimizers over the same parameters, unless they alternate with this one.

        One that makes a step nevertheless has a second record, and is not ended again.
        """
        for scope in self._sharing(optimizer):
            before, _ = self._scopes[scope]
            if before < inf and scope.steps >= ALTERNATING:
                scope.loop.drop_step()
                self._end(scope)
                for item in scope.optimizers:
                    self._waiting.add_for_step(item)

    def _attach(self, module: nn.Module, optimizers: list[Optimizer]) -> Scope | None:
        """Return the scope of a training; if attaching fails, report it, and let the training continue."""
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
                scope = self._attached(target, optimizers)
        except Exception as error:
            self._refused(error)
            return None
        assert isinstance(scope, Scope)
        sharing = [one for item in optimizers for one in self._sharing(item)]
        if sharing:
            unused = [item for one in sharing if not one.steps for item in one.optimizers]
            self._rivals.update([*optimizers, *unused])
        self._began(scope, max(created))
        scope.loop.isolate_failures()
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
            if are_referred(optimizers, referred):
                continue
            self._end(scope)
            for item in optimizers:
                self.wait_for(item)

    def _end(self, scope: Scope) -> None:
        """End the record of a training; if it continues, it has a second one, which is not ended early."""
        del self._scopes[scope]
        self._waiting.note_end(scope.optimizers, scope.steps)
        close_open_runs("completed", None, scope.is_of)
        for item in scope.optimizers:
            self._created[item] = inf

    def attach_to(self, trainer: Any) -> None:
        """Attach to a Trainer that starts to train, unless the script has done so."""
        if getattr(trainer, "_loopscope_is_watched", False):
            return
        trainer._loopscope_is_watched = True
        if any(map(_is_of_loopscope, getattr(trainer, "callback_handler", trainer).callbacks)):
            self._leave_to_script()
            return
        try:
            with preserved_streams():
                scope = attach(trainer, **self._arguments(), isolate_evaluation=False)
        except Exception as error:
            self._refused(error)
            return
        self._began(scope)

    def _attached(self, target: nn.Module, optimizers: list[Optimizer]) -> AttachedScope:
        """Attach to a training; in ``loopscope check`` to each rank alone if the model does not show the ranks."""
        options = self._arguments()
        if ALONE not in os.environ or not dist.is_available() or not dist.is_initialized():
            return attach(target, optimizers, **options)
        try:
            return attach(target, optimizers, **options)
        except UsageError:
            number = dist.get_rank()
            out = options["out"] if not number else f"{options['out']}-{number}"
            return attach(target, optimizers, **{**options, "out": out}, ranks=Ranks())

    def _arguments(self) -> dict[str, Any]:
        """Return the options of attach, with the command for the record; further trainings have numbered folders."""
        options = {**self._options, "config": {"command": shlex.join(self._origin["command"])}}
        if self._is_repeated:
            options |= self._again["options"]
            schedules = options["schedules"].items()
            return options | {
                "schedules": {
                    name: StepSchedule(**fields | {"also": tuple(fields["also"])}) for name, fields in schedules
                }
            }
        out = options.get("out")
        return options if out is None or not self._begun else {**options, "out": str(Path(f"{out}-{self._begun + 1}"))}

    @property
    def _is_repeated(self) -> bool:
        """Whether the next training is the one for whose sake the command is run again."""
        return self._again.get("training") == self._begun + 1

    def _refused(self, error: Exception) -> None:
        """Report a training to which loopscope cannot attach, and end a command that is run again for its sake."""
        if self._is_repeated:
            Path(self._again["refusal"]).write_text(str(error), "utf-8")
            raise SystemExit(2) from error
        reason = str(error) if isinstance(error, LoopscopeError) else f"{with_lines(error)}."
        self._report_unwatched(f"{reason} This training continues without loopscope.")

    def _leave_to_script(self) -> None:
        """Report once that the script attaches loopscope itself, unless other trainings are attached here."""
        if not self._begun and not self._is_left:
            self._is_left = True
            self._report_unwatched("the script attaches loopscope itself, so watch adds no record.")

    def _report_unwatched(self, sentence: str) -> None:
        sys.stderr.write(f"loopscope watch: {sentence}\n")
        _note_training("\n")

    def _began(self, scope: AttachedScope, created: float = 0) -> None:
        scope.note_origin({"watch": self._origin | {"training": self._begun + 1}})
        self._scopes[scope] = (created if created == inf else self._begun), get_ident()
        self._begun += 1
        _note_training(f"{os.getpid()}\n")

    def report(self, numbers: Mapping[str, Any]) -> None:
        """Record numbers that the script gives to its logger, unless a hook or a sink of loopscope does."""
        for scope in self._scopes:
            if isinstance(scope, Scope) and not scope.loop.is_in_hook:
                scope.log(numbers)

    def _status(self) -> tuple[str, BaseException | None]:
        """Return the status of the trainings at the end of the process, and the error that has ended it, if any."""
        return status_of_script(self._error), self._error


def _is_rounded(parameter: torch.Tensor, copy: torch.Tensor) -> bool:
    """Return whether a parameter with a gradient is a copy of another one, rounded to its type."""
    if parameter.grad is None or parameter.shape != copy.shape or parameter.device != copy.device:
        return False
    return torch.equal(copy.detach().to(parameter.dtype), parameter.detach())


def _is_of_loopscope(callback: Any) -> bool:
    """Return whether a callback of a Trainer is ``loopscope.Callback``, or one that ``loopscope.attach`` has added."""
    return any(kind.__module__.startswith("loopscope.") for kind in type(callback).__mro__)


def _note_training(line: str) -> None:
    """Note that a training was seen, with the number of the process if it has a record."""
    if STARTED in os.environ:
        # The file belongs to the user who has started the command.
        with suppress(OSError), open(os.environ[STARTED], "a", encoding="utf-8") as file:
            file.write(line)


_PROCESS: list[WatchedProcess] = []


def _process() -> WatchedProcess:
    if not _PROCESS:
        _PROCESS.append(WatchedProcess(json.loads(os.environ[OPTIONS])))
    return _PROCESS[0]


def on_optimizer(optimizer: Optimizer) -> None:
    """Note an optimizer that the script has created."""
    _process().wait_for(optimizer)


def on_other_optimizer(optimizer: Any) -> None:
    """Note an optimizer of another library, which laws, that repeat steps, cannot be tried with."""
    if ALONE not in os.environ and not is_in_visit():
        observe_steps(optimizer)


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


def on_environment(name: str, environment: Any, result: Any) -> None:
    """Note the result of ``reset`` or ``step`` of an environment."""
    note_environment(name, environment, result)


os.register_at_fork(after_in_child=_PROCESS.clear)
