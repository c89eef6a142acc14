"""Effects of changes: the share of a harm that a branch removes, with its null.

A :class:`Excess` of one step is measured by branches of that step; its null is that of repetitions of the step. An
:class:`Effect` is estimated from pairs of changed and unchanged branches of several steps, with an error; its null is
that of unchanged branches.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..student_t import critical_t
from .usual_values import LEVEL, Numbers, exceeds_few

CONFIDENCE = 0.95
DECISIVE_SHARE = 0.5
"""Smallest share of a harm or a rise that a change removes if it removes the cause."""
MAX_SPREADS = 1e9
"""Upper bound of the number of spreads, also for infinite harm."""
LARGEST_RISE = 10.0
"""Largest counted rise of a loss, in multiples of the loss before the branches: beyond it the training is lost."""
Measure = Literal["rise", "loss"]


@dataclass(frozen=True)
class Excess:
    """An unusually high value of the step, with its value in each branch."""

    metric: str
    """``effect``, ``loss`` or ``size``, as in the hook ``what_if``."""
    words: str
    run: float
    usual: float
    """The median of the usual values."""
    branches: Mapping[str, float]
    """The median of each branch."""
    by_chance: float
    """The share of fresh batches, including the run's, that are at least as bad."""
    spread: float
    """The spread of the usual values."""

    def removed_share(self, branch: str) -> float:
        """Return the share of the harm that a branch removes; −∞ if the branch does not exist.

        Excess is log(1 + spreads above the usual value): on this scale a branch that only divides a divergence by ten
        has removed little of it.
        """
        if branch not in self.branches:
            return -np.inf
        # 1 − log(1 + spreads in the branch)/log(1 + spreads in the run)
        return 1 - self._size(self.branches[branch]) / self._size(self.run)

    def _size(self, value: float) -> float:
        return float(np.log1p(min(max(0.0, (value - self.usual) / self.spread), MAX_SPREADS)))

    def extra_removed_share(self, branch: str) -> float:
        """Return the share that a branch removes, less the share that repeating the same step removes."""
        return self.removed_share(branch) - max(0.0, self.removed_share("as_it_was"))

    def is_decisive(self, branch: str) -> bool:
        """Return whether a branch removes the problem."""
        return self.extra_removed_share(branch) >= DECISIVE_SHARE

    @property
    def is_common(self) -> bool:
        """Whether so many fresh batches are at least as bad that the step's own batch is no cause."""
        return self.by_chance > LEVEL

    @property
    def statement(self) -> str:
        """The harm in words."""
        return f"{self.words} {_as_text(self.run)}"

    def value_text(self, branch: str) -> str:
        """Return the value in a branch, as text."""
        return _as_text(self.branches[branch])


def _as_text(value: float) -> str:
    return f"{value:.3g}" if np.isfinite(value) else "not finite"


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
    ordinary batches o₁ … o_n give by chance (:func:`rises_by_chance`): all o, and mean(o) + t·s(o)·√(1 + 1/n) with the
    99 % quantile of n − 1 degrees of freedom.

    Args:
        unchanged: the rises of the loss in unchanged branches, at least two.
        changed: the rises in the changed branches, in the same order.
        scale: the mean size of the loss before the branches.
        ordinary: for an event, the rises that ordinary batches in its place give by chance.
    """
    rises, others = np.array(unchanged, dtype=np.float64), np.array(changed, dtype=np.float64)
    differences = rises - others
    mean_rise = float(rises.mean())
    is_unusual = ordinary is not None and exceeds_few(mean_rise, np.array(ordinary, dtype=np.float64))
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


def null_effects(unchanged: Sequence[float]) -> Numbers:
    """Return by how much the rise of each unchanged branch is below the mean of the others: shape (branches,)."""
    rises = np.array(unchanged, dtype=np.float64)
    # mean of the others − r_j = (Σr − r_j)/(B − 1) − r_j = (mean(r) − r_j)·B/(B − 1)
    return np.asarray((rises.mean() - rises) * len(rises) / (len(rises) - 1))


def rises_by_chance(lucks: Sequence[Sequence[float]], rises: Sequence[float]) -> list[float]:
    """Return the rises that ordinary batches give by chance in the place of an event, one for each batch.

    The batch of an event is one draw, which all branches share: its loss before the branches differs from the level by
    luck, and the steps with it change the loss by luck. The mean change is not luck: if every step rises, the event may
    be one of many. If all branches rise by more than the luck of losses, something other than the batches raises the
    loss, and the spread of the rises measures that: only the luck of losses is chance.

    Args:
        lucks: for each ordinary branch, the contributions of its batches' losses before the branches to a rise.
        rises: the rise of each ordinary branch over its measured steps.
    """
    chances, changes = np.array(lucks, dtype=np.float64), np.array(rises, dtype=np.float64)
    if not exceeds_few(float(changes.min()), chances.ravel()):
        chances += (changes - changes.mean())[:, None]
    return chances.ravel().tolist()


def _half_width(values: Numbers) -> float:
    """Return half the width of the 95 % interval of a mean."""
    return critical_t(len(values) - 1, CONFIDENCE) * float(values.std(ddof=1)) / math.sqrt(len(values))
