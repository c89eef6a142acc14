"""Verdicts of branches: the cause of a spike, and whether a change confirms or refutes the cause of a finding."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .changes import CHANGES, TrialChange
from .effects import DECISIVE_SHARE, Effect, Excess, Measure
from .usual_values import HARMFUL_SPREADS, chance_of, is_beyond, median_and_spread, median_outcome, outcomes, recent

DATA_MARGIN = 0.1
"""If no update branch removes more of the harm than fresh batches plus this share, the data are the cause."""
HARMFUL_RATIO = 1.5
"""The watched quantity must be this many times its largest earlier value, and its largest value on fresh batches."""
UPDATES = ("usual_rate", "half_rate", "clipped", "fresh_state")
"""Branches on the same batch with another update; the first counts of those that remove as much."""
VERDICTS = {True: "confirmed", False: "refuted", None: "inconclusive"}


@dataclass(frozen=True)
class Verdict:
    """The cause, ``None`` if inconclusive, and a sentence with its evidence."""

    cause: str | None
    sentence: str


def is_damaged_before(branch_values: Mapping[str, Any], usual: Mapping[str, Sequence[float]]) -> bool:
    """Return whether the losses of fresh batches are already unusual at the state before the step."""
    fresh = branch_values["loss"].get("fresh", [])
    return bool(fresh) and is_beyond(median_outcome(fresh), recent(usual["loss"]))


def harms(
    branch_values: Mapping[str, Any],
    own: Mapping[str, float],
    usual: Mapping[str, Sequence[float]],
    watched: str = "it",
) -> list[Excess]:
    """Return the unusually high values of a step (effect on the next losses, loss, watched size), most extreme first.

    Args:
        branch_values: the values that the hook ``what_if`` recorded, by metric and branch.
        own: the step's loss, effect and size in the run.
        usual: the values of the earlier steps, of which the newest count; their effect is that on the next batch only.
        watched: the description of the watched quantity.
    """
    effects = branch_values["effect"]
    own = {**own, "effect": effects["run" if "run" in effects else "as_it_was"]}
    verb = "rise by" if np.isfinite(median_outcome(own["effect"])) else "are"
    words = {"effect": f"the losses of the next batches {verb}", "loss": "the loss of the step is"}
    words["size"] = f"the {watched} is"
    result = []
    for metric in [name for name in words if name in own and name in branch_values]:
        run, earlier = median_outcome(own[metric]), recent(usual[metric])
        fresh = outcomes(branch_values[metric].get("fresh", []))
        middle, spread = map(float, median_and_spread(earlier))
        if metric == "size":  # weak evidence alone, so it has a stricter condition
            is_bad = run > HARMFUL_RATIO * max([*outcomes(earlier), *fresh])
        else:
            is_bad = is_beyond(run, earlier) or (is_beyond(run, fresh) and run > middle + HARMFUL_SPREADS * spread)
        if is_bad:
            medians = {name: median_outcome(value) for name, value in branch_values[metric].items()}
            scale = spread or abs(middle) or 1.0
            result.append(Excess(metric, words[metric], run, middle, medians, chance_of(run, fresh), scale))
    return sorted(result, key=lambda harm: (harm.usual - harm.run) / harm.spread)


def verdict(branch_values: Mapping[str, Any], bad: Sequence[Excess], rows: Sequence[str]) -> Verdict:
    """Return the verdict of the branches; ``rows`` are the names of the rows omitted in the branch ``without_rows``."""
    if not bad:
        reason = "the effect of the step on the loss is within the range of fresh batches or earlier steps"
        return Verdict(None, f"Inconclusive: {reason}.")
    written = next(filter(None, (_written(branch_values, harm) for harm in bad)), None)
    judges = (_fault, _not_repeated, _precision, *(() if written else (_data, _update)))
    judged: list[Verdict | None] = [judge(branch_values, harm, rows) for harm in bad for judge in judges]
    verdicts = [found for found in (*judged, written) if found is not None]
    if verdicts:
        return next((verdict for verdict in verdicts if verdict.cause is not None), verdicts[0])
    harm = bad[0]
    tried = ", ".join(f"{name.replace('_', ' ')} {harm.value_text(name)}" for name in harm.branches if name != "run")
    sentence = f"Inconclusive: {harm.statement}, and no branch removes half of that ({tried})."
    return Verdict(None, sentence)


def _fault(branch_values: Mapping[str, Any], harm: Excess, rows: Sequence[str]) -> Verdict | None:
    if harm.removed_share("element_restored") < DECISIVE_SHARE:
        return None
    ((name, (place, old, new)),) = branch_values["element"].items()
    return Verdict(
        "fault",
        f"Fault: one element of {name} (number {int(place)}) went from {old:.4g} to {new:.4g} in this step, far more "
        f"than any other; {harm.statement}, and {harm.value_text('element_restored')} after restoring it.",
    )


def _not_repeated(branch_values: Mapping[str, Any], harm: Excess, rows: Sequence[str]) -> Verdict | None:
    """Judge a harm that repeating the step does not reproduce: chance if its random draws differ, else inconclusive."""
    if harm.removed_share("as_it_was") < DECISIVE_SHARE:
        return None
    again = outcomes(branch_values["effect"]["as_it_was"])
    numbers = f"{harm.statement}, and {harm.value_text('as_it_was')} (the median of {len(again)}) when the step"
    if again.max() > again.min():
        return Verdict("chance", f"Chance: {numbers} is repeated with other dropout masks.")
    sentence = f"Inconclusive: {numbers} is repeated from the same state, so the step itself is sound."
    return Verdict(None, sentence)


def _precision(branch_values: Mapping[str, Any], harm: Excess, rows: Sequence[str]) -> Verdict | None:
    names = ("float32", "float64") if branch_values["low_precision"] else ("float64",)
    if (name := next(filter(harm.is_decisive, names), None)) is None:
        return None
    layer = "layer_in_float32"
    where = f", and {harm.value_text(layer)} with that layer alone" if layer in harm.branches else ""
    sentence = f"Precision: {harm.statement}, {harm.value_text(name)} {CHANGES[name].title}{where}."
    return Verdict("precision", sentence)


def precision_verdict(branch_values: Mapping[str, Any], bad: Sequence[Excess]) -> Verdict | None:
    """Return the verdict that precision is the cause, if a wider one removes a harm."""
    return next(filter(None, (_precision(branch_values, harm, []) for harm in bad)), None)


def _written(branch_values: Mapping[str, Any], harm: Excess) -> Verdict | None:
    """Judge a rise of the next losses that remains at a learning rate of 0, where the optimizer changes no weight.

    Losses that are not finite there show nothing: 0 times a gradient that is not finite is NaN.
    """
    is_measured = np.isfinite(harm.branches.get("zero_rate", np.inf))
    if harm.metric != "effect" or not is_measured or harm.removed_share("zero_rate") >= DECISIVE_SHARE:
        return None
    return Verdict(
        None,
        f"Inconclusive: {harm.statement}, and {harm.value_text('zero_rate')} at a learning rate of 0, so "
        "something other than the optimizer's update changes weights in this step.",
    )


def _data(branch_values: Mapping[str, Any], harm: Excess, rows: Sequence[str]) -> Verdict | None:
    # One fresh batch may be as bad, since a bad row returns in the next epoch.
    best_update = max(map(harm.extra_removed_share, UPDATES))
    if harm.is_common or harm.extra_removed_share("fresh") < max(DECISIVE_SHARE, best_update - DATA_MARGIN):
        return None
    names = ""
    if harm.is_decisive("without_rows"):
        names = f", and {harm.value_text('without_rows')} without {', '.join(rows)}"
    return Verdict(
        "data",
        f"Data: {harm.statement} on this batch, {harm.value_text('fresh')} on fresh ones (the median; as "
        f"bad as this one: p = {harm.by_chance:.2g}){names}.",
    )


def _update(branch_values: Mapping[str, Any], harm: Excess, rows: Sequence[str]) -> Verdict | None:
    # The branch at the usual learning rate exists only if the learning rate is unusual at this step.
    best = "usual_rate" if harm.is_decisive("usual_rate") else max(UPDATES, key=harm.extra_removed_share)
    if not harm.is_decisive(best):
        return None
    cause = CHANGES[best].cause
    return Verdict(
        cause,
        f"{cause.capitalize()}: {harm.statement}, as on fresh batches ({harm.value_text('fresh')}), and "
        f"{harm.value_text(best)} {CHANGES[best].title}.",
    )


@dataclass(frozen=True)
class ChangeTest:
    """A change that was tried in branches of the training, each rolled back.

    Args:
        change: the change in words.
        effect: the removed share of the rise of the loss, or (``of`` is ``"loss"``) its further fall as a share of it.
        error: half the width of the 95 % interval around ``effect``.
        null: the root mean square of the effects of unchanged branches.
        branches: the number of changed branches, and of unchanged ones.
        confirms: whether the change removes the problem; ``None`` if the branches cannot decide.
        of: ``"rise"`` if the loss of the unchanged branches rises, else ``"loss"``.
    """

    change: str
    effect: float
    error: float
    null: float
    branches: int
    confirms: bool | None
    of: Measure = "rise"

    def as_dict(self) -> dict[str, Any]:
        """Return the test as plain values."""
        numbers = {name: float(f"{getattr(self, name):.4g}") for name in ("effect", "error", "null")}
        counts = {"branches": self.branches, "confirms": self.confirms, "of": self.of}
        return {"change": self.change, **numbers, **counts}

    @property
    def sentence(self) -> str:
        """The test in one sentence."""
        if self.of == "rise":
            verb = "removes {} of the rise" if self.effect >= 0 else "adds {} to the rise"
            verb = "removes more than the rise, {} of it," if self.effect > 1 else verb
        else:
            verb = "lowers the loss by a further {}" if self.effect >= 0 else "raises the loss by {}"
        numbers = f"±{_percent(self.error)}, null {_percent(self.null)}, {self.branches} branches"
        return f"{VERDICTS[self.confirms]}: {self.change} {verb.format(_percent(abs(self.effect)))} ({numbers})"


def _percent(value: float) -> str:
    """Return a share as a percentage of two digits."""
    percentage = 100 * value
    return f"{percentage:.0f} %" if percentage >= 10 or percentage == 0 else f"{percentage:.2g} %"


def change_tests(
    changes: Iterable[TrialChange], effects: Mapping[str, Effect], *, of_event: bool = False
) -> Sequence[ChangeTest]:
    """Return the tests of a finding from the effects of the changes, by name.

    If a specific change removes the problem, smaller steps do not count as its cause, since they lessen any harm. If
    the finding is about an event and the unchanged branches do not rise more than ordinary batches do by chance, they
    do not repeat it, and nothing is decided.
    """
    pairs = [(item, effects[item.name]) for item in changes if item.name in effects]
    confirms = {item.name: _confirms(item, effect, of_event=of_event) for item, effect in pairs}
    if any(confirms[item.name] for item, _ in pairs if not item.is_unspecific):
        confirms |= {item.name: None for item, _ in pairs if item.is_unspecific and confirms[item.name]}
    return [
        ChangeTest(
            item.words, effect.value, effect.error, effect.null, len(effect.pairs), confirms[item.name], effect.measure
        )
        for item, effect in pairs
    ]


def _confirms(change: TrialChange, effect: Effect, *, of_event: bool) -> bool | None:
    """Return whether the effect of a change alone confirms it; ``None`` if it cannot decide."""
    if of_event and (effect.measure == "loss" or not effect.is_unusual):
        return None
    is_decisive = effect.is_decisive(change.trivial_share, change.fall_factor)
    # A learning rate that is too high by far is still too high after the change.
    return is_decisive or None if change.is_unspecific and effect.is_lost else is_decisive
