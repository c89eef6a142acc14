"""The arguments of a model's forward passes, for loops whose batches are unknown."""

import sys
from collections.abc import Callable, Mapping, Sequence
from inspect import CO_VARKEYWORDS, signature
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ..isolation import VISITS
from ..state import InternalFunction, Transient

Receiver = Callable[..., None]
"""Receives the only argument of a pass, or the arguments by name, and as ``train`` whether it ran in train mode."""


class ForwardArguments(Transient):
    """Passes the arguments of the next pass with gradients on to ``receive``, at each call of :meth:`arm`.

    It is a hook of all modules, which the next pass in train mode removes: a hook of the model would be in every copy
    and file of it. Around a compiled module, which warns of such hooks, it is a hook of the wrapper, outside of the
    compiled region; around one that is compiled in place, a function that calls the compiled one.

    Args:
        modules: the model, and the wrapper around it that the loop calls, if any.
        receive: receives the only argument, or the arguments by name.
        is_in_hook: returns whether a hook is being called, whose passes do not count.
        note_evaluation: receives the mode of each pass without gradients.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        receive: Receiver,
        is_in_hook: Callable[[], bool],
        note_evaluation: Callable[[bool], None] | None = None,
    ) -> None:
        self._modules = modules  # which are alive as long as this object
        self._forwards = {id(module): _with_one_argument(module) for module in modules}
        self._receive, self._is_in_hook = receive, is_in_hook
        self._note_evaluation = note_evaluation
        self._handle: Any = None
        self._hooks: dict[int, Any] | None = None
        """torch's table of the hooks of all modules, once this object has been one."""
        self._key = 0  # in this table
        self._is_armed = self._has_received = self._is_given_up = False
        # OptimizedModule has no public name and takes seconds to import.
        wrappers = [module for module in modules if type(module).__module__ == "torch._dynamo.eval_frame"]
        self._wrapper = next(iter(wrappers), None)
        compiled = [module for module in modules if module._compiled_call_impl is not None and not wrappers]
        self._compiled = _CompiledCall(compiled[0], self._note_compiled) if compiled else None

    def arm(self) -> None:
        """Wait for the next pass."""
        if self._is_armed or self._is_given_up:
            return
        self._is_armed = True
        with VISITS:
            if self._hooks is not None:
                # A new handle would let the tripwire count all hooks of the model again, in every step.
                self._hooks[self._key] = self
            elif self._compiled is not None:
                self._compiled.install()
            elif self._wrapper is not None:
                hook = InternalFunction(self._note)
                self._handle = self._wrapper.register_forward_pre_hook(hook, with_kwargs=True)
            else:
                self._handle = register_module_forward_pre_hook(self)
                self._hooks, self._key = self._handle.hooks_dict_ref(), self._handle.id

    def receive_by(self, receive: Receiver) -> None:
        """Replace the receiver."""
        self._receive = receive

    def disarm(self) -> None:
        """Wait no longer."""
        is_armed, self._is_armed = self._is_armed, False
        # A compiled function stays replaced: an attribute of the model should not change in each step.
        if is_armed and self._compiled is None:
            with VISITS:
                if self._hooks is not None:
                    self._hooks.pop(self._key, None)
                else:
                    self._handle.remove()

    def stop(self) -> None:
        """Wait no longer, and leave no function around a compiled one."""
        self.disarm()
        if self._compiled is not None:
            self._compiled.remove()

    def end_step(self) -> None:
        """Wait for the pass of the next step; give up if this one had none, as in a compiled function."""
        if not self._has_received:
            self._is_given_up = True
            self.disarm()
        self._has_received = False
        self.arm()

    def receive(self, batch: Any, *, train: bool) -> None:
        """Pass on the arguments of a pass that has begun before this object was armed."""
        if train and self._is_armed:
            self.disarm()
        self._receive(batch, train=train)
        if train and self._is_armed:  # the pass has ended the step before, which has armed this object
            self.disarm()
        self._has_received = True

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Note a pass of any module."""
        if torch.compiler.is_compiling():  # without an effect in a graph; end_step removes the hook
            return
        if torch._C._functorch.peek_interpreter_stack() is not None:  # within torch.func, with wrapped tensors
            return
        if id(module) not in self._forwards:
            return
        takes_one = self._forwards[id(module)] is type(module).forward and "forward" not in vars(module)
        if takes_one and len(inputs) == 1 and torch.is_grad_enabled() and not self._is_in_hook():
            self.receive(inputs[0], train=module.training)
        else:
            # torch has no hook of all modules with keyword arguments; its Module._call_impl has them under this name.
            self._note(module, inputs, sys._getframe(1).f_locals.get("kwargs", {}))

    def _note_compiled(self, module: nn.Module, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        if self._is_armed:
            self._note(module, inputs, options)

    def _note(self, module: nn.Module, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        if self._is_in_hook():
            return
        if torch.is_grad_enabled():
            # A pass in eval mode may be one of an evaluation with gradients on.
            self.receive(arguments_of(module, inputs, options), train=module.training)
        elif self._note_evaluation is not None:
            self._note_evaluation(module.training)


class _CompiledCall(Transient):
    """Calls the compiled function of a module that was compiled in place, and ``note`` before it."""

    def __init__(self, module: nn.Module, note: Callable[..., None]) -> None:
        self._module, self._note, self._call = module, note, module._compiled_call_impl

    def install(self) -> None:
        """Replace the compiled function, which torch keeps in a private attribute."""
        self._module._compiled_call_impl = self

    def remove(self) -> None:
        """Restore the compiled function, unless others have replaced it."""
        if self._module._compiled_call_impl is self:
            self._module._compiled_call_impl = self._call

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Note the arguments of a pass, and run it."""
        self._note(self._module, inputs, options)
        assert self._call is not None
        return self._call(*inputs, **options)


def _with_one_argument(module: nn.Module) -> Any:
    """Return the forward function of a module's class if it takes one argument only, ``None`` otherwise.

    A call of it with one argument has none by name.
    """
    forward: Any = type(module).forward
    code = getattr(forward, "__code__", None)
    if code is None or hasattr(forward, "__wrapped__") or code.co_argcount != 2:
        return None
    return None if code.co_kwonlyargcount or code.co_flags & CO_VARKEYWORDS else forward


def arguments_of(module: nn.Module, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Return the only argument of a pass, or its arguments by name."""
    if len(inputs) == 1 and not options:
        return inputs[0]
    try:
        module = getattr(module, "_orig_mod", module)  # of a compiled wrapper, whose forward takes any arguments
        return dict(signature(module.forward).bind(*inputs, **options).arguments)
    except (TypeError, ValueError):  # a function that is not written in Python
        return {**{str(index): value for index, value in enumerate(inputs)}, **options}
