"""Compiled models: training steps run compiled, all other passes eagerly."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import nn

from ..errors import UsageError
from ..option_words import option_text


def compile_model(model: nn.Module) -> None:
    """Compile a model in place; raises :class:`UsageError` if no compiler is available.

    Every shape has a separate graph (``dynamic=False``). With dynamic shapes the graph of a batch, and with it the last
    bits of its result, would depend on the shapes of earlier batches.
    """
    if next(model.parameters()).device.type == "cpu":
        # Without this check the first step would fail with a compiler error of several pages.
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise UsageError(
                f"{option_text('with_compile')} needs a C++ compiler on a CPU, but none was found; install g++ or "
                "clang, or set CXX to its path."
            ) from error
    torch.use_deterministic_algorithms(  # called again, since it also sets the flag of the compiler
        torch.are_deterministic_algorithms_enabled(), warn_only=torch.is_deterministic_algorithms_warn_only_enabled()
    )
    model.compile(dynamic=False)


@contextmanager
def quiet_graph_breaks() -> Iterator[None]:
    """Ignore a warning that torch triggers itself at a break in the graph of a compiled model.

    torch reads ``.grad`` of every tensor that enters the graph after the break, and most of these are not leaves. On
    exit only this filter is removed, instead of restoring all filters, so that overlapping bodies may end in any order.
    """
    earlier_filters = [*warnings.filters]
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
    added = warnings.filters[0]
    try:
        yield
    finally:
        if added not in earlier_filters and added in warnings.filters:
            warnings.filters.remove(added)  # type: ignore[attr-defined]


def is_compiled(model: nn.Module) -> bool:
    """Return whether a module of the model was compiled, with :meth:`torch.nn.Module.compile` or torch.compile."""
    # Private, since torch has no public test: Module.compile sets an attribute, and torch.compile returns a module of
    # another class, which is identified by the name of its module because importing torch._dynamo takes seconds.
    return any(
        vars(module).get("_compiled_call_impl") is not None or type(module).__module__ == "torch._dynamo.eval_frame"
        for module in model.modules()
    )


eagerly: Callable[[], AbstractContextManager[None]] = partial(torch.compiler.set_stance, "force_eager")
"""Runs compiled modules eagerly in the body, so that module hooks are called and no new shapes are compiled."""
