"""Search for an input embedding and its output projection, and separation of their gradients if they are tied."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from loopscope.errors import RunNotice, UnsuitableError, UsageError, warn
from loopscope.hooks import GradientTap, RunInfo
from loopscope.option_words import hook_option_text
from loopscope.tensors import WIDE, flat_products, fully_sharded_modules, is_sharded
from loopscope.training import ObservedPass, Ranks
from torch import Tensor, nn

ROWS_TOGETHER = 512
"""Number of rows of a difference in memory at once."""
ELEMENTS_TOGETHER = 2**20
"""Number of elements whose magnitudes are in memory at once."""
PICTURE = "provenance"
"""The picture that the hooks about the two gradients share."""
NORMS = {
    "embedding_grad_l2_norm": "through the input embedding (g_in)",
    "output_proj_grad_l2_norm": "through the output projection (g_out)",
}
"""Labels of the two norms in that picture."""


@dataclass(frozen=True)
class EmbeddingPair:
    """The module names of an embedding and its output projection, and whether they share their weight.

    A projection without a name is a functional head: the model itself multiplies by the embedding's weight.
    """

    embedding: str
    projection: str
    tied: bool

    @classmethod
    def of(
        cls,
        model: nn.Module,
        hook: str,
        embedding: str | None,
        projection: str | None,
        seen: ObservedPass | None = None,
    ) -> "EmbeddingPair":
        """Find the pair, or use the named modules; ``seen`` is a pass that verifies the output projection.

        The projection of an ``nn.Embedding`` is a module that shares its weight, or a functional head with it; without
        either, the ``nn.Linear`` with a row for each token. ``hook`` is the name of the calling hook.

        Raises:
            UnsuitableError: if the model has no such pair or several, or if named modules do not produce the output.
            UsageError: if the names are equal, or no modules with a weight.
        """
        if embedding is not None and embedding == projection:
            raise UsageError(
                f"{hook}.embedding and {hook}.projection are both {embedding!r}; name two modules, or the embedding "
                "alone if the head uses the embedding's weight."
            )
        modules = dict(model.named_modules())
        pairs = cls._candidates(modules, seen)
        chosen = [pair for pair in pairs if embedding in (None, pair.embedding)]
        chosen = [pair for pair in chosen if projection in (None, pair.projection)]
        if len(chosen) != 1 and embedding is not None and projection is not None:
            chosen = [cls._named(modules, hook, embedding, projection, seen)]
        if len(chosen) == 1:
            chosen[0].check(model, hook)
            return chosen[0]
        candidates = ", ".join(f"{pair.embedding} with {pair.projection or 'a functional head'}" for pair in pairs)
        raise UnsuitableError(
            f"Hook {hook!r} needs an embedding and its output projection; the model has {candidates or 'none'}. Name "
            f"them with {hook_option_text(hook, embedding='NAME', projection='NAME')}."
        )

    @classmethod
    def tied_in(cls, model: nn.Module, hook: str, embedding: str | None, projection: str | None) -> "EmbeddingPair":
        """Find a pair without a pass: modules that share a weight, else a functional head on the only embedding."""
        modules = dict(model.named_modules())
        tables = [name for name, module in modules.items() if isinstance(module, nn.Embedding)]
        tables = [name for name in tables if modules[name]._parameters.get("weight") is not None]
        tables = [name for name in tables if embedding in (None, name)]
        shared = any(pair.tied for pair in cls._candidates(modules, None))
        if shared or projection is not None or len(tables) != 1:
            return cls.of(model, hook, embedding, projection)
        pair = cls(tables[0], "", tied=True)
        pair.check(model, hook)
        return pair

    @classmethod
    def _candidates(cls, modules: Mapping[str, nn.Module], seen: ObservedPass | None) -> list["EmbeddingPair"]:
        """Return the tied pairs of a model; if there are none, the untied pairs."""
        live = {name: module for name, module in modules.items() if seen is None or name in seen.called}

        def makes_output(weight: Tensor | None) -> bool:
            return seen is None or seen.made_by(weight)

        tied, untied = list[EmbeddingPair](), list[EmbeddingPair]()
        for name, table in live.items():
            # Avoid ``table.weight``: a parametrised module computes a new tensor at every access, and spectral_norm
            # then updates its buffers.
            matrix = table._parameters.get("weight")
            if not isinstance(table, nn.Embedding) or matrix is None:
                continue
            weights = {other: leaf._parameters.get("weight") for other, leaf in live.items() if leaf is not table}
            sharing = [other for other, weight in weights.items() if weight is matrix and makes_output(weight)]
            if seen is not None:
                sharing = [other for other in sharing if not isinstance(live[other], nn.Embedding)]
                sharing = sharing or [""] * any(factor is matrix for factor in seen.of_output)
            linear = {other: weight for other, weight in weights.items() if isinstance(live[other], nn.Linear)}
            shaped = [other for other, weight in linear.items() if weight is not None and weight.shape == matrix.shape]
            alike = [other for other in shaped if makes_output(weights[other])]
            tied += [cls(name, other, tied=True) for other in sharing]
            untied += [cls(name, other, tied=False) for other in (alike if seen is not None else alike[-1:])]
        return tied or untied

    @classmethod
    def _named(
        cls, modules: Mapping[str, nn.Module], hook: str, embedding: str, projection: str, seen: ObservedPass | None
    ) -> "EmbeddingPair":
        for option, name in (("embedding", embedding), ("projection", projection)):
            if name not in modules or modules[name]._parameters.get("weight") is None:
                raise UsageError(f"{hook}.{option} is {name!r}; the model has no module of that name with a weight.")
        weight = modules[projection]._parameters["weight"]
        if seen is not None and not (seen.made_by(weight) and {embedding, projection} <= seen.called):
            raise UnsuitableError(
                f"{hook}.projection is {projection!r}, but it does not produce the model's output from "
                f"{embedding!r}; omit both names to find the pair automatically."
            )
        return cls(embedding, projection, tied=modules[embedding]._parameters["weight"] is weight)

    def __str__(self) -> str:
        """Return the names of both, and whether they are tied."""
        head = f"output projection {self.projection!r}" if self.projection else "a functional head"
        kind = "tied (one matrix)" if self.tied else "untied (two matrices)"
        return f"embedding {self.embedding!r} and {head}, {kind}"

    def taps(self, gradients: "TiedGradients", *, replaces: bool = False) -> list[GradientTap]:
        """Return the taps of the gradients through the output projection and through the embedding."""
        use: Literal["weight", "elsewhere"] = "weight" if self.projection else "elsewhere"
        return [
            GradientTap(self.projection or self.embedding, use, gradients.see_output, replaces=replaces),
            GradientTap(self.embedding, "weight", gradients.see_input, replaces=replaces),
        ]

    def must_be_tied(self, hook: str) -> None:
        """Raise :class:`UnsuitableError` for two matrices."""
        if not self.tied:
            raise UnsuitableError(
                f"Hook {hook!r} clips one of two gradients in one matrix, but {self.embedding} and {self.projection} "
                "have a matrix each; tie their weights, or clip with grad_clip."
            )

    def check(self, model: nn.Module, hook: str) -> None:
        """Raise :class:`UnsuitableError` for weights whose gradients cannot be separated."""
        for name in filter(None, (self.embedding, self.projection)):
            module = model.get_submodule(name)
            weight = module.get_parameter("weight")
            if not weight.requires_grad:
                raise UnsuitableError(f"Hook {hook!r} needs the gradient of {name}.weight, which is frozen.")
            if is_sharded(weight):
                raise UnsuitableError(
                    f"Hook {hook!r} reads whole gradients of {name}.weight, which is sharded by tensor parallelism; "
                    "leave embedding and output projection out of its plan."
                )
            if isinstance(module, nn.Embedding) and module.sparse:
                raise UnsuitableError(f"Hook {hook!r} needs a dense gradient of {name}, which has sparse=True.")


def pair_of(run: RunInfo, hook: str, embedding: str | None, projection: str | None) -> EmbeddingPair:
    """Find a run's pair (:meth:`EmbeddingPair.of`), verify it by the first pass, and issue a notice with its names."""
    if fully_sharded_modules(run.model):
        raise UnsuitableError(
            f"Hook {hook!r} separates two gradients of one unsharded matrix, which FSDP2 (fully_shard) does not have "
            "in the backward pass; measure in a run under DistributedDataParallel."
        )
    seen: ObservedPass | None = None
    if run.observed_first_pass is not None:
        try:
            seen = run.observed_first_pass()
        except Exception as error:  # the run raises the same error at its first step
            problem = f"{hook} selects the pair by names and shapes: the loss of the first batch cannot be computed"
            warn(f"{problem} ({type(error).__name__}: {error}).", RunNotice, stacklevel=3)
    pair = EmbeddingPair.of(run.model, hook, embedding, projection, seen)
    warn(f"{hook} uses {pair}.", RunNotice, stacklevel=3)
    return pair


