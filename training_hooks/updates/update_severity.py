"""Decision whether a conspicuous gradient or update is a fault, from the earlier checks of the same run."""

import math
import statistics
from collections.abc import Iterable, Mapping, Set

from loopscope.hooks import Remembered, Remembering

from .update_monitor import GradientDiagnostics, UpdateDiagnostics

KEPT = 9
"""Earlier norms of each parameter: enough for a median that one outlier does not move."""
GROWTH = 100.0
"""A gradient has exploded if it is this many times the median of its earlier checks. Over a training, norms move by a
factor of about 10; sums over tokens, or large targets, make every norm large from the start and are harmless."""
TINY_SHARE = 1e-4
"""A gradient has vanished only if it is below this share of the largest one: when a loss has been minimised, all
gradients are small together."""
PATIENCE = 2
"""Consecutive checks after which a gradient of exactly 0 is a fault: a factor of LoRA and the inside of a branch that
starts with zeros have none at the first step, and an expert may get no token in one."""
LOST_SHARE = 0.5
"""Share of the driven elements that rounding must remove. Norm gains near 1 always lose theirs in bfloat16."""
PEAK_SHARE = 0.1
"""Rounding counts from this share of the highest learning rate on: in warm-up and decay, small updates are intended."""


class UpdateSeverity(Remembering):
    """Selects the parameters whose condition is a fault; that of the others is a remark.

    Call the methods once per check, those about gradients before those about updates.
    """

    _norms = Remembered(dict[str, list[float]])
    """The norms of the gradients at earlier checks at which they did not explode, by parameter; at most ``KEPT``."""
    _without_gradient = Remembered(dict[str, int])
    """Consecutive checks without gradient, by parameter."""
    _largest_norm = Remembered(float)
    """The largest norm of a gradient at any earlier check."""
    _highest_rate = Remembered(float)
    _lossy_checks = Remembered(int)
    """Consecutive checks at which rounding removed most of the update."""
    _driven = Remembered(set[str], saved=False)
    """Parameters that have a gradient at this check."""

    def vanished(self, gradients: Mapping[str, GradientDiagnostics], matrices: Set[str], threshold: float) -> Set[str]:
        """Return the matrices that lost their gradient while others have one, or if no gradient was ever larger.

        Vectors are left out: a bias before a normalisation, or that of attention keys, has no gradient by construction.
        """
        vanishing = {name for name, gradient in gradients.items() if gradient.is_vanishing}
        self._driven = gradients.keys() - vanishing
        self._without_gradient = {name: self._without_gradient.get(name, 0) + 1 for name in vanishing}
        largest = max((_finite(gradient.l2_norm) for gradient in gradients.values()), default=0.0)
        has_always_vanished = max(largest, self._largest_norm) <= threshold
        self._largest_norm = max(largest, self._largest_norm)
        vanished = set()
        for name in vanishing & matrices:
            norm, lasts = gradients[name].l2_norm, self._without_gradient[name] >= PATIENCE
            is_far_below = norm <= TINY_SHARE * largest
            if (is_far_below and (lasts or norm > 0)) or (has_always_vanished and lasts):
                vanished.add(name)
        return vanished

    def exploded(self, gradients: Mapping[str, GradientDiagnostics]) -> Set[str]:
        """Return the parameters whose gradient is finite, above the threshold, and far above its earlier norms."""
        exploded = set()
        for name, gradient in gradients.items():
            earlier = self._norms.setdefault(name, [])
            if gradient.is_exploding and earlier and gradient.l2_norm >= GROWTH * statistics.median(earlier):
                exploded.add(name)
            elif gradient.is_finite:  # an exploded norm would raise the median
                self._norms[name] = [*earlier, gradient.l2_norm][-KEPT:]
        return exploded

    def frozen(self, updates: Mapping[str, UpdateDiagnostics]) -> Set[str]:
        """Return the frozen parameters that have a gradient and a learning rate, so that they should move."""
        return {
            name
            for name, update in updates.items()
            if update.is_frozen and name in self._driven and update.learning_rate != 0
        }

    def rounded_away(self, updates: Mapping[str, UpdateDiagnostics], initial_rates: Iterable[float]) -> Set[str]:
        """Return the parameters that lose their update, if that lasts and most of the model's update is lost.

        Args:
            updates: the effect of the step.
            initial_rates: the learning rates before warm-up and decay, where the optimizer knows them.
        """
        rate = max((_finite(update.learning_rate) for update in updates.values()), default=0.0)
        self._highest_rate = max(self._highest_rate, rate, *map(_finite, initial_rates), 0.0)
        driven = sum(update.driven_elements for update in updates.values())
        stuck = sum(update.stuck_elements for update in updates.values())
        is_lossy = stuck > LOST_SHARE * driven and rate >= PEAK_SHARE * self._highest_rate
        self._lossy_checks = self._lossy_checks + 1 if is_lossy else 0
        if self._lossy_checks < PATIENCE:
            return frozenset()
        return {name for name, update in updates.items() if update.is_rounded_away}


def _finite(value: float) -> float:
    """Return a number, or 0 in place of an infinite or unknown one."""
    return value if math.isfinite(value) else 0.0
