"""The callbacks of an attention tap, with a check that its function changes no tensor."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn

from ..hooks import AttentionCall, AttentionTap, TapOwner
from ..state import FunctionBeforeForward, InternalFunction, skips_frames
from .attention_reader import AttentionReader
from .checked_function import is_symbolic
from .forward_calls import call_unchanged
from .passes import RunningPasses, is_training_use


class _RunningModules(threading.local):
    """The tapped modules that are running in this thread, the innermost last."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []


RUNNING = _RunningModules()


def attention_callback(owner: TapOwner, tap: AttentionTap, passes: RunningPasses) -> Callable[[AttentionCall], None]:
    """Return a function that calls the tap, with no tap active inside of it.

    It raises :class:`StateMutationError` if the tap changed a tensor.
    """

    def on_call(call: AttentionCall) -> None:
        if any(map(is_symbolic, call.tensors)):
            return
        function = partial(tap.function, call)
        call_unchanged(owner, tap, function, call.tensors, "a tensor of an attention call", passes)

    return on_call


@contextmanager
def attention_read(
    module: nn.Module, on_call: Callable[[AttentionCall], None], is_active: Callable[[], bool]
) -> Iterator[None]:
    """Read the attention calls of a module in the body, in passes of the training step.

    If the compiler makes graphs of its forward method, these read the calls.
    """
    uses: list[AbstractContextManager[Any] | None] = []  # one for each running use of the module

    def is_innermost() -> bool:
        return RUNNING.modules[-1:] == [module] and is_active()

    # A forward hook that returns a value other than None replaces the output.
    @skips_frames
    def enter(module: nn.Module, inputs: object, is_compiled: bool) -> None:
        use: AbstractContextManager[Any] | None = None
        if is_active() and is_training_use():
            use = nullcontext() if is_compiled else AttentionReader(on_call, is_innermost)
        uses.append(use)
        if use is not None:
            RUNNING.modules.append(module)
            use.__enter__()

    def leave(module: nn.Module, inputs: object, output: object) -> None:
        if uses and (use := uses.pop()) is not None:
            use.__exit__(None, None, None)
            RUNNING.modules.pop()

    hook = InternalFunction(leave)
    handles = [
        module.register_forward_pre_hook(FunctionBeforeForward(enter)),
        module.register_forward_hook(hook, always_call=True),
    ]
    # Private: torch only looks up whether the key is in this table, whose values are True (torch 2.9 to 2.15). The
    # value here marks the entry as internal, so that digests omit it as they omit the hook.
    module._forward_hooks_always_called[handles[1].id] = hook  # type: ignore[assignment]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        while uses:  # torch calls no forward hook after an interruption
            leave(module, (), None)
