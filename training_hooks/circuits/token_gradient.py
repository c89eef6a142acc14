"""The gradient of the token embedding by token: how it is shared out, and what its rows have in common."""

import torch
from loopscope import HookPoint, HookRegistry, RunDataContext, TrainingHook
from loopscope.errors import UnsuitableError, require
from loopscope.hooks import Metrics, RunInfo
from loopscope.state import unsharded
from torch import Tensor

from ..measures import gini, leading_share, participation_ratio
from .embeddings import first_embedding, first_name, matrix_named


def concentration(norms: Tensor, top_k: int) -> dict[str, Tensor]:
    """Return how the gradient is spread over tokens, from the norms of its rows, shape (tokens,)."""
    return {
        "mean_norm": norms.mean(),
        "max_norm": norms.max(),
        "gini": gini(norms),
        "effective_tokens": participation_ratio(norms.square()),
        "top_k_share": leading_share(norms, top_k),
        "untouched_fraction": (norms == 0).to(norms.dtype).mean(),
    }


def agreement(rows: Tensor, norms: Tensor) -> dict[str, Tensor]:
    """Return what rows, shape (tokens, width), of these norms have in common: their mean cosine and shared energy.

    The mean cosine over all pairs of m rows with a norm is (‖Σ u‖² − m) / (m(m − 1)), u the rows over their norms; rows
    of zeros have no direction and are left out. NaN for fewer than two.
    """
    directions = rows / torch.where(norms > 0, norms, 1)[:, None]
    count = (norms > 0).sum()
    return {
        "mean_cosine": (directions.sum(dim=0).square().sum() - count) / (count * (count - 1)),
        "shared_fraction": rows.mean(dim=0).square().sum() * len(rows) / norms.square().sum(),
    }


@HookRegistry.register
class TokenGradient(TrainingHook):
    """Measure how the epoch's mean gradient is shared out among the tokens of the embedding.

    Assumes that the rows of the embedding are tokens. Of an embedding tied to the output projection the gradient is the
    sum of both uses: a token then gets gradient as an input and as a class, and every class gets some at every step.

    Args:
        top_k: how many tokens top_tokens lists and top_k_share adds up, at most.
        embedding: name of the embedding's parameter; empty: the weight of the model's first ``nn.Embedding``.
    """

    name = "token_gradient"
    loop_points = {"epoch": frozenset({HookPoint.POST_EPOCH}), "step": frozenset({HookPoint.SNAPSHOT})}
    needs_grads = True
    metrics = """
        mean_norm | mean over all V tokens of ‖gᵢ‖₂, gᵢ row i of the embedding's gradient, mean over the epoch's steps
            | [0, ∞) | The pull on a token of average standing, untouched ones included.
        max_norm | maxᵢ ‖gᵢ‖₂ | [0, ∞) | Far above mean_norm: few tokens learn at a time.
        gini | Σᵢ (2i − V − 1)·‖g₍ᵢ₎‖ / (V·Σ‖gᵢ‖), ‖g₍ᵢ₎‖ ascending | [0, 1 − 1/V], NaN
            | 0: all tokens are pulled alike; near 1: one token is. Rises with the skew of the token frequencies.
        effective_tokens | (Σ‖gᵢ‖²)² / Σ‖gᵢ‖⁴ | [1, V], NaN
            | How many equally pulled tokens would concentrate the gradient's energy as much.
        top_k_share | Σ‖gᵢ‖² over the top_k tokens with the largest, over Σ‖gᵢ‖² | [top_k/V, 1], NaN
            | Near 1: these tokens are all that the embedding learns of.
        top_tokens | the top_k tokens i with the largest ‖gᵢ‖, largest first | 0..V − 1 | Which.
        untouched_fraction | tokens with gᵢ = 0 exactly / V | [0, 1]
            | Tokens that no step of the epoch contained; 0 if the embedding is also the output projection.
        mean_cosine | mean over all pairs i ≠ j of the cosine between gᵢ and gⱼ, tokens with gᵢ = 0 left out
            | [−1, 1], NaN | 0: every token goes its own way; near 1: the update moves all tokens alike.
        shared_fraction | V·‖mean of the gᵢ‖² / Σ‖gᵢ‖² | [0, 1], NaN | Energy of the gradient that moves all tokens by
            one vector, which leaves their differences as they are; about 1/V for rows without relation.
    """

    def __init__(self, *, top_k: int = 5, embedding: str = "") -> None:
        require(top_k >= 1, f"token_gradient.top_k is {top_k}; it must be at least 1.")
        self._top_k, self._embedding = top_k, embedding

    def start(self, run: RunInfo) -> None:
        """Find the embedding; raises :class:`UnsuitableError` if there is none, or none that is trained."""
        name = self._embedding or first_embedding(run.model, self.name)
        if not matrix_named(run.model, name, "token_gradient.embedding").requires_grad:
            raise UnsuitableError(
                f"Hook 'token_gradient' needs an embedding that is trained, and {name!r} has requires_grad = False. "
                "Name another parameter with --hook-config token_gradient.embedding=NAME."
            )

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return how the gradient is spread, nothing after an epoch in which the embedding had none."""
        name = first_name(ctx.model, self._embedding or first_embedding(ctx.model, self.name))
        if not ctx.accumulated_grads or name not in ctx.accumulated_grads:
            return {}
        rows = unsharded(ctx.accumulated_grads[name]).to_dense()
        norms = rows.norm(dim=1)
        top = norms.topk(min(self._top_k, len(norms))).indices
        return {**concentration(norms, self._top_k), **agreement(rows, norms), "top_tokens": list(top)}
