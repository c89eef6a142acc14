"""The table of the changes that branches of a training try: the cause that each one removes, and how it is done."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_SUDDEN = frozenset({"loss-spike", "gradient-jump"})
_LARGE = _SUDDEN | {"exploding-gradients", "nonfinite"}
SYMPTOMS = _LARGE | {"loss-rising", "loss-not-falling", "no-better-than-uniform"}
"""Ids of findings that report what was measured, which no test can refute: tests look for its cause."""
EVENTS = _LARGE | {"learning-rate-jump"}
"""Ids of findings about one step; their branches start :data:`LEAD` steps before it."""
LEAD = 2
"""Steps of the run from the start of a branch to the step of an event, whose cause may be an earlier update."""
UNTESTABLE = {
    "gradients-not-zeroed": "a branch clears the gradients itself, so it cannot repeat a missing zero_grad()",
    "clipping-too-strong": "a branch does not clip as the run does",
    "rounded-updates": "a branch cannot change the precision of the weights",
}
"""Reasons why the cause of a finding cannot be tested in a branch, by its id."""


@dataclass(frozen=True, kw_only=True)
class TrialChange:
    """A change of a training, whose effect in a branch shows whether it removes the cause of a problem."""

    name: str
    """The name of the branch in records, and in the option ``changes`` of the hook ``hypothesis_test``."""
    words: str = ""
    """The change as the subject of a sentence, if findings are tested with it."""
    title: str = ""
    """What the branch does, in tables and at the end of sentences, if steps are explained with it."""
    cause: str = ""
    """The cause of a spike that the change removes."""
    findings: frozenset[str] = frozenset()
    """Ids of the findings that the change tests."""
    rate_factor: float = 1.0
    """The factor of the learning rates."""
    clips: bool = False
    """Whether gradients are clipped at their usual norm."""
    precision: Literal["float32", "float64"] | None = None
    """The dtype of torch in which passes compute at least."""
    resets_optimizer: bool = False
    """Whether the optimizer starts with zero moments and step counts."""
    weight_decay: float | None = None
    """The weight decay of all groups; ``None`` leaves it."""
    replaces_rows: bool = False
    """Whether rows that stand out are left out of the batch, or the batch of an event is replaced."""

    @property
    def is_unspecific(self) -> bool:
        """Whether the change makes all steps smaller, which lessens most kinds of harm."""
        return self.clips or self.rate_factor < 1

    @property
    def trivial_share(self) -> float:
        """The largest share of a rise that the change removes if the step does not point downhill at all.

        The loss rises by η·a + η²·b in a step of size η, b > 0. If the step points downhill, a < 0, then η·f instead of
        η removes more than 1 − f² of a rise, else at most that: a tenth of a wrong step is also less harmful.
        """
        return max(0.0, 1 - self.rate_factor**2)

    @property
    def fall_factor(self) -> float:
        """The factor by which a loss must fall faster: twice, and half of the factor of a higher learning rate.

        A loss that responds to the learning rate in proportion falls f times as fast. Any healthy training falls a
        little faster with larger steps for a while.
        """
        return max(2.0, self.rate_factor / 2)


_FAR_TOO_FAST = frozenset({"learning-rate-too-high"})
_TOO_FAST = _LARGE | _FAR_TOO_FAST | {"learning-rate-jump", "warm-up-missing", "loss-rising"}
_TOO_SLOW = frozenset({"learning-rate-too-low", "loss-not-falling", "no-better-than-uniform"})
_DECAY = frozenset({"weight-decay-too-large"})

CHANGES = {
    change.name: change
    for change in (
        TrialChange(
            name="without_rows",
            title="without the outlier rows",
            words="leaving out the rows of the event",
            findings=_LARGE,
            replaces_rows=True,
        ),
        TrialChange(
            name="float32",
            title="with everything in float32",
            words="float32 in all passes",
            cause="precision",
            findings=frozenset({"nonfinite", "loss-spike", "scaler-skips-steps", "float16-without-scaler"}),
            precision="float32",
        ),
        TrialChange(name="float64", title="with everything in float64", cause="precision", precision="float64"),
        TrialChange(name="layer_in_float32", title="with that layer in float32", precision="float32"),
        TrialChange(
            name="fresh_state",
            title="with a reset optimizer",
            words="a reset state of the optimizer",
            cause="optimizer state",
            findings=_SUDDEN,
            resets_optimizer=True,
        ),
        TrialChange(name="no_decay", words="no weight decay", findings=_DECAY, weight_decay=0.0),
        TrialChange(
            name="clipped",
            title="with gradients clipped at their usual norm",
            words="clipping of the gradient norm at its recent median",
            cause="step size",
            findings=_LARGE,
            clips=True,
        ),
        TrialChange(name="usual_rate", title="at the usual learning rate", cause="step size"),
        TrialChange(
            name="half_rate",
            title="at half the learning rate",
            words="half the learning rate",
            cause="step size",
            findings=_TOO_FAST,
            rate_factor=0.5,
        ),
        TrialChange(name="tenth_rate", words="a tenth of the learning rate", findings=_TOO_FAST, rate_factor=0.1),
        TrialChange(
            name="hundredth_rate", words="a hundredth of the learning rate", findings=_FAR_TOO_FAST, rate_factor=0.01
        ),
        TrialChange(name="zero_rate", title="at a learning rate of 0", rate_factor=0.0),
        TrialChange(name="tenfold_rate", words="ten times the learning rate", findings=_TOO_SLOW, rate_factor=10.0),
    )
}
"""All changes by name; specific ones come first. ``usual_rate`` has the factor that restores the usual one."""
UNCHANGED = TrialChange(name="unchanged")
"""No change."""
BRANCH_TITLES = {
    "run": "the run's own step",
    "as_it_was": "the same step again",
    "fresh": "on fresh batches",
    "element_restored": "the changed element restored",
} | {change.name: change.title for change in CHANGES.values() if change.title}
"""Descriptions of the branches of a step."""


def changes_for(finding: str) -> Sequence[TrialChange]:
    """Return the changes that test findings with an id."""
    return [change for change in CHANGES.values() if finding in change.findings]
