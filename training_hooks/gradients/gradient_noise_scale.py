"""The gradient noise scale: how many samples a batch needs before its gradient is more signal than noise."""

import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, StepSchedule, TrainingHook
from loopscope.data import micro_batches, rows
from loopscope.errors import require
from loopscope.hooks import Metrics
from loopscope.state import Vector, accumulate, dot
from torch import Tensor


def signal_and_noise(norms: tuple[Tensor, Tensor], small: float, big: float) -> tuple[Tensor, Tensor]:
    """Return unbiased estimates of |G|², G the true gradient, and of S = tr Σ, Σ the covariance of a row's gradient.

    ``norms`` are |G|² of gradients on a ``small`` and on a ``big`` number of rows, zero-dimensional. From
    E|G_B|² = |G|² + S/B at these two, |G|² = (B_big|G_big|² − B_small|G_small|²)/(B_big − B_small) and
    S = (|G_small|² − |G_big|²)/(1/B_small − 1/B_big) (arXiv 1812.06162, appendix A.1). The first can be negative.
    """
    of_small, of_big = norms
    signal = (big * of_big - small * of_small) / (big - small)
    noise = (of_small - of_big) / (1 / small - 1 / big)
    return signal, noise


class PartNorms:
    """Gathers the gradients of the parts of one batch, holding their sum only.

    G_big is the mean of the parts' gradients weighted by rows, |G_small|² the mean of their squared norms weighted the
    same. With b_i of B rows in part i, E|G_small|² = |G|² + S·Σ(b_i/B)/b_i = |G|² + S·n/B, so that B_small = B/n holds
    exactly, however uneven the n parts are.
    """

    def __init__(self) -> None:
        self.rows = self.parts = 0
        self._sum: dict[str, Tensor] = {}
        self._squares: list[Tensor] = []

    def add(self, gradient: Vector, count: int) -> None:
        """Include the mean gradient of ``count`` rows."""
        self._sum = accumulate(self._sum, gradient, count)
        self._squares.append(count * dot(gradient, gradient).double())
        self.rows += count
        self.parts += 1

    def squared_norms(self) -> tuple[Tensor, Tensor]:
        """Return |G_small|² at ``rows / parts`` rows and |G_big|² at ``rows``, zero-dimensional, float64."""
        small = torch.stack(self._squares).sum() / self.rows
        return small, dot(self._sum, self._sum).double() / self.rows**2


@HookRegistry.register
class GradientNoiseScale(TrainingHook):
    """Estimate the gradient noise scale B = S/|G|² by splitting the batch at some steps.

    The batch is split into ``parts``, and the gradient of each taken anew at the present weights: about one more
    forward and backward pass of the batch at each step where the hook fires. The squared norms at the two sizes give
    unbiased estimates of |G|² (signal) and S (noise). Single ones scatter widely, so each is averaged by itself, and
    the noise scale is the ratio of the averages, never the average of ratios (arXiv 1812.06162).

    Assumes that the loss is a mean over rows, that the rows are independent draws, and that the weights move little
    over the steps that are averaged. Rows that are drawn without replacement from N give a |G|² that is smaller by S/N
    than the squared norm of the mean gradient of all N: it may fall below zero when the training rows are fitted.
    BatchNorm normalises each part by itself: what is estimated is then the noise of gradients at the size of a part.
    With dropout all parts draw from the same random stream, and the noise that their masks have in common counts as
    signal. A batch of one row is left out. Where gradients are averaged over processes, S is too small by their number.

    Args:
        every_n_steps: measure one step in so many.
        parts: into how many parts a batch is split; more parts scatter a little less and cost more overhead.
        decay: weight of the past at each measurement: 0 keeps the newest only, 1 is the mean over all of them, anything
            between an exponential average over about 1/(1 − decay) measurements, corrected for its beginning.
    """

    name = "gradient_noise_scale"
    hook_points = frozenset({HookPoint.POST_BACKWARD})
    _sums = Remembered(lambda: torch.zeros(2, dtype=torch.float64))
    """Of signal and noise, weighted."""
    _weight = Remembered(float)
    metrics = """
        noise_scale | S / |G|², each averaged by itself over the measurements so far | (−∞, ∞)
            | In rows. Batches far below it: doubling them nearly halves the steps needed; far above: it saves almost
            none. Usually grows in training. Negative: |G|² is lost in the noise, average longer.
        signal | |G|²: average of signal_estimate, the newest but k weighted by decay^k | (−∞, ∞)
            | Squared norm of the gradient without sampling noise; near 0: the steps are a random walk.
        noise | S: average of noise_estimate, the newest but k weighted by decay^k | (−∞, ∞)
            | tr Σ, Σ the covariance of one row's gradient; a batch of B rows has the noise energy S/B.
        signal_estimate | (B_big·|G_big|² − B_small·|G_small|²) / (B_big − B_small); G_big = Σ (b_i/B)·G_i, |G_small|² =
            Σ (b_i/B)·|G_i|², G_i the gradient on the b_i rows of part i | (−∞, ∞)
            | Unbiased; about half of all values are negative where there is no signal.
        noise_estimate | (|G_small|² − |G_big|²) / (1/B_small − 1/B_big) | [0, ∞)
            | Unbiased; how widely it scatters tells how much averaging is needed.
        batch_rows | B, the rows of the step's batch | 2, 3, … | To be held against noise_scale.
    """

    def __init__(self, *, every_n_steps: int = 100, parts: int = 2, decay: float = 0.9) -> None:
        require(parts >= 2, f"gradient_noise_scale.parts is {parts}; two sizes of batch need at least 2.")
        require(0 <= decay <= 1, f"gradient_noise_scale.decay is {decay}; it must lie in 0..1.")
        self.step_schedule = StepSchedule(mode="stride", every_n_steps=every_n_steps)
        self.parts = parts
        self.decay = decay

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return this step's estimates and the averages; nothing for a batch of one row."""
        if rows(ctx.batch_data) < 2:
            return {}
        gathered = PartNorms()
        for part in micro_batches(ctx.batch_data, self.parts):
            gathered.add(ctx.compute_batch_gradients(part), rows(part))
        estimates = signal_and_noise(gathered.squared_norms(), gathered.rows / gathered.parts, gathered.rows)
        self._sums = self.decay * self._sums.to(estimates[0].device) + torch.stack(estimates)
        self._weight = self.decay * self._weight + 1
        signal, noise = (self._sums / self._weight).unbind()
        return {
            "noise_scale": noise / signal,
            "signal": signal,
            "noise": noise,
            "signal_estimate": estimates[0],
            "noise_estimate": estimates[1],
            "batch_rows": gathered.rows,
        }
