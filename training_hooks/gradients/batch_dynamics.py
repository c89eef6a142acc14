"""Relations between the gradients of consecutive steps: autocorrelation, accumulation efficiency, rank."""

from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, StepSchedule, TrainingHook
from loopscope.errors import UnsuitableError, require
from loopscope.hooks import Metrics, RunInfo
from torch import Tensor

from ..measures import effective_rank, is_overflowed, leading_share
from .gradient_history import GradientHistory, check_dimensions, check_memory, spectrum

LAGS = (1, 2, 5, 10, 20, 50)
WINDOWS = (5, 10, 20, 50)
LENGTHS = frozenset({lag + 1 for lag in LAGS} | set(WINDOWS))
"""Numbers of consecutive gradients at which a lag or a window first has enough of them."""
INTERVAL = 10  # steps between two reports of a burst


def autocorrelation(gram: Tensor, lag: int) -> Tensor:
    """Return the mean of cos(g_t, g_(t−lag)) over all pairs, zero-dimensional; NaN if a gradient is zero.

    Args:
        gram: the inner products of k consecutive gradients in order, shape (k, k), k > lag.
        lag: steps between the two gradients of a pair.

    >>> from torch import tensor
    >>> autocorrelation(tensor([[4.0, 1.0], [1.0, 1.0]]), 1).item()
    0.5
    """
    # cos(g_t, g_(t−lag)) = G[t−lag, t] / √(G[t, t]·G[t−lag, t−lag]): the lag-th diagonal, shape (k − lag,)
    norms = gram.diagonal().sqrt()
    # rounding may leave the range of a cosine, and that of the efficiency below
    return (gram.diagonal(lag) / (norms[lag:] * norms[:-lag])).clamp(-1, 1).mean()


def accumulation_efficiency(gram: Tensor, window: int) -> Tensor:
    """Return ‖Σg‖/Σ‖g‖ over the newest ``window`` gradients, zero-dimensional; NaN if all of them are zero.

    ``gram`` has shape (k, k), k ≥ window, as in :func:`autocorrelation`.

    >>> from torch import eye
    >>> accumulation_efficiency(eye(4), 4).item()
    0.5
    """
    newest = gram[-window:, -window:]  # its entries add up to ‖Σg‖², its diagonal holds ‖g‖²
    # Rounding can make the sum slightly negative if the gradients cancel.
    return (newest.sum().clamp(min=0).sqrt() / newest.diagonal().sqrt().sum()).clamp(max=1)


AUTOCORRELATION = """
    autocorrelation_lag_{lag} | mean of cos(g_t, g_(t−{lag})) over the k − {lag} pairs among the k gradients | [−1, 1],
        NaN | About 1/(1+r) for batches with a noise-to-signal energy ratio of r if the weights do not move. {contrast}
"""
FIRST_LAG = "Negative: each step overshoots, and the next one pulls back."
LATER_LAG = "Below lag 1: the gradient turns within {} steps. Negative: it swings back after that many."
LAG_ROWS = [AUTOCORRELATION.format(lag=lag, contrast=LATER_LAG.format(lag) if lag > 1 else FIRST_LAG) for lag in LAGS]
EFFICIENCY = """
    accumulation_efficiency_{window} | ‖Σg‖₂ / Σ‖g‖₂ over the newest {window} gradients | [0, 1], NaN
        | 1: all point in one direction. 1/√{window} = {orthogonal:.2f}: they are orthogonal, like noise, and
        accumulating them averages the noise out. Below that: they cancel.
"""
WINDOW_ROWS = [EFFICIENCY.format(window=window, orthogonal=window**-0.5) for window in WINDOWS]
RANK = """
    effective_rank | exp(−Σ p ln p), p = σ/Σσ, σ the singular values of the k gradients as rows; σ² ≤ k·ε·max σ² counts
        as 0, ε the rounding error of their dtype | [1, k], NaN | Number of directions that the gradients of successive
        batches span. Near k: each batch pulls in its own direction; far below: they share a few. Compare at equal k.
    leading_share | max σ² / Σσ² | [1/k, 1], NaN
        | The share of the gradients' energy along one direction. Near 1: all batches agree.
    gradients | k | [2, history] | Number of consecutive gradients behind this step's values.
"""


