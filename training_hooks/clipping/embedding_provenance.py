"""The two gradients of a tied embedding matrix: through the input embedding, and through the output projection."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, StepSchedule, TrainingHook
from loopscope.errors import require
from loopscope.hooks import GradientTap, MetricPanel, Metrics, RunInfo
from loopscope.tensors import cosine_of
from torch import Tensor, nn

from .tied_embeddings import NORMS, PICTURE, EmbeddingPair, TiedGradients, all_sums, pair_of

UNTIED_INTERVAL = 100
"""Steps between two measurements of separate matrices, whose gradients other hooks show as well."""
PATH = """
    {prefix}_l2_norm | ‖{symbol}‖₂ | [0, ∞) | Size of the gradient {way}.
    {prefix}_mean | mean of the elements of {symbol} | (−∞, ∞) | {drift}
    {prefix}_mean_abs | mean of |{symbol}| over all elements | [0, ∞)
        | Together with the norm it separates a gradient in few rows (small) from one in all rows.
"""
BOTH_PATHS = """
    output_to_embedding_ratio | ‖g_out‖₂ / ‖g_in‖₂ | [0, ∞], NaN
        | Above 1: the output projection dominates the tied matrix. NaN or ∞: g_in is zero.
    cosine | ⟨g_in, g_out⟩ / (‖g_in‖₂ ‖g_out‖₂) | [-1, 1], NaN
        | Below 0: the two uses pull the matrix in opposite directions. Tied weights only. NaN: one gradient is zero.
"""


@HookRegistry.register
@dataclass(kw_only=True, eq=False)
class EmbeddingProvenance(TrainingHook):
    """Measure separately the gradients through the input embedding and through the output projection.

    With tied weights their sum is the gradient of one matrix, g = g_in + g_out. The hook reads both contributions
    during the backward pass, without a second product and without keeping activations. Without tying they are the
    gradients of two matrices. The gradients are those at POST_BACKWARD: of all micro-batches, before any clipping.

    A forward pass on the first batch finds and verifies the pair: the output projection produces the model's output,
    as a module or as a functional head (``F.linear(h, wte.weight)``). A notice at the start names the pair.

    Assumes one embedding and one output projection with a row for each token, dense gradients, and unsharded weights
    (no FSDP2; under tensor parallelism neither is in the plan). With micro-batches or several processes g_in is exact
    to float32, even for weights of lower precision, whose two gradients are summed in float32.

    Args:
        interval: steps between two measurements; by default 1 for a tied matrix, 100 for two matrices.
        embedding: the name of the embedding in the model; found automatically by default.
        projection: the name of the output projection; found automatically by default. A functional head has none.
    """

    name = "embedding_provenance"
    hook_points = frozenset({HookPoint.POST_BACKWARD})
    _gradients = Remembered(partial(TiedGradients, all_sums), saved=False)
    metrics = (
        PATH.format(
            prefix="embedding_grad",
            symbol="g_in",
            way="through the input embedding",
            drift="Far from 0: a common drift.",
        )
        + PATH.format(
            prefix="output_proj_grad",
            symbol="g_out",
            way="through the output projection",
            drift="Under a softmax 0 up to rounding, since the gradients of a row's logits add up to 0; it shows no "
            "drift there. Far from 0 under other losses: a common drift.",
        )
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
        """Find the two modules; raises :class:`UnsuitableError` for a model without them."""
        self._pair = pair_of(run, self.name, self.embedding, self.projection)
        self._gradients.forget()
        if self.interval is None:
            every = 1 if self._pair.tied else UNTIED_INTERVAL
            self.step_schedule = StepSchedule(mode="stride", every_n_steps=every)

    def taps(self, model: nn.Module) -> Iterable[GradientTap]:
        """Tap both uses of a tied matrix; two matrices have separate gradients, so they need no taps."""
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
            return {} if sums is None else metrics_of(sums, weight.numel(), scale, tied=True)
        other = ctx.model.get_parameter(f"{self._pair.projection}.weight")
        if weight.grad is None or other.grad is None:
            return {}
        return metrics_of(all_sums(weight.grad, other.grad), weight.numel(), 1.0, tied=False)


def metrics_of(sums: Tensor, count: int, scale: float, *, tied: bool) -> dict[str, Tensor]:
    """Return the metrics from :func:`all_sums` of gradients with ``count`` elements, multiplied by ``scale``."""
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
    return values | {"cosine": cosine_of(sums[2], sums[0], sums[1])} if tied else values
