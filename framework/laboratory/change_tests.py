"""Results of tests: the effect of one change in branches of a training, and what it means for a finding."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .changes import Change
from .effects import Effect, Measure

VERDICTS = {True: "confirmed", False: "refuted", None: "inconclusive"}


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
        numbers = {name: _rounded(getattr(self, name)) for name in ("effect", "error", "null")}
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


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _percent(value: float) -> str:
    """Return a share as a percentage of two digits."""
    percentage = 100 * value
    return f"{percentage:.0f} %" if percentage >= 10 or percentage == 0 else f"{percentage:.2g} %"


def change_tests(
    changes: Iterable[Change], effects: Mapping[str, Effect], branches: int, *, of_event: bool = False
) -> Sequence[ChangeTest]:
    """Return the tests of a finding from the effects of the changes, by name.

    If a specific change removes the problem, smaller steps do not count as its cause, since they lessen any harm. If
    the finding is about an event and the unchanged branches do not rise more than ordinary batches do by chance, they
    do not repeat it, and nothing is decided.
    """
    pairs = [(item, effects[item.name]) for item in changes if item.name in effects]
    verdicts = {item.name: effect.is_decisive(item.trivial_share, item.fall_factor) for item, effect in pairs}
    # A learning rate that is too high by far is still too high after the change.
    open_names = [item.name for item, effect in pairs if item.is_unspecific and effect.is_lost]
    verdicts |= {name: verdicts[name] or None for name in open_names}
    if of_event:
        verdicts |= {item.name: None for item, effect in pairs if effect.measure == "loss" or not effect.is_unusual}
    if any(verdicts[item.name] for item, _ in pairs if not item.is_unspecific):
        verdicts |= {item.name: None for item, _ in pairs if item.is_unspecific and verdicts[item.name]}
    return [
        ChangeTest(item.words, effect.value, effect.error, effect.null, branches, verdicts[item.name], effect.measure)
        for item, effect in pairs
    ]