@HookRegistry.register
class BatchDynamics(TrainingHook):
    """Measure how the gradients of consecutive steps relate: autocorrelation, accumulation efficiency and rank.

    During a burst the hook keeps the gradients of up to ``history`` consecutive steps as they are at POST_BACKWARD
    (before clipping); after the burst it discards them. It reports whenever a lag or a window first has enough
    gradients, then every 10 steps and at the end of the burst. It omits lags and windows that have too few gradients.
    A step that a loss scaler skips has no gradient, and the hook starts again with the next one.

    Memory: ``history`` × n × 4 bytes during a burst, n the number of trainable elements (113 MiB for 60 gradients of
    half a million), plus one gradient while it is copied. If that exceeds ``memory``, the hook refuses the model. With
    ``projection`` = d it is ``history`` × d × 4 bytes: a count sketch, the same in every run, replaces each gradient. A
    cosine c then has a standard error of (1 − c²)/√d (0.0078 at c = 0 and d = 16384), a norm has a relative standard
    error of 1/√(2d), and singular values are within a factor of about 1 ± √(history/d) of the true ones. The measured
    coverage of the first two is at the end of this page.

    Assumes that the weights move little within a burst: the gradients then differ by their batches, and the values
    predict the effect of larger batches. If the weights move much, the values show how fast the gradient turns along
    the path. Large gradients weigh more in efficiency and rank, but not in the autocorrelation.

    Args:
        history: number of consecutive gradients to keep, which is also the length of a burst in steps.
        every: steps from the start of one burst to the start of the next; more than ``history``.
        projection: dimensions of the random projection, a power of two; 0 keeps the gradients themselves.
        memory: the most MiB that the gradients may take; by default as many as the trained parameters, at least 128.
    """

    name = "batch_dynamics"
    needs_dense_gradients = True
    hook_points = frozenset({HookPoint.POST_BACKWARD})
    _history = Remembered(lambda hook: GradientHistory(hook.history, hook.projection), by_options=True)
    _step = Remembered(int)
    metrics = "".join(LAG_ROWS + WINDOW_ROWS) + RANK

    def __init__(self, *, history: int = 60, every: int = 2000, projection: int = 0, memory: int | None = None) -> None:
        require(history >= 2, f"batch_dynamics.history is {history}; lag 1 needs at least 2 gradients.")
        limit = f"batch_dynamics.history, the length of a burst ({history} steps)"
        require(every > history, f"batch_dynamics.every is {every}; it must be more than {limit}.")
        check_dimensions("batch_dynamics.projection", projection)
        self.history, self.projection, self.memory = history, projection, memory
        self.step_schedule = StepSchedule(mode="burst", every_n_steps=every, burst_length=history)

    def start(self, run: RunInfo) -> None:
        """Check that two consecutive steps are due, and that the gradients fit into the memory.

        Raises:
            UnsuitableError: if one of these conditions does not hold.
        """
        is_due = self.step_schedule.is_due
        if not any(is_due(step) and is_due(step + 1) for step in range(1, run.steps)):
            raise UnsuitableError(
                f"Hook 'batch_dynamics' compares the gradients of consecutive steps, but no two consecutive steps are "
                f"due in the {run.steps} steps of this run under {self.step_schedule}; train for more steps."
            )
        check_memory(self.name, self.memory, self._history.capacity, run.model, self._history.projection)

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Keep this step's gradient; return the metrics of the burst so far at the steps that report."""
        is_skipped = is_overflowed(ctx)  # by the loss scaler
        if ctx.step != self._step + 1 or is_skipped:
            self._history.reset()  # its gradients and later ones would not be consecutive
        if not is_skipped:
            self._history.append(ctx.model)
        self._step = ctx.step
        ends_burst = not self.step_schedule.is_due(ctx.step + 1)
        count = self._history.count
        metrics = self._measure() if count > 1 and (ends_burst or count in LENGTHS or count % INTERVAL == 0) else {}
        if ends_burst:
            self._history.reset()
        return metrics

    def _measure(self) -> Metrics:
        gram = self._history.gram()
        # The eigenvalues of XXᵀ are σ², σ the singular values of the gradients as rows of X; shape (k,).
        values = spectrum(gram, self._history.resolution)[0].sqrt()
        lags = {f"autocorrelation_lag_{n}": autocorrelation(gram, n) for n in LAGS if n < len(gram)}
        windows = {f"accumulation_efficiency_{n}": accumulation_efficiency(gram, n) for n in WINDOWS if n <= len(gram)}
        ranks = {"effective_rank": effective_rank(values), "leading_share": leading_share(values)}
        return {**lags, **windows, **ranks, "gradients": len(gram)}
