"""The gradient of the token embedding by token: its distribution over tokens, and the common part of its rows."""

import torch
from loopscope import HookPoint, HookRegistry, RunDataContext, TrainingHook
from loopscope.errors import UnsuitableError, require
from loopscope.hooks import Metrics, RunInfo
from loopscope.option_words import hook_option_text
from loopscope.tensors import row_norms, scale_of, unsharded
from torch import Tensor

from ..measures import gini, leading_share, participation_ratio
from .embeddings import find_matrix, first_embedding, first_name


def concentration(norms: Tensor, top_k: int) -> dict[str, Tensor]:
    """Return measures of the gradient's concentration on few tokens, from the norms of its rows, shape (tokens,)."""
    return {
        "mean_norm": norms.mean(),
        "max_norm": norms.max(),
        "gini": gini(norms),
        "effective_tokens": participation_ratio(norms.square()),
        "top_k_share": leading_share(norms, top_k),
        "untouched_fraction": (norms == 0).to(norms.dtype).mean(),
    }


def agreement(rows: Tensor, norms: Tensor) -> dict[str, Tensor]:
    """Return the mean cosine and the shared energy of rows, shape (tokens, width), with norms of shape (tokens,).

    The mean cosine over all pairs of the m nonzero rows is (‖Σ u‖² − m) / (m(m − 1)), where u are the rows divided by
    their norms. It is NaN for fewer than two nonzero rows.
    """
    # ‖Σu‖² = m + Σ_{i≠j} uᵢ·uⱼ; shared_fraction = V·‖mean of the rows‖²/Σ‖row‖², the mean of shape (width,). Both are
    # those of the rows divided by a power of two, so that no square leaves the range of float32.
    scale = scale_of(rows).to(rows.dtype)
    rows, norms = rows / scale, norms / scale
    directions = rows / torch.where(norms > 0, norms, 1)[:, None].to(rows.dtype)
    count = (norms > 0).sum()
    mean_cosine = (directions.sum(dim=0).double().square().sum() - count) / (count * (count - 1))
    shared = rows.mean(dim=0).double().square().sum() * len(rows) / norms.square().sum()
    return {"mean_cosine": mean_cosine.clamp(-1, 1), "shared_fraction": shared.clamp(max=1)}


@HookRegistry.register
class TokenGradient(TrainingHook):
    """Measure how the epoch's mean gradient is distributed over the tokens of the embedding.

    Assumes that the rows of the embedding are tokens. If the embedding is tied to the output projection, its gradient
    is the sum of both uses: a token gets a gradient as an input and as a class, and every class gets one at every step.

    Args:
        top_k: maximum number of tokens in top_tokens and top_k_share.
        embedding: name of the embedding's parameter; empty: the weight of the model's first ``nn.Embedding``.
    """

    name = "token_gradient"
    loop_points = {"epoch": frozenset({HookPoint.POST_EPOCH}), "step": frozenset({HookPoint.SNAPSHOT})}
    needs_grads = True
    metrics = """
        mean_norm | mean over all V tokens of ‖gᵢ‖₂, gᵢ row i of the embedding's gradient, mean over the epoch's steps
            | [0, ∞) | The gradient of an average token, including untouched tokens.
        max_norm | maxᵢ ‖gᵢ‖₂ | [0, ∞) | Far above mean_norm: few tokens learn at a time.
        gini | Σᵢ (2i − V − 1)·‖g₍ᵢ₎‖ / (V·Σ‖gᵢ‖), ‖g₍ᵢ₎‖ ascending | [0, 1 − 1/V], NaN
            | 0: all tokens have equal gradients; near 1: one token has all. Rises with the skew of token frequencies.
        effective_tokens | (Σ‖gᵢ‖²)² / Σ‖gᵢ‖⁴ | [1, V], NaN
            | The number of tokens with equal gradients that would concentrate the energy equally.
        top_k_share | Σ‖gᵢ‖² over the top_k tokens with the largest, over Σ‖gᵢ‖² | [top_k/V, 1], NaN
            | Near 1: only these tokens learn.
        top_tokens | the top_k tokens i with the largest ‖gᵢ‖, largest first | 0..V − 1
            | The tokens with the largest gradients.
        untouched_fraction | tokens with gᵢ = 0 exactly / V | [0, 1]
            | Tokens in no batch of the epoch; 0 if the embedding is also the output projection.
        mean_cosine | mean over all pairs i ≠ j of the cosine between gᵢ and gⱼ, without tokens with gᵢ = 0
            | [−1, 1], NaN | 0: tokens move in unrelated directions; near 1: all tokens move in the same direction.
        shared_fraction | V·‖mean of the gᵢ‖² / Σ‖gᵢ‖² | [0, 1], NaN | The energy of the gradient that moves all
            tokens by the same vector and keeps their differences; about 1/V for unrelated rows.
    """

    def __init__(self, *, top_k: int = 5, embedding: str = "") -> None:
        require(top_k >= 1, f"token_gradient.top_k is {top_k}; it must be at least 1.")
        self._top_k, self._embedding = top_k, embedding

    def start(self, run: RunInfo) -> None:
        """Find the embedding.

        Raises:
            UnsuitableError: the model has no embedding, or its weight is not trained.
        """
        name = self._embedding or first_embedding(run.model, self.name)
        if not find_matrix(run.model, name, "token_gradient.embedding").requires_grad:
            raise UnsuitableError(
                f"Hook 'token_gradient' needs a trained embedding, but {name!r} has requires_grad = False. "
                f"Name another parameter with {hook_option_text(self.name, embedding='NAME')}."
            )

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return the metrics of the gradient, or nothing if the embedding had no gradient in the epoch."""
        name = first_name(ctx.model, self._embedding or first_embedding(ctx.model, self.name))
        if not ctx.accumulated_grads or name not in ctx.accumulated_grads:
            return {}
        rows = unsharded(ctx.accumulated_grads[name]).to_dense()
        norms = row_norms(rows)
        top = norms.topk(min(self._top_k, len(norms))).indices
        return {**concentration(norms, self._top_k), **agreement(rows, norms), "top_tokens": list(top)}
