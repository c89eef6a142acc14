"""Optional compilation of the arithmetic of casts, for large tensors and if a compiler is available."""

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

from ...state.settings import entered_modes

SWITCH = "LOOPSCOPE_COMPILE_CASTS"  # environment variable; 0 disables compilation
SMALLEST = 2**12  # number of elements at which a compiled call becomes faster than several uncompiled operations
PATIENCE = 2**28
"""Number of elements that an uncompiled function processes in about the time of compiling it, some seconds."""
LARGEST = 2**31 - 1  # largest number of elements for 32-bit counts
VARIANTS = 32  # number of modes of torch (autocast, threads, determinism...) for which one function may be compiled

LIMITS: dict[str, Any] = (
    {"recompile_limit": VARIANTS} if "recompile_limit" in inspect.signature(torch.compile).parameters else {}
)
"""torch before 2.10 has a common limit of 8 for all functions; further variants run uncompiled, with the same bits."""

Function = Callable[..., Any]
# Inductor's options for the bits of eager mode: no fused multiply-adds, no unsafe optimisations by the C++ compiler,
# and intermediate results of narrow dtypes are rounded as eager mode rounds them.
SAME_BITS: dict[str, str | int | bool | Function] = {
    "cpp.enable_floating_point_contract_flag": "off",
    "cpp.enable_unsafe_math_opt_flag": False,
    "emulate_precision_casts": True,
}


class Compiler:
    """Cache of compiled functions on tensors.

    A function's first argument is a tensor in blocks (n, b), in chunks of blocks or flat (n). Between calls, tensors
    may differ in n; all other properties and arguments are compiled in, and must be hashable. Compiled and uncompiled
    results have the same bits: both use IEEE arithmetic on each element, with equal or exact operations, and maxima.
    (Sums of real numbers may differ after six digits.) So the time of compilation has no effect on results. A function
    is compiled when calls with similar arguments have processed so many elements that compiling would have taken less
    time; short runs compile nothing.
    """

    def __init__(self, patience: int = PATIENCE) -> None:
        self.patience = patience
        self._element_counts: dict[Hashable, int] = {}
        self._compiled: dict[Hashable, Function | None] = {}
        self._lock = threading.Lock()

    def run(self, function: Function, *arguments: Any) -> Any:
        """Return ``function(*arguments)``, compiled if that is possible and faster."""
        result = self.attempt(function, *arguments)
        return function(*arguments) if result is None else result

    def attempt(self, function: Function, *arguments: Any) -> Any:
        """Return the result of the compiled function, or ``None`` if it has to run uncompiled."""
        if not can_run_compiled(arguments[0]):
            return None
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        kinds = [(item.dtype, item.ndim, item.shape[1:]) if isinstance(item, Tensor) else item for item in arguments]
        key = (function, *kinds)
        compiled = self._compiled[key] if key in self._compiled else self._compile(key, function, arguments)
        if compiled is None:
            return None
        try:
            with torch.no_grad():
                return compiled(*[tensor.detach() for tensor in tensors])
        except Exception:  # limits of the compiler: too many variants, or compilation is currently forbidden
            return None

    def _compile(self, key: Hashable, function: Function, arguments: tuple[Any, ...]) -> Function | None:
        with self._lock:
            if key not in self._compiled:
                self._element_counts[key] = self._element_counts.get(key, 0) + int(arguments[0].numel())
                if self._element_counts[key] <= self.patience:
                    return None
                self._compiled[key] = compile_function(function, arguments)
        return self._compiled[key]


def can_run_compiled(blocks: Tensor) -> bool:
    """Return whether compiled arithmetic is faster for a tensor, and known to be correct for it."""
    return (
        SMALLEST <= blocks.numel() <= LARGEST
        # torch treats dimensions of size 0 and 1 as constants, so such a tensor would need another compilation.
        and len(blocks) > 1
        and blocks.device.type == "cpu"
        and blocks.dtype is not torch.float64
        and type(blocks) in (Tensor, Parameter)
        and not (blocks.requires_grad and torch.is_grad_enabled())
        and not torch.compiler.is_compiling()
        and not torch._C._functorch.is_functorch_wrapped_tensor(blocks)  # vmap's wrappers have the type Tensor
        and entered_modes() == (0, 0)
        and os.environ.get(SWITCH) != "0"
    )


def compile_function(function: Function, arguments: tuple[Any, ...]) -> Function | None:
    """Compile a function for arguments of this kind; return ``None`` if that is impossible.

    The compiled function must not refer to the tensors: they would stay in memory, and the compiler would distinguish
    them from the tensors of later calls.
    """
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    places = itertools.count()
    slots = [(next(places), None) if isinstance(argument, Tensor) else (None, argument) for argument in arguments]

    def on_tensors(*inputs: Tensor) -> Any:
        return function(*[setting if place is None else inputs[place] for place, setting in slots])

    # The compiler turns values that differ between closures with the same code into variables. Without a unique code
    # name, a format's largest number would be an argument of the loop instead of a constant.
    on_tensors.__code__ = on_tensors.__code__.replace(co_name=f"on_tensors_{next(NUMBERS)}")
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            views = [tensor.detach().view(tensor.shape) for tensor in tensors]
            for view in views:
                if view.ndim:
                    # Not torch.compile(dynamic=True), which makes all dimensions variable: only n varies.
                    torch._dynamo.mark_dynamic(view, 0)
            compiled: Function = torch.compile(on_tensors, fullgraph=True, options=SAME_BITS, **LIMITS)
            compiled(*views)
    except Exception:  # for any failure of the compiler, the uncompiled function is the fallback
        return None
    return compiled


NUMBERS = itertools.count()
COMPILER = Compiler()
