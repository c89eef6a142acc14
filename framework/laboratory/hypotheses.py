"""Hypotheses about the cause of a finding, each a single change that a branch of the training makes."""

from abc import ABC
from collections.abc import Sequence
from typing import ClassVar

SYMPTOMS = frozenset(
    {
        "loss-spike",
        "gradient-jump",
        "nonfinite",
        "exploding-gradients",
        "loss-rising",
        "loss-not-falling",
        "no-better-than-uniform",
    }
)
"""Ids of findings that report what was measured, which no test can refute: tests look for its cause."""
EVENTS = frozenset({"loss-spike", "gradient-jump", "nonfinite", "exploding-gradients", "learning-rate-jump"})
"""Ids of findings about one step; their branches start :data:`LEAD` steps before it."""
LEAD = 2
"""Steps of the run from the start of a branch to the step of an event, whose cause may be an earlier update."""


class Hypothesis(ABC):
    """A possible cause of findings, with the change that removes it."""

    name: ClassVar[str]
    """The name of the branch, for the option ``changes`` of the hook ``hypothesis_test``."""
    words: ClassVar[str]
    """The change, as the subject of a sentence."""
    findings: ClassVar[frozenset[str]]
    """Ids of the findings that the change tests."""
    rate_factor: ClassVar[float] = 1.0
    """The factor of the learning rates."""
    clips: ClassVar[bool] = False
    """Whether gradients are clipped at their usual norm."""
    widens: ClassVar[bool] = False
    """Whether passes compute in float32."""
    resets_optimizer: ClassVar[bool] = False
    """Whether the optimizer starts with zero moments and step counts."""
    weight_decay: ClassVar[float | None] = None
    """The weight decay of all groups; ``None`` leaves it."""
    replaces_rows: ClassVar[bool] = False
    """Whether the batch of the event is replaced, or rows that stand out are left out of it."""

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


STEP_TOO_LARGE = frozenset(
    {
        "learning-rate-too-high",
        "learning-rate-jump",
        "warm-up-missing",
        "loss-spike",
        "loss-rising",
        "gradient-jump",
        "exploding-gradients",
        "nonfinite",
    }
)


class HalfRate(Hypothesis):
    """The learning rate is too high by a small factor."""

    name = "half_rate"
    words = "half the learning rate"
    findings = STEP_TOO_LARGE
    rate_factor = 0.5


class TenthRate(Hypothesis):
    """The learning rate is too high by a large factor."""

    name = "tenth_rate"
    words = "a tenth of the learning rate"
    findings = STEP_TOO_LARGE
    rate_factor = 0.1


class HundredthRate(Hypothesis):
    """The learning rate is too high by far."""

    name = "hundredth_rate"
    words = "a hundredth of the learning rate"
    findings = frozenset({"learning-rate-too-high"})
    rate_factor = 0.01


class TenfoldRate(Hypothesis):
    """The learning rate is too low."""

    name = "tenfold_rate"
    words = "ten times the learning rate"
    findings = frozenset({"learning-rate-too-low", "loss-not-falling", "no-better-than-uniform"})
    rate_factor = 10.0


class Clipped(Hypothesis):
    """Single gradients are far larger than usual."""

    name = "clipped"
    words = "clipping of the gradient norm at its recent median"
    findings = frozenset({"loss-spike", "gradient-jump", "exploding-gradients", "nonfinite"})
    clips = True


class WiderPrecision(Hypothesis):
    """A number overflows or underflows in 16 bits."""

    name = "float32"
    words = "float32 in all passes"
    findings = frozenset({"nonfinite", "loss-spike", "scaler-skips-steps", "float16-without-scaler"})
    widens = True


class WithoutRows(Hypothesis):
    """Rows of the event's batch are unlike the others."""

    name = "without_rows"
    words = "leaving out the rows of the event"
    findings = frozenset({"loss-spike", "gradient-jump", "exploding-gradients", "nonfinite"})
    replaces_rows = True


class FreshState(Hypothesis):
    """The moments of the optimizer are out of date."""

    name = "fresh_state"
    words = "a reset state of the optimizer"
    findings = frozenset({"loss-spike", "gradient-jump"})
    resets_optimizer = True


class NoDecay(Hypothesis):
    """The weight decay shrinks weights that the loss needs."""

    name = "no_decay"
    words = "no weight decay"
    findings = frozenset({"weight-decay-too-large"})
    weight_decay = 0.0


HYPOTHESES: tuple[Hypothesis, ...] = (
    WithoutRows(),
    WiderPrecision(),
    FreshState(),
    NoDecay(),
    Clipped(),
    HalfRate(),
    TenthRate(),
    HundredthRate(),
    TenfoldRate(),
)
"""All hypotheses; specific changes come first."""
UNTESTABLE = {
    "gradients-not-zeroed": "a branch clears the gradients itself, so it cannot repeat a missing zero_grad()",
    "clipping-too-strong": "a branch does not clip as the run does",
    "rounded-updates": "a branch cannot change the precision of the weights",
}
"""Reasons why the cause of a finding cannot be tested in a branch, by its id."""


def hypotheses_of(finding: str) -> Sequence[Hypothesis]:
    """Return the hypotheses that test findings with an id."""
    return [item for item in HYPOTHESES if finding in item.findings]
