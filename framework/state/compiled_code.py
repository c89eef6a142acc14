"""Functions of loopscope that code compiled by torch calls, without the compiler's import, which takes seconds.

The compiler has a public function for them, ``torch.compiler.disable``. It sets the attributes and the strategy of
frames that are set here.
"""

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

_frames: Any = getattr(torch._C, "_dynamo").eval_frame  # noqa: B009 - the stubs lack it


def skips_frames(function: Function) -> Function:
    """Let a function, and all functions that it calls, run as Python if compiled code calls it; return the function.

    The compiler may still trace it into the graph of a calling function.
    """
    skip = _frames._FrameAction.SKIP
    _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(skip, skip))
    return function


def skips_frame(function: Function) -> Function:
    """Let a function run as Python if compiled code calls it, but not the functions that it calls; return it."""
    actions = _frames._FrameAction
    _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(actions.SKIP, actions.DEFAULT))
    return function


compiler_of_calls: Callable[[], Any] = _frames.get_eval_frame_callback
"""Returns what compiles the functions that are called now, ``None`` if they run as Python."""


def uncompiled(function: Function) -> Function:
    """Break the graph of compiled code where it calls a function, which then runs as Python; return the function."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return skips_frames(function)


def has_compiled_code() -> bool:
    """Return whether the compiler has compiled a function whose compiled code still exists.

    Its import alone says nothing: optimizers import it too.
    """
    compiler = sys.modules.get("torch._dynamo.convert_frame")
    return compiler is not None and bool(compiler.output_codes.seen_ids)
