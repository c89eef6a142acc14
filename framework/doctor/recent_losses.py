"""The losses of the newest steps, from which summaries and displays take the final loss."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from ..hooks import Series, as_float

STEP_LOSSES = ("training_metrics/loss", "training_checks/loss")
"""Losses of single steps, of all steps where a loop reports them, or of those that are checked."""
MOST_RECENT = 100
"""Losses of single steps that are kept."""
NUMBERS = (int, float, bool)


class RecentLosses:
    """The newest losses of single steps, at most ``MOST_RECENT`` of each metric, with their steps."""

    def __init__(self) -> None:
        self._losses: dict[str, deque[tuple[int, float]]] = {}

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add the losses in the metrics of one emit; a loss that is no series is that of an epoch, and left out."""
        for name in STEP_LOSSES:
            series = metrics.get(name)
            if isinstance(series, Series):
                points: Sequence[tuple[int, Any]] = [*zip(series.steps, series.values, strict=True)][-MOST_RECENT:]
                losses = self._losses.setdefault(name, deque(maxlen=MOST_RECENT))
                losses.extend((int(step), as_float(loss)) for step, loss in points if isinstance(loss, NUMBERS))

    def clear(self) -> None:
        """Forget all losses, before another run."""
        self._losses.clear()

    @property
    def newest_step(self) -> int:
        """The step of the newest loss, 0 without losses."""
        recent = self._of_one_metric()
        return recent[-1][0] if recent else 0

    def _of_one_metric(self) -> Sequence[tuple[int, float]]:
        return next((self._losses[name] for name in STEP_LOSSES if self._losses.get(name)), ())

    def final_loss(self, step: int, mean: float | None, epochs: int, *, is_partial: bool = False) -> dict[str, Any]:
        """Return the final loss up to a step, of what it is the mean, and the loss of the last step, for a summary.

        After several epochs it is the mean of the last one. Otherwise, and within an epoch, it is the mean over the
        last tenth of the steps, at most ``MOST_RECENT``, so that it is not the mean since the start; of those steps
        whose losses are recorded.

        Args:
            step: the number of steps of the run.
            mean: the mean loss since the start of the last epoch or interval, or ``None``.
            epochs: the number of epochs, 0 in a loop that counts steps.
            is_partial: whether that epoch has not ended.
        """
        recent = self._of_one_metric()
        count = min(MOST_RECENT, max(1, step // 10))
        losses = [loss for at, loss in recent if at > step - count]
        over = "interval" if not epochs else "part of the epoch" if is_partial else "epoch"
        if losses and (epochs <= 1 or is_partial):
            mean = math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else losses[-1]
            part = f"{len(losses)} of the last" if len(losses) < count else "last"
            over = "last step" if count == 1 else f"{part} {count} steps"
        last = recent[-1][1] if recent and recent[-1][0] == step else None
        return {"training_loss": mean, "training_loss_over": over, "last_loss": last}