Sums = Callable[[Tensor, Tensor], Tensor]
"""Takes equal parts of both gradients and returns a vector of sums over their elements, which add up over parts."""


@torch.no_grad()
def squares(g_in: Tensor, g_out: Tensor) -> Tensor:
    """Return Σ g_in² and Σ g_out², shape (2,), float64."""
    first, second = _flat(g_in), _flat(g_out)
    return flat_products([(first, first), (second, second)])


@torch.no_grad()
def all_sums(g_in: Tensor, g_out: Tensor) -> Tensor:
    """Return Σ g_in², Σ g_out², Σ g_in g_out, Σ g_in, Σ g_out, Σ |g_in|, Σ |g_out|, shape (7,), float64."""
    first, second = _flat(g_in), _flat(g_out)
    products = flat_products([(first, first), (second, second), (first, second)])
    sums = torch.stack([first.sum(), second.sum(), _sum_of_sizes(first), _sum_of_sizes(second)])
    return torch.cat([products, sums.to(products.dtype)])


def _sum_of_sizes(values: Tensor) -> Tensor:
    """Return Σ |x| of a vector; on the CPU the norm of order 1 takes four times as long."""
    return torch.stack([part.abs().sum() for part in torch.split(values, ELEMENTS_TOGETHER)]).sum()


