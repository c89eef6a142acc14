"""Compiles the arithmetic of casts where a compiler exists; elsewhere, and for small tensors, it runs as it is."""

import inspect
import itertools
import os
import threading
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ...state import entered_modes

SWITCH = "LOOPSCOPE_COMPILE_CASTS"  # environment variable; 0 lets nothing be compiled
SMALLEST = 2**12  # elements from which a compiled call is faster than several uncompiled operations
PATIENCE = 2**28
"""Elements that go through an uncompiled function in about the time that compiling it takes, some seconds."""
LARGEST = 2**31 - 1  # elements that 32-bit counts can tell
VARIANTS = 32  # modes of torch (autocast, threads, determinism...) for which one function may be compiled anew

LIMITS: dict[str, Any] = (
    {"recompile_limit": VARIANTS} if "recompile_limit" in inspect.signature(torch.compile).parameters else {}
)
"""torch before 2.10 has one limit for all functions, of 8; what goes beyond it runs uncompiled, with the same bits."""

Function = Callable[..., Any]
SAME_BITS: dict[str, str | int | bool | Function] = {
    "cpp.enable_floating_point_contract_flag": "off",
    "cpp.enable_unsafe_math_opt_flag": False,
    "emulate_precision_casts": True,
}


class Compiler:
    """Functions on tensors in their compiled form, by what they were compiled for.

    A function's first argument is a tensor in blocks (n, b), in chunks of them or flat (n). From call to call tensors
    may differ in n; the rest is compiled in, and must be hashable. Compiled and uncompiled results have the same bits:
    both are IEEE arithmetic on each element, in operations that are the same or exact, and maxima. (Sums of real
    numbers may differ after six digits.) So it does not matter when a function is compiled, which is once calls with
    arguments of its kind have gone through as many elements as take longer than compiling does: short runs compile
    nothing.
    """

    def __init__(self, patience: int = PATIENCE) -> None:
        self.patience = patience
        self._seen: dict[Hashable, int] = {}
        self._made: dict[Hashable, Function | None] = {}
        self._lock = threading.Lock()

    def run(self, function: Function, *arguments: Any) -> Any:
        """Return ``function(*arguments)``, compiled where that is possible and pays."""
        found = self.attempt(function, *arguments)
        return function(*arguments) if found is None else found

    def attempt(self, function: Function, *arguments: Any) -> Any:
        """Return ``function(*arguments)`` in its compiled form, or ``None`` where it is to run as it is."""
        if not suits(arguments[0]):
            return None
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        kinds = [(each.dtype, each.ndim, each.shape[1:]) if isinstance(each, Tensor) else each for each in arguments]
        key = (function, *kinds)
        made = self._made[key] if key in self._made else self._make(key, function, arguments)
        if made is None:
            return None
        try:
            with torch.no_grad():
                return made(*[tensor.detach() for tensor in tensors])
        except Exception:  # a limit of the compiler's: there may be too many variants, or compiling is forbidden now
            return None

    def _make(self, key: Hashable, function: Function, arguments: tuple[Any, ...]) -> Function | None:
        with self._lock:
            if key not in self._made:
                self._seen[key] = self._seen.get(key, 0) + int(arguments[0].numel())
                if self._seen[key] <= self.patience:
                    return None
                self._made[key] = _compiled(function, arguments)
        return self._made[key]


def suits(blocks: Tensor) -> bool:
    """Return whether the compiled arithmetic pays for a tensor, and is known to be right for it."""
    return (
        SMALLEST <= blocks.numel() <= LARGEST
        and len(blocks) > 1
        and blocks.device.type == "cpu"
        and blocks.dtype is not torch.float64
        and type(blocks) in (Tensor, Parameter)
        and not (blocks.requires_grad and torch.is_grad_enabled())
        and not torch.compiler.is_compiling()
        and not torch._C._functorch.is_functorch_wrapped_tensor(blocks)  # under vmap, say: no type of its own tells it
        and entered_modes() == (0, 0)
        and os.environ.get(SWITCH) != "0"
    )


def _compiled(function: Function, arguments: tuple[Any, ...]) -> Function | None:
    """Compile for arguments like these, or return ``None`` where that is impossible.

    The compiled function must not hold the tensors: they would live on, and be told apart from those it is given.
    """
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    places = itertools.count()
    slots = [(next(places), None) if isinstance(each, Tensor) else (None, each) for each in arguments]

    def on_tensors(*given: Tensor) -> Any:
        return function(*[setting if place is None else given[place] for place, setting in slots])

    # What differs between closures of one code the compiler makes variable: without a name of its own, a format's
    # largest number would be an argument of the loop, not a constant.
    on_tensors.__code__ = on_tensors.__code__.replace(co_name=f"on_tensors_{next(NUMBERS)}")
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            views = [tensor.detach().view(tensor.shape) for tensor in tensors]
            for view in views:
                if view.ndim:
                    torch._dynamo.mark_dynamic(view, 0)
            made: Function = torch.compile(on_tensors, fullgraph=True, options=SAME_BITS, **LIMITS)
            made(*views)
    except Exception:  # whatever is missing or broken in a compiler, there is another way
        return None
    return made


NUMBERS = itertools.count()
COMPILER = Compiler()
