"""An input embedding and the output projection that may share its matrix: found, and their gradients told apart."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from loopscope.errors import UnsuitableError, UsageError
from loopscope.state import WIDE, is_sharded
from torch import Tensor, nn

ROWS_TOGETHER = 512
"""Rows of a difference that are held in memory at once."""
ELEMENTS_TOGETHER = 2**20
"""Elements whose sizes are held in memory at once."""
PICTURE = "provenance"
THROUGH_INPUT = "through the input embedding (g_in)"
THROUGH_OUTPUT = "through the output projection (g_out)"
"""The picture that the hooks about the two gradients share, and how it calls them."""


@dataclass(frozen=True)
class EmbeddingPair:
    """The names of an embedding and of an output projection, modules of a model, and whether their weight is one."""

    embedding: str
    projection: str
    tied: bool

    @classmethod
    def of(cls, model: nn.Module, hook: str, embedding: str | None, projection: str | None) -> "EmbeddingPair":
        """Find the pair, or take the modules that are named.

        A module that shares its weight with an ``nn.Embedding`` is the projection of it; without one, the last
        ``nn.Linear`` with a row for each token. Raises :class:`UnsuitableError` for a model without such a pair or
        with several, :class:`UsageError` for names that are none; ``hook`` is who asks.
        """
        modules = dict(model.named_modules())
        embeddings = {name: module for name, module in modules.items() if isinstance(module, nn.Embedding)}
        pairs = [
            cls(name, other, tied=True)
            for name, module in embeddings.items()
            for other, candidate in modules.items()
            # not ``candidate.weight``: a parametrised module computes another tensor at every access
            if candidate is not module and candidate._parameters.get("weight") is module.weight
        ]
        linear = {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}
        pairs = pairs or [
            cls(name, alike[-1], tied=False)
            for name, module in embeddings.items()
            if (alike := [other for other, each in linear.items() if each.weight.shape == module.weight.shape])
        ]
        chosen = [
            pair for pair in pairs if embedding in (None, pair.embedding) and projection in (None, pair.projection)
        ]
        if len(chosen) != 1 and embedding is not None and projection is not None:
            chosen = [cls._named(modules, hook, embedding, projection)]
        if len(chosen) == 1:
            chosen[0].check(model, hook)
            return chosen[0]
        found = ", ".join(f"{pair.embedding} with {pair.projection}" for pair in pairs)
        raise UnsuitableError(
            f"Hook {hook!r} needs an embedding and its output projection; the model has {found or 'none'}. Name them "
            f"with --hook-config {hook}.embedding=NAME {hook}.projection=NAME."
        )

    @classmethod
    def _named(cls, modules: Mapping[str, nn.Module], hook: str, embedding: str, projection: str) -> "EmbeddingPair":
        for option, name in (("embedding", embedding), ("projection", projection)):
            if name not in modules or modules[name]._parameters.get("weight") is None:
                raise UsageError(f"{hook}.{option} is {name!r}; the model has no module of that name with a weight.")
        return cls(embedding, projection, tied=modules[embedding].weight is modules[projection].weight)

    def must_be_tied(self, hook: str) -> None:
        """Raise :class:`UnsuitableError` for two matrices."""
        if not self.tied:
            raise UnsuitableError(
                f"Hook {hook!r} clips one of two gradients in one matrix, but {self.embedding} and {self.projection} "
                "have a matrix each; tie their weights, or clip with grad_clip."
            )

    def check(self, model: nn.Module, hook: str) -> None:
        """Raise :class:`UnsuitableError` for weights whose gradients cannot be told apart here."""
        for name in (self.embedding, self.projection):
            module = model.get_submodule(name)
            weight = module.get_parameter("weight")
            if not weight.requires_grad:
                raise UnsuitableError(f"Hook {hook!r} needs the gradient of {name}.weight, which is frozen.")
            if is_sharded(weight):
                raise UnsuitableError(f"Hook {hook!r} reads whole gradients of {name}.weight, which is sharded.")
            if isinstance(module, nn.Embedding) and module.sparse:
                raise UnsuitableError(f"Hook {hook!r} needs a dense gradient of {name}, which has sparse=True.")


Sums = Callable[[Tensor, Tensor], Tensor]
"""Takes equal parts of both gradients and returns a vector of sums over their elements, which add up over parts."""


@torch.no_grad()
def squares(g_in: Tensor, g_out: Tensor) -> Tensor:
    """Return Σ g_in² and Σ g_out², shape (2,), float32 or wider."""
    first, second = _flat(g_in), _flat(g_out)
    return torch.stack([first @ first, second @ second])


@torch.no_grad()
def all_sums(g_in: Tensor, g_out: Tensor) -> Tensor:
    """Return Σ g_in², Σ g_out², Σ g_in g_out, Σ g_in, Σ g_out, Σ |g_in|, Σ |g_out|, shape (7,), float32 or wider."""
    first, second = _flat(g_in), _flat(g_out)
    products = [first @ first, second @ second, first @ second]
    return torch.stack([*products, first.sum(), second.sum(), _sum_of_sizes(first), _sum_of_sizes(second)])


def _sum_of_sizes(values: Tensor) -> Tensor:
    """Return Σ |x| of a vector; on the CPU the norm of order 1 takes four times as long."""
    return torch.stack([part.abs().sum() for part in torch.split(values, ELEMENTS_TOGETHER)]).sum()


def _flat(gradient: Tensor) -> Tensor:
    wide = gradient if gradient.dtype in WIDE else gradient.float()
    return wide.reshape(-1)


class TiedGradients:
    """Follows the two gradients of a tied matrix through a step, keeping no more than the output projection's.

    One pass with one use of each module is measured while the gradients flow. With micro-batches, or with a module used
    more than once, g_in is the difference of the whole gradient and the sum of g_out, right to float32.
    """

    def __init__(self, sums: Sums) -> None:
        self._sums = sums
        self.forget()

    def forget(self) -> None:
        """Forget the gradients of the last step."""
        self.output: Tensor | None = None
        """The sum of g_out so far, scaled like the loss."""
        self._owned = False
        self._seen = [0, 0]
        self._measured: Tensor | None = None

    def see_output(self, gradient: Tensor) -> None:
        """Add to g_out what a tap has seen of it."""
        self._seen[1] += 1
        if self.output is None:
            self.output = gradient
        elif self._owned:
            self.output.add_(gradient)
        else:
            self.output, self._owned = self.output + gradient, True

    def see_input(self, gradient: Tensor) -> None:
        """Add to g_in what a tap has seen of it."""
        self._seen[0] += 1
        self._measured = self._sums(gradient, self.output) if self._seen == [1, 1] and self.output is not None else None

    def measure(self, gradient: Tensor | None, loss_scale: float) -> Tensor | None:
        """Return the sums over the step, of gradients scaled like the loss; ``None`` if nothing flowed.

        ``gradient`` is the whole gradient of the matrix, unscaled.
        """
        if self.output is None or gradient is None:
            return None
        if self._measured is not None and self._seen == [1, 1]:
            return self._measured
        parts = []
        for first in range(0, len(gradient), ROWS_TOGETHER):
            g_out = self.output[first : first + ROWS_TOGETHER]
            parts.append(self._sums(gradient[first : first + ROWS_TOGETHER] * loss_scale - g_out, g_out))
        return torch.stack(parts).sum(0)