def _flat(gradient: Tensor) -> Tensor:
    return (gradient if gradient.dtype in WIDE else gradient.float()).reshape(-1)


class TiedGradients:
    """Separates the two gradients of a tied matrix in a step: g_in of the embedding, g_out of the output projection.

    If each module is used once in the step, both gradients are measured during the backward pass. Otherwise only the
    sum of g_out is kept, and g_in is the total gradient minus that sum, accurate to float32. For weights narrower than
    float32 the total gradient is too imprecise, so both sums are kept in float32.
    """

    def __init__(self, sums: Sums) -> None:
        self._sums = sums
        self.forget()

    def forget(self) -> None:
        """Forget the gradients of the last step."""
        self.output: Tensor | None = None
        """The sum of g_out so far, scaled like the loss."""
        self._input: Tensor | None = None
        """The sum of g_in so far, for weights narrower than float32 only."""
        self._seen = [0, 0]
        self._measured: Tensor | None = None

    def see_output(self, gradient: Tensor) -> None:
        """Add a gradient of the output projection to g_out."""
        self._seen[1] += 1
        # The first gradient is torch's own tensor; only the sum, a new tensor from the second call on, is ours.
        self.output = _added(self.output, gradient, is_owned=self._seen[1] > 2)

    def see_input(self, gradient: Tensor) -> None:
        """Measure the first g_in immediately; add it to a sum for weights narrower than float32."""
        self._seen[0] += 1
        self._measured = self._sums(gradient, self.output) if self._seen == [1, 1] and self.output is not None else None
        if gradient.dtype not in WIDE:
            self._input = _added(self._input, gradient, is_owned=self._seen[0] > 2)

    def measure(self, gradient: Tensor | None, loss_scale: float, ranks: Ranks | None = None) -> Tensor | None:
        """Return the sums over the step, of gradients scaled like the loss; ``None`` if nothing flowed.

        ``gradient`` is the total gradient of the matrix, unscaled and averaged over the ``ranks``; this method averages
        g_out in the same way.
        """
        if ranks is not None and ranks.data:
            self._average(ranks, gradient)
        if self.output is None or gradient is None:
            return None
        if self._measured is not None and self._seen == [1, 1]:
            return self._measured
        parts = []
        for first in range(0, len(gradient), ROWS_TOGETHER):
            rows = slice(first, first + ROWS_TOGETHER)
            g_out = self.output[rows]
            g_in = gradient[rows] * loss_scale - g_out if self._input is None else self._input[rows]
            parts.append(self._sums(g_in, g_out))
        return torch.stack(parts).sum(0)

    def _average(self, ranks: Ranks, gradient: Tensor | None) -> None:
        ranks.join()
        self._measured = None  # it covers the rows of this rank only
        if ranks.agree(self.output is None or gradient is None):
            self.output = None
            return
        gradients = [part for part in (self.output, self._input) if part is not None]
        self.output, self._input = [*ranks.means(gradients), None][:2]


def _added(total: Tensor | None, gradient: Tensor, *, is_owned: bool) -> Tensor:
    """Add a gradient to a total in float32 or wider; without a total return the gradient itself.

    The addition is in place if the total ``is_owned``, that is, not a tensor of torch.
    """
    if total is None:
        return gradient
    if is_owned:
        return total.add_(gradient)
    return (total if total.dtype in WIDE else total.float()) + gradient
