"""A forward pass as hooks see it that search for modules: which were called, and which matrices made the output."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from ..state import InternalFunction

PRODUCTS = ("Mm", "Addmm", "Bmm", "Baddbmm", "Mv", "Addmv", "Linear", "MkldnnLinear", "Convolution")
"""Prefixes of the names of autograd nodes that multiply by a matrix."""
LOOK_UPS = ("Embedding", "Index", "Gather")


@dataclass
class ObservedPass:
    """Record of a forward pass: the called modules, and the parameters whose products made output and loss."""

    called: set[str] = field(default_factory=set)
    of_output: list[nn.Parameter] = field(default_factory=list)
    of_loss: list[nn.Parameter] = field(default_factory=list)

    def made_by(self, weight: Tensor | None) -> bool:
        """Return whether a product with this parameter produced the output, or a loss computed from it."""
        return any(matrix is weight for matrix in (*self.of_output, *self.of_loss))

    def observe(self, model: nn.Module, on_output: Callable[[], None] | None = None) -> ExitStack:
        """Record a model's passes until the returned stack is closed; call ``on_output`` for outputs with a graph."""
        stack = ExitStack()

        def after(name: str, module: nn.Module, inputs: object, output: object) -> None:
            self.called.add(name)
            if not name and (matrices := output_matrices(output)):
                self.of_output += matrices
                if on_output is not None:
                    on_output()

        for name, module in model.named_modules():
            stack.callback(module.register_forward_hook(InternalFunction(partial(after, name))).remove)
        return stack

    def add_loss(self, loss: Tensor) -> None:
        """Record the matrices that made the loss."""
        self.of_loss += output_matrices(loss)


def output_matrices(output: object) -> list[nn.Parameter]:
    """Return the parameters of the last matrix products before an output, found by walking its graph backwards."""
    nodes: list[Any] = [leaf.grad_fn for leaf in tree_iter(output) if isinstance(leaf, Tensor) and leaf.grad_fn]
    seen, output_factors = set(nodes), list[nn.Parameter]()
    for node in nodes:  # the loop appends to this list
        sources = [source for source, _ in node.next_functions if source is not None]
        # Custom autograd functions have names without a number.
        multiplies = node.name().startswith(PRODUCTS) or not node.name()[-1].isdigit()
        matrices = [matrix for source in sources if (matrix := _matrix(source)) is not None] if multiplies else []
        # Other leaves, such as the inputs of a gradient penalty, are dropped here, so that the record keeps none alive.
        output_factors += [matrix for matrix in matrices if isinstance(matrix, nn.Parameter)]
        nodes += [source for source in dict.fromkeys(sources) if not matrices and source not in seen]
        seen.update(sources)
    return output_factors


def _matrix(node: Any) -> Tensor | None:
    """Return the matrix if a node is a view, cast or multiple of a leaf with gradient; else ``None``."""
    # Only the node that accumulates a leaf's gradient has the attribute ``variable``, the leaf.
    while not hasattr(node, "variable"):
        sources = [source for source, _ in node.next_functions if source is not None]
        if len(sources) != 1 or node.name().startswith((*PRODUCTS, *LOOK_UPS)):
            return None
        node = sources[0]
    return node.variable if node.variable.ndim > 1 else None
