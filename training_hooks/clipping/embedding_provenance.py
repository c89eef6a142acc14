"""The two gradients that meet in a tied embedding matrix: through the input embedding, and through the output."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, StepSchedule, TrainingHook
from loopscope.errors import require
from loopscope.hooks import GradientTap, MetricPanel, Metrics, RunInfo
from torch import Tensor, nn

from .tied_embeddings import NORMS, PICTURE, EmbeddingPair, TiedGradients, all_sums, pair_of

INTERVAL_APART = 100
"""Steps between measurements of two matrices, whose gradients any norm shows."""
PATH = """
    {prefix}_l2_norm | ‖{symbol}‖₂ | [0, ∞) | Size of the gradient {way}.
    {prefix}_mean | mean of the elements of {symbol} | (−∞, ∞) | Far from 0: a common drift.
    {prefix}_mean_abs | mean of |{symbol}| over all elements | [0, ∞)
        | Beside the norm it tells a gradient in few rows (small) from one in all of them.
"""
BOTH_PATHS = """
    output_to_embedding_ratio | ‖g_out‖₂ / ‖g_in‖₂ | [0, ∞)
        | Above 1 the output projection decides what becomes of the tied matrix; NaN or ∞: g_in is zero.
    cosine | ⟨g_in, g_out⟩ / (‖g_in‖₂ ‖g_out‖₂) | [-1, 1]
        | Below 0 the two uses pull the matrix in opposite directions. Tied weights only; NaN: one is zero.
"""


@HookRegistry.register
@dataclass(kw_only=True, eq=False)
class EmbeddingProvenance(TrainingHook):
    """Measure the gradient through the input embedding and the one through the output projection, apart.

    With tied weights both end in one matrix, g = g_in + g_out. What each use of the matrix gives it is read while it
    flows: no product is computed twice, no activation kept. Without tying they are the gradients of two matrices.
    Gradients are those of POST_BACKWARD: of all micro-batches, before any clipping.

    The pair is found, and verified, in one forward pass of the first batch: the output projection is what makes the
    model's output, be it a module or a functional head (``F.linear(h, wte.weight)``). A line at the start says which.

    Assumes one embedding and one output projection with a row for each token, dense gradients, unsharded
    weights (no FSDP2, and under tensor parallelism neither in the plan). With micro-batches, or over several processes,
    g_in is right to float32, also for weights below it, whose two gradients are summed in float32.

    Args:
        interval: measure every so many steps; by default every step of a tied matrix, every 100th of two matrices.
        embedding: the name of the embedding in the model; by default it is found.
        projection: the name of the output projection; by default it is found. A functional head has none.
    """

    name = "embedding_provenance"
    hook_points = frozenset({HookPoint.POST_BACKWARD})
    _gradients = Remembered(lambda: TiedGradients(all_sums), saved=False)
    metrics = (
        PATH.format(prefix="embedding_grad", symbol="g_in", way="through the input embedding")
        + PATH.format(prefix="output_proj_grad", symbol="g_out", way="through the output projection")
        + BOTH_PATHS
    )
    panels = (
        MetricPanel(
            picture=PICTURE,
            place=0,
            title="Gradients of input embedding and output projection",
            y_label="L2 norm",
            curves=NORMS,
            log_y=True,
        ),
        MetricPanel(
            picture=PICTURE,
            place=1,
            title="Ratio of output projection to input embedding",
            y_label="‖g_out‖₂ / ‖g_in‖₂",
            curves={"output_to_embedding_ratio": ""},
            log_y=None,
            baseline=1.0,
        ),
        MetricPanel(
            picture=PICTURE,
            place=3,
            title="Cosine of the two gradients",
            y_label="cosine",
            curves={"cosine": ""},
            baseline=0.0,
        ),
    )

    interval: int | None = None
    embedding: str | None = None
    projection: str | None = None

    def __post_init__(self) -> None:
        every = 1 if self.interval is None else self.interval
        require(every >= 1, f"embedding_provenance.interval is {every}; it must be at least 1.")
        self.step_schedule = StepSchedule(mode="stride", every_n_steps=every)
        self._pair: EmbeddingPair | None = None

    def start(self, run: RunInfo) -> None:
        """Find the two modules; refuse a model without them."""
        self._pair = pair_of(run, self.name, self.embedding, self.projection)
        self._gradients.forget()
        if self.interval is None:
            every = 1 if self._pair.tied else INTERVAL_APART
            self.step_schedule = StepSchedule(mode="stride", every_n_steps=every)

    def taps(self, model: nn.Module) -> Iterable[GradientTap]:
        """Watch both uses of a tied matrix; two matrices have gradients of their own."""
        if self._pair is None or not self._pair.tied:
            return []
        return self._pair.taps(self._gradients)

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return norms and means of both gradients, their ratio and their cosine."""
        if self._pair is None:
            return {}
        weight = ctx.model.get_parameter(f"{self._pair.embedding}.weight")
        scale = ctx.loss_scale or 1.0
        if self._pair.tied:
            sums = self._gradients.measure(weight.grad, scale, ctx.ranks)
            self._gradients.forget()
            return {} if sums is None else named(sums, weight.numel(), scale, tied=True)
        other = ctx.model.get_parameter(f"{self._pair.projection}.weight")
        if weight.grad is None or other.grad is None:
            return {}
        return named(all_sums(weight.grad, other.grad), weight.numel(), 1.0, tied=False)


def named(sums: Tensor, count: int, scale: float, *, tied: bool) -> dict[str, Tensor]:
    """Name what follows from :func:`all_sums` of gradients of ``count`` elements, scaled by ``scale``."""
    norms, means = sums[:2].sqrt(), sums[3:] / (count * scale)
    values = {
        "embedding_grad_l2_norm": norms[0] / scale,
        "embedding_grad_mean": means[0],
        "embedding_grad_mean_abs": means[2],
        "output_proj_grad_l2_norm": norms[1] / scale,
        "output_proj_grad_mean": means[1],
        "output_proj_grad_mean_abs": means[3],
        "output_to_embedding_ratio": norms[1] / norms[0],
    }
    return values | {"cosine": sums[2] / torch.prod(norms)} if tied else values
