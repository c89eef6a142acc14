"""Callbacks on modules of a compiled model, which break its graph where they are called."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from ..state import InternalFunction
from ..training import quiet_graph_breaks
from .callbacks import ForwardCallbacks


def _uncompiled(function: Callable[..., Any]) -> Any:
    """Return a wrapper of a function that breaks the graph of a compiled model where it is called."""
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call]


@cache
def uncompiled_hook() -> type[InternalFunction]:
    """Return a class of module hooks that break the graph of a compiled model.

    It is created at first use, because this imports torch's compiler. ``__call__`` itself must be excluded from graphs:
    torch compiles a function that only calls an excluded one.
    """
    return type("UncompiledHook", (InternalFunction,), {"__call__": _uncompiled(InternalFunction.__call__)})


@contextmanager
def uncompiled_forward(module: nn.Module, callbacks: ForwardCallbacks) -> Iterator[None]:
    """Exclude a module's forward, whose graph nodes are tapped, from the graphs of a compiled model in the body.

    The forward method is replaced, because a module hook can break the graph only before and after it.
    """
    before, after = callbacks
    forward, instance_forward = module.forward, vars(module).get("forward")

    def tapped_forward(*inputs: Any, **options: Any) -> Any:
        if before is not None:
            before(module, inputs)
        output = forward(*inputs, **options)
        if after is not None:
            after(module, inputs, output)
        return output

    with quiet_graph_breaks():
        # An instance attribute hides the method of the class until it is removed.
        module.forward = _uncompiled(tapped_forward)
        try:
            yield
        finally:
            vars(module).pop("forward")
            vars(module).update({} if instance_forward is None else {"forward": instance_forward})
