"""Effects of changes, estimated from pairs of changed and unchanged branches, with their errors and their null."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..student_t import critical_t

CONFIDENCE = 0.95
ORDINARY_CONFIDENCE = 0.99
"""Confidence of the interval around ordinary rises, which are skewed to the right in most trainings."""
DECISIVE_SHARE = 0.5
"""Smallest share of the rise that a change removes if it is to be the cause; also that of the verdict on spikes."""
LARGEST_RISE = 10.0
"""Largest counted rise of a loss, in multiples of the loss before the branches: beyond it the training is lost."""
Measure = Literal["rise", "loss"]


@dataclass(frozen=True)
class Effect:
    """The effect of a change on the loss, with its error."""

    value: float
    """The removed share of the rise, or the further fall of the loss as a share of the loss."""
    error: float
    """Half the width of the 95 % interval around ``value``."""
    null: float
    """The root mean square of the effects of unchanged branches in another order of the data."""
    measure: Measure
    """``rise``: the unchanged branches rise, and ``value`` is the removed share; ``loss``: they do not."""
    unchanged: float
    """The mean rise of the unchanged branches, as a share of the loss."""
    pairs: Sequence[tuple[float, float]]
    """The rises of each unchanged branch and of its changed one."""
    is_unusual: bool
    """Whether the unchanged branches rise more than ordinary batches do by chance; false if none were measured."""

    @property
    def is_lost(self) -> bool:
        """Whether the loss of the unchanged branches rises beyond the counted range, where steps have no order."""
        return self.unchanged > LARGEST_RISE / 2

    def is_decisive(self, trivial: float = 0.0, fall_factor: float = 2.0) -> bool | None:
        """Return whether the change removes the problem; ``None`` if the branches cannot decide.

        Args:
            trivial: the share of a rise that the change may remove without being its cause.
            fall_factor: without a rise, the loss must fall at least this many times as fast as without the change.
        """
        if self.measure == "rise":
            low, high = self.value - self.error, self.value + self.error
            if not math.isfinite(high):
                return None
            if high < DECISIVE_SHARE or high <= trivial:
                return False
            return True if low > trivial and self.value >= max(DECISIVE_SHARE, self.null) else None
        # Both must hold: E[r − c] > 0 and E[k·r − c] > 0. Each is tested alone, so the level of both is that of one.
        rises, others = np.array(self.pairs, dtype=np.float64).T
        gains = [rises - others, fall_factor * rises - others]
        if any(gain.mean() + _half_width(gain) <= 0 for gain in gains):
            return False
        is_gain = all(gain.mean() - _half_width(gain) > 0 for gain in gains)
        return True if is_gain and self.value > self.null else None


def effect_of(
    unchanged: Sequence[float], changed: Sequence[float], scale: float, ordinary: Sequence[float] | None = None
) -> Effect:
    """Return the effect of a change from its branches, of which the j-th of both kinds share their batches.

    With the rises r_j of unchanged branches, c_j of changed ones, d_j = r_j − c_j and B pairs:

    * if mean(r) > t·s(r)/√B, the effect is e = mean(d)/mean(r), with the error t·s(d − e·r)/(√B·mean(r)), the delta
      method for a ratio of means;
    * otherwise it is e = mean(d)/scale, with the error t·s(d)/(√B·scale).

    t is the 95 % quantile of Student's t with B − 1 degrees of freedom, s the standard deviation.

    Branches about an event share its batch, whose ordinary luck is not in s(r). Their rise must also exceed what
    ordinary batches o₁ … o_n give by chance: all o, and mean(o) + t·s(o)·√(1 + 1/n) with the 99 % quantile of
    n − 1 degrees of freedom.

    Args:
        unchanged: the rises of the loss in unchanged branches, at least two.
        changed: the rises in the changed branches, in the same order.
        scale: the mean size of the loss before the branches.
        ordinary: for an event, the rises that ordinary batches in its place give by chance.
    """
    rises, others = np.array(unchanged, dtype=np.float64), np.array(changed, dtype=np.float64)
    differences = rises - others
    mean_rise = float(rises.mean())
    is_unusual = ordinary is not None and _exceeds(mean_rise, np.array(ordinary, dtype=np.float64))
    is_rise = mean_rise > max(_half_width(rises), 1e-6 * scale) and (is_unusual or ordinary is None)
    unit = mean_rise if is_rise else scale
    value = float(differences.mean()) / unit
    residuals = differences - value * rises if is_rise else differences
    return Effect(
        value=value,
        error=_half_width(residuals) / unit,
        null=float(np.sqrt(np.mean(null_effects(unchanged) ** 2))) / unit,
        measure="rise" if is_rise else "loss",
        unchanged=mean_rise / scale,
        pairs=[*zip(rises.tolist(), others.tolist(), strict=True)],
        is_unusual=is_unusual,
    )


def _exceeds(value: float, ordinary: "np.typing.NDArray[np.float64]") -> bool:
    """Return whether a value is above all ordinary ones, and above the 99 % interval of one more of them."""
    count = len(ordinary)
    if count < 2:
        return False
    # The rank keeps the level for skewed losses, the interval for few values.
    half = critical_t(count - 1, ORDINARY_CONFIDENCE) * float(ordinary.std(ddof=1)) * math.sqrt(1 + 1 / count)
    return value > max(float(ordinary.max()), float(ordinary.mean()) + half)


def null_effects(unchanged: Sequence[float]) -> "np.typing.NDArray[np.float64]":
    """Return by how much the rise of each unchanged branch is below the mean of the others: shape (branches,)."""
    rises = np.array(unchanged, dtype=np.float64)
    # mean of the others − r_j = (Σr − r_j)/(B − 1) − r_j = (mean(r) − r_j)·B/(B − 1)
    return np.asarray((rises.mean() - rises) * len(rises) / (len(rises) - 1))


def _half_width(values: "np.typing.NDArray[np.float64]") -> float:
    """Return half the width of the 95 % interval of a mean."""
    return critical_t(len(values) - 1, CONFIDENCE) * float(values.std(ddof=1)) / math.sqrt(len(values))
