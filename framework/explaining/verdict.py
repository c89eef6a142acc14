"""The cause that the branches of a step show, in one sentence with its numbers; none where chance covers all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LEVEL = 0.05
REMOVES = 0.5
"""The share of the harm that a branch must remove to show its cause."""
SLACK = 0.1
"""How much more than fresh batches another branch must remove to be the cause in place of the data."""
FAR = 3.0
"""Spreads beyond the middle of what is usual from which on something is harm."""
MOST = 1e9
"""Spreads beyond the usual that count at most; infinite harm counts as much."""
TIMES = 1.5
"""How many times its largest value before, and on fresh batches, what is watched must be."""
STATES = {
    "usual_rate": ("step size", "at the usual learning rate"),
    "half_rate": ("step size", "at half the learning rate"),
    "clipped": ("step size", "with gradients clipped at their usual norm"),
    "fresh_state": ("optimizer state", "with an optimizer that remembers nothing"),
}
"""Branches on the same batch that change the update: the cause that each shows, and its words."""


@dataclass(frozen=True)
class Verdict:
    """The cause, or ``None`` where it cannot be told, and the sentence that says on what it rests."""

    cause: str | None
    sentence: str


@dataclass(frozen=True)
class Harm:
    """One number of the step that is unusually high, with what it is in each branch."""

    words: str
    run: float
    usual: float
    """What it would have been."""
    branches: Mapping[str, float]
    """The median of each branch."""
    by_chance: float
    """How often fresh batches, of which the run's counts as one, are as bad."""
    spread: float
    """Of what is usual."""

    def removed(self, branch: str) -> float:
        """Return the share of the harm that a branch removes; −∞ where there is no such branch.

        Harm counts by the logarithm of 1 + its spreads beyond the usual: a blow-up that is a tenth of another is one.
        """
        value = self.branches.get(branch, np.inf)
        return 1 - self._size(value) / self._size(self.run) if np.isfinite(value) else -np.inf

    def _size(self, value: float) -> float:
        return float(np.log1p(min(max(0.0, (value - self.usual) / self.spread), MOST)))

    def gained(self, branch: str) -> float:
        """Return the share that it removes beyond what taking the same step again does."""
        return self.removed(branch) - max(0.0, self.removed("as_it_was"))

    def told(self, branch: str) -> str:
        """Return the number in a branch, as text."""
        return f"{self.branches[branch]:.3g}"


