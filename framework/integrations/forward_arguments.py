"""The arguments of a model's forward passes, for loops whose batches are unknown."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any
from weakref import ref

import torch
from torch import nn

from ..state import Transient

Receiver = Callable[..., None]
"""Receives the only argument of a pass, or the arguments by name, and as ``train`` whether it ran in train mode."""
_WAITING: "dict[int, tuple[ref[ForwardArguments], ...]]" = {}
"""The objects that wait for the passes of a module, by its id."""
_OBSERVED = Counter[type[nn.Module]]()
"""How many of them observe modules of a class."""


class ForwardArguments(Transient):
    """Passes the arguments of the next pass with gradients on to ``receive``, at each call of :meth:`arm`.

    ``nn.Module.__call__`` calls what a module has as ``_compiled_call_impl``, without which it calls ``_call_impl``.
    :func:`_call` has this place in the classes of the modules: a hook of a module would be in every copy and file of
    it, and any hook lets torch take 5 µs longer for a pass. The compiler looks at hooks, but not at this attribute.
    Of a module that was compiled in place, which has its compiled function there, a function calls that one.

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
        # Passes of a compiled module are those of the wrapper that torch.compile has made, which has no public name and
        # takes seconds to import.
        wrappers = [module for module in modules if type(module).__module__ == "torch._dynamo.eval_frame"]
        # These modules are alive as long as this object.
        self._modules = list({id(module): module for module in wrappers or modules}.values())
        self._receive, self._is_in_hook = receive, is_in_hook
        self._note_evaluation = note_evaluation
        self.is_armed = self._has_received = self._is_given_up = False
        self._remove: list[Callable[[], None]] | None = None
        """Restores the modules, once this object has been armed."""

    def arm(self) -> None:
        """Wait for the next pass."""
        if self._remove is None:
            self._remove = [_observe(module, self) for module in self._modules]
        self.is_armed = not self._is_given_up

    def receive_by(self, receive: Receiver) -> None:
        """Replace the receiver."""
        self._receive = receive

    def disarm(self) -> None:
        """Wait no longer."""
        self.is_armed = False

    def stop(self) -> None:
        """Wait no longer, and restore the modules."""
        self.is_armed = False
        for remove in self._remove or ():
            remove()
        self._remove = None

    def end_step(self) -> None:
        """Wait for the pass of the next step; give up if this one had none, as in a compiled function."""
        self._is_given_up = self._is_given_up or not self._has_received
        self._has_received, self.is_armed = False, not self._is_given_up

    def receive(self, batch: Any, *, train: bool) -> None:
        """Pass on the arguments of a pass that has begun before this object was armed."""
        self.is_armed = self.is_armed and not train
        self._receive(batch, train=train)
        if train:  # the pass may have ended the step before, which has armed this object
            self.is_armed = False
        self._has_received = True

    def note(self, module: nn.Module, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        """Note a pass of one of the modules."""
        if torch._C._functorch.peek_interpreter_stack() is not None or self._is_in_hook():
            return  # within torch.func, with wrapped tensors, or in a hook
        if torch.is_grad_enabled():
            # A pass in eval mode may be one of an evaluation with gradients on.
            self.receive(arguments_of(module, inputs, options), train=module.training)
        elif self._note_evaluation is not None:
            self._note_evaluation(module.training)


def _observe(module: nn.Module, waiting: ForwardArguments) -> Callable[[], None]:
    """Let an object note the passes of a module; return a function that ends it."""
    if vars(module).get("_compiled_call_impl") is not None:
        return _CompiledCall(module, waiting).remove
    key, kind, own = id(module), type(module), ref(waiting)
    _WAITING[key] = (*_WAITING.get(key, ()), own)
    _OBSERVED[kind] += 1
    if kind._compiled_call_impl is None:
        kind._compiled_call_impl = _call

    def remove() -> None:
        others = tuple(item for item in _WAITING.pop(key) if item is not own)
        if others:
            _WAITING[key] = others
        _OBSERVED[kind] -= 1
        if not _OBSERVED[kind] and vars(kind).get("_compiled_call_impl") is _call:
            del kind._compiled_call_impl

    return remove


def _call(module: Any, *inputs: Any, **options: Any) -> Any:
    """Call a module as torch does, after those that wait for its passes have noted this one."""
    if id(module) in _WAITING and not torch.compiler.is_compiling():
        for item in _WAITING[id(module)]:
            waiting = item()
            if waiting is not None and waiting.is_armed:
                waiting.note(module, inputs, options)
    return module._call_impl(*inputs, **options)


class _CompiledCall(Transient):
    """Calls the compiled function of a module that was compiled in place, after an object has noted the pass."""

    def __init__(self, module: nn.Module, waiting: ForwardArguments) -> None:
        """Take the place of the compiled function, which torch keeps in a private attribute."""
        self._module, self._waiting, self._call = module, ref(waiting), module._compiled_call_impl
        module._compiled_call_impl = self

    def remove(self) -> None:
        """Restore the compiled function, unless others have replaced it."""
        if self._module._compiled_call_impl is self:
            self._module._compiled_call_impl = self._call

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Note the arguments of a pass, and run it."""
        waiting = self._waiting()
        if waiting is not None and waiting.is_armed:
            waiting.note(self._module, inputs, options)
        assert self._call is not None
        return self._call(*inputs, **options)


def arguments_of(module: nn.Module, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Return the only argument of a pass, or its arguments by name."""
    if len(inputs) == 1 and not options:
        return inputs[0]
    try:
        module = getattr(module, "_orig_mod", module)  # of a compiled wrapper, whose forward takes any arguments
        return dict(signature(module.forward).bind(*inputs, **options).arguments)
    except (TypeError, ValueError):  # a function that is not written in Python
        return {**{str(index): value for index, value in enumerate(inputs)}, **options}
