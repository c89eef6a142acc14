"""How the gradients of consecutive steps relate: autocorrelation, accumulation efficiency, rank."""

from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, StepSchedule, TrainingHook
from loopscope.errors import UnsuitableError, require
from loopscope.hooks import Metrics, RunInfo
from torch import Tensor

from ..measures import effective_rank, leading_share
from .gradient_history import GradientHistory, check_dimensions, refuse_above, spectrum

LAGS = (1, 2, 5, 10, 20, 50)
WINDOWS = (5, 10, 20, 50)
LENGTHS = frozenset({lag + 1 for lag in LAGS} | set(WINDOWS))
"""Numbers of consecutive gradients at which a lag or a window can be measured for the first time."""
INTERVAL = 10


def autocorrelation(gram: Tensor, lag: int) -> Tensor:
    """Return the mean of cos(g_t, g_(t−lag)) over all pairs, zero-dimensional; NaN if a gradient is zero.

    ``gram`` has shape (k, k), k > lag: the inner products of k consecutive gradients in their order.

    >>> from torch import tensor
    >>> autocorrelation(tensor([[4.0, 1.0], [1.0, 1.0]]), 1).item()
    0.5
    """
    norms = gram.diagonal().sqrt()
    return (gram.diagonal(lag) / (norms[lag:] * norms[:-lag])).mean()


def accumulation_efficiency(gram: Tensor, window: int) -> Tensor:
    """Return ‖Σg‖/Σ‖g‖ over the newest ``window`` gradients, zero-dimensional; NaN if all of them are zero.

    ``gram`` is that of :func:`autocorrelation`, k ≥ window: ‖Σg‖² is the sum of its entries.

    >>> from torch import eye
    >>> accumulation_efficiency(eye(4), 4).item()
    0.5
    """
    newest = gram[-window:, -window:]
    return newest.sum().clamp(min=0).sqrt() / newest.diagonal().sqrt().sum()


AUTOCORRELATION = """
    autocorrelation_lag_{lag} | mean of cos(g_t, g_(t−{lag})) over the k − {lag} pairs among the k gradients | [−1, 1]
        | About 1/(1+r) for batches of noise-to-signal energy r if the weights stand still. {contrast}
"""
FIRST_LAG = "Negative: each step overshoots, and the next one pulls back."
LATER_LAG = "Below lag 1: the gradient turns within {} steps. Negative: it swings back after so many."
LAG_ROWS = [AUTOCORRELATION.format(lag=lag, contrast=LATER_LAG.format(lag) if lag > 1 else FIRST_LAG) for lag in LAGS]
EFFICIENCY = """
    accumulation_efficiency_{window} | ‖Σg‖₂ / Σ‖g‖₂ over the newest {window} gradients | [0, 1]
        | 1: all point one way. 1/√{window} = {orthogonal:.2f}: they are orthogonal, as noise is, and accumulating
        them averages it out. Below that: they cancel.
"""
WINDOW_ROWS = [EFFICIENCY.format(window=window, orthogonal=window**-0.5) for window in WINDOWS]
RANK = """
    effective_rank | exp(−Σ p ln p), p = σ/Σσ, σ the singular values of the k gradients as rows; σ² ≤ k·ε·max σ² counts
        as 0, ε the rounding error of their dtype | [1, k] | How many directions the gradients of successive batches
        have. Near k: each batch pulls its own way; far below: they share a few directions. Compare at equal k.
    leading_share | max σ² / Σσ² | [1/k, 1]
        | The share of the gradients' energy along one direction. Near 1: every batch says the same.
    gradients | k | [2, history] | How many consecutive gradients the numbers of this step rest on.
"""


@HookRegistry.register
class BatchDynamics(TrainingHook):
    """Measure how the gradients of consecutive steps relate: autocorrelation, accumulation efficiency and rank.

    Gradients of up to ``history`` consecutive steps, as POST_BACKWARD sees them (before clipping), are kept during a
    burst and forgotten after it. A burst reports when a lag or a window first has enough gradients, then every 10
    steps and at its end; until then that lag or window is left out.

    Memory: ``history`` × n × 4 bytes while a burst lasts, n the number of trainable elements (113 MiB for 60 gradients
    of half a million), and one gradient more while it is taken; a model for which that exceeds ``memory`` is refused.
    With ``projection`` = d it is ``history`` × d × 4 bytes: each gradient is replaced by a count sketch, the same in
    every run. A cosine c then has a standard error of (1 − c²)/√d (0.0078 at c = 0 and d = 16384), a norm one of
    1/√(2d) of itself, and singular values lie within a factor of about 1 ± √(history/d) of the true ones.

    Assumes that the weights move little within a burst: the gradients then differ by their batches, and the numbers say
    what larger batches would give; where they move much, they say how fast the landscape turns. Large gradients weigh
    more in efficiency and rank, not in the autocorrelation.

    Args:
        history: consecutive gradients that are kept, and steps of a burst.
        every: steps from the beginning of one burst to that of the next, more than ``history``.
        projection: dimensions of the random projection, a power of two; 0: the gradients themselves.
        memory: MiB that the kept gradients may take.
    """

    name = "batch_dynamics"
    hook_points = frozenset({HookPoint.POST_BACKWARD})
    _history = Remembered(lambda hook: GradientHistory(hook.history, hook.projection), by_options=True)
    _step = Remembered(int)
    metrics = "".join(LAG_ROWS + WINDOW_ROWS) + RANK

    def __init__(self, *, history: int = 60, every: int = 2000, projection: int = 0, memory: int = 1024) -> None:
        require(history >= 2, f"batch_dynamics.history is {history}; lag 1 needs at least 2 gradients.")
        burst = f"batch_dynamics.history, the steps of one burst ({history})"
        more = f"batch_dynamics.every is {every}; it must be more than {burst}, or no burst would ever end."
        require(every > history, more)
        check_dimensions("batch_dynamics.projection", projection)
        self.history, self.projection, self.memory = history, projection, memory
        self.step_schedule = StepSchedule(mode="burst", every_n_steps=every, burst_length=history)

    def start(self, run: RunInfo) -> None:
        """Refuse a run without two steps in a row, and a model whose gradients exceed the memory."""
        due = self.step_schedule.is_due
        if not any(due(step) and due(step + 1) for step in range(1, run.steps)):
            raise UnsuitableError(
                f"Hook 'batch_dynamics' compares the gradients of consecutive steps, and it sees no two in a row in "
                f"the {run.steps} steps of this run under {self.step_schedule}."
            )
        refuse_above(self.name, self.memory, self._history.capacity, run.model, self._history.projection)

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Keep this step's gradient; return what the burst so far says, at the steps at which it reports."""
        if ctx.step != self._step + 1:
            self._history.reset()
        self._history.append(ctx.model)
        self._step = ctx.step
        last = not self.step_schedule.is_due(ctx.step + 1)
        count = self._history.count
        metrics = self._measured() if count > 1 and (last or count in LENGTHS or count % INTERVAL == 0) else {}
        if last:
            self._history.reset()
        return metrics

    def _measured(self) -> Metrics:
        gram = self._history.gram()
        values = spectrum(gram, self._history.resolution)[0].sqrt()
        lags = {f"autocorrelation_lag_{n}": autocorrelation(gram, n) for n in LAGS if n < len(gram)}
        windows = {f"accumulation_efficiency_{n}": accumulation_efficiency(gram, n) for n in WINDOWS if n <= len(gram)}
        ranks = {"effective_rank": effective_rank(values), "leading_share": leading_share(values)}
        return {**lags, **windows, **ranks, "gradients": len(gram)}