def middle_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the median, and 1.4826 times the median distance from it, of what is finite."""
    finite = np.array([value for value in values if np.isfinite(value)] or [np.inf])
    middle = float(np.median(finite))
    return middle, 1.4826 * float(np.median(np.abs(finite - middle))) if np.isfinite(middle) else 0.0


def is_beyond(value: float, usual: Sequence[float]) -> bool:
    """Return whether a value is above the others by rank and by far; NaN counts as infinite."""
    value = np.inf if np.isnan(value) else value
    above = sum(not each < value for each in usual)
    middle, spread = middle_and_spread(usual)
    return (above + 1) / (len(usual) + 1) <= LEVEL and value > middle + FAR * spread


def harms(
    found: Mapping[str, Any], own: Mapping[str, float], usual: Mapping[str, Sequence[float]], watched: str = "it"
) -> list[Harm]:
    """Return what is unusually high of a step, the furthest first: effect on the next losses, loss, what was watched.

    Args:
        found: what the hook ``what_if`` recorded, by metric and branch.
        own: the step's loss, effect and size in the run.
        usual: those of the steps before; the effect there is that on the next batch alone.
        watched: what the size is of, in words.
    """
    own = {**own, "effect": found["effect"].get("run", np.median(found["effect"]["as_it_was"]))}
    words = {"effect": "the losses of the next batches rise by", "loss": "the loss of the step is"}
    words["size"] = f"the {watched} is"
    result = []
    for metric in [each for each in words if each in own and each in found]:
        run = np.inf if np.isnan(own[metric]) else float(own[metric])
        before, fresh = usual[metric], found[metric].get("fresh", [])
        middle, spread = middle_and_spread(before)
        if metric == "size":  # which alone says little
            is_bad = run > TIMES * max([*before, *fresh])
        else:
            is_bad = is_beyond(run, before) or (is_beyond(run, fresh) and run > middle + FAR * spread)
        if is_bad:
            medians = {name: float(np.median(value)) for name, value in found[metric].items()}
            by_chance = (sum(not each < run for each in fresh) + 1) / (len(fresh) + 1)
            result.append(Harm(words[metric], run, middle, medians, by_chance, spread or abs(middle) or 1.0))
    return sorted(result, key=lambda harm: (harm.usual - harm.run) / harm.spread)


def verdict(found: Mapping[str, Any], bad: Sequence[Harm], rows: Sequence[str]) -> Verdict:
    """Judge by the branches; ``rows`` names those that were left out in the branch ``without_rows``."""
    if not bad:
        return Verdict(
            None,
            "It cannot be told: the step did nothing to the loss that fresh batches, or steps before it, do not do.",
        )
    judges = (_fault, _not_again, _precision, _data, _update)
    told = [verdict for harm in bad for judge in judges if (verdict := judge(found, harm, rows)) is not None]
    if told:
        return next((verdict for verdict in told if verdict.cause is not None), told[0])
    harm = bad[0]
    tried = ", ".join(f"{name.replace('_', ' ')} {harm.told(name)}" for name in harm.branches if name != "run")
    sentence = f"It cannot be told: {harm.words} {harm.run:.3g}, and no branch removes half of that ({tried})."
    return Verdict(None, sentence)


def _fault(found: Mapping[str, Any], harm: Harm, rows: Sequence[str]) -> Verdict | None:
    if harm.removed("element_restored") < REMOVES:
        return None
    ((name, (place, was, now)),) = found["element"].items()
    return Verdict(
        "fault",
        f"Fault: one element of {name} (number {int(place)}) went from {was:.4g} to {now:.4g} in this step, far more "
        f"than any other; {harm.words} {harm.run:.3g}, and {harm.told('element_restored')} with it put back.",
    )


def _not_again(found: Mapping[str, Any], harm: Harm, rows: Sequence[str]) -> Verdict | None:
    """Judge a harm that the same step does not do again: chance where its draws differ, else nothing is shown."""
    if harm.removed("as_it_was") < REMOVES:
        return None
    again = found["effect"]["as_it_was"]
    numbers = f"{harm.words} {harm.run:.3g}, and {harm.told('as_it_was')} (the median of {len(again)}) where the step"
    if max(again) > min(again):
        return Verdict("chance", f"Chance: {numbers} is taken again with other dropout masks.")
    sentence = f"It cannot be told: {numbers} is taken again from the same state, so the step itself is sound."
    return Verdict(None, sentence)


def _precision(found: Mapping[str, Any], harm: Harm, rows: Sequence[str]) -> Verdict | None:
    names = ("float32", "float64") if found["low_precision"] else ("float64",)
    if (name := next((name for name in names if harm.gained(name) >= REMOVES), None)) is None:
        return None
    layer = "layer_in_float32"
    where = f", and {harm.told(layer)} with that layer alone" if layer in harm.branches else ""
    sentence = f"Precision: {harm.words} {harm.run:.3g}, {harm.told(name)} with everything in {name}{where}."
    return Verdict("precision", sentence)


def _data(found: Mapping[str, Any], harm: Harm, rows: Sequence[str]) -> Verdict | None:
    # One batch as bad may be there: a bad row comes again in the epoch after.
    if harm.by_chance > LEVEL or harm.gained("fresh") < max(REMOVES, max(map(harm.gained, STATES)) - SLACK):
        return None
    names = ""
    if harm.gained("without_rows") >= REMOVES:
        names = f", and {harm.told('without_rows')} without {', '.join(rows)}"
    return Verdict(
        "data",
        f"Data: {harm.words} {harm.run:.3g} on this batch, {harm.told('fresh')} on fresh ones (the median; as bad as "
        f"this one: p = {harm.by_chance:.2g}){names}.",
    )


def _update(found: Mapping[str, Any], harm: Harm, rows: Sequence[str]) -> Verdict | None:
    best = max(STATES, key=harm.gained)
    if harm.gained("usual_rate") >= REMOVES:  # it is there only where the rate has left its history
        best = "usual_rate"
    if harm.gained(best) < REMOVES:
        return None
    cause, words = STATES[best]
    return Verdict(
        cause,
        f"{cause.capitalize()}: {harm.words} {harm.run:.3g}, as on fresh batches ({harm.told('fresh')}), and "
        f"{harm.told(best)} {words}.",
    )
