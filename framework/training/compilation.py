"""Compiled models: the training steps run compiled, everything else eagerly."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..errors import UsageError


def compile_model(model: nn.Module) -> None:
    """Compile a model in place; raises :class:`UsageError` where there is no compiler for it.

    Every shape has a graph of its own (``dynamic=False``): with graphs for several shapes, which of them a batch gets
    would depend on the batches before it, and so would its last bits.
    """
    if next(model.parameters()).device.type == "cpu":
        # The compiler would say so too, but within the first step, as an error of its own over several pages.
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise UsageError(
                "--with-compile needs a C++ compiler on a CPU, and there is none; install g++ or clang, or set CXX to "
                "one."
            ) from error
    torch.use_deterministic_algorithms(  # which tells the compiler as well
        torch.are_deterministic_algorithms_enabled(), warn_only=torch.is_deterministic_algorithms_warn_only_enabled()
    )
    model.compile(dynamic=False)


@contextmanager
def quiet_graph_breaks() -> Iterator[None]:
    """Ignore in the body the warning that torch gives of itself when a compiled model has a break in its graph.

    It looks at the gradient of every tensor that enters the graph behind the break, most of which are no leaves. The
    filter alone is taken out again, rather than all filters put back, so that such bodies may end in any order.
    """
    before = [*warnings.filters]
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
    added = warnings.filters[0]
    try:
        yield
    finally:
        if added not in before and added in warnings.filters:
            warnings.filters.remove(added)  # type: ignore[attr-defined]


def is_compiled(model: nn.Module) -> bool:
    """Return whether a module of the model was compiled, with :meth:`torch.nn.Module.compile` or torch.compile."""
    # The first sets an attribute and the second makes a module of another class, about neither of which torch can be
    # asked in public; the class is known by name, since its import takes seconds.
    return any(
        module._compiled_call_impl is not None or type(module).__module__ == "torch._dynamo.eval_frame"
        for module in model.modules()
    )


@contextmanager
def eagerly() -> Iterator[None]:
    """Run compiled modules eagerly in the body: hooks of modules are called, and nothing is compiled for its shapes."""
    with torch.compiler.set_stance("force_eager"):
        yield
