"""The effects of changes against closed forms, and the laws of their errors and null."""

from collections.abc import Callable

import numpy as np
import pytest
from loopscope.doctor import Diagnosis, Finding, History
from loopscope.laboratory import CHANGES, ChangeTest, effect_of
from loopscope.laboratory.changes import changes_for
from loopscope.laboratory.effects import null_effects, rises_by_chance
from loopscope.laboratory.questions import diagnosis_with_tests
from loopscope.laboratory.questions.trial_plan import trial_plans, with_tests
from loopscope.laboratory.verdict import change_tests
from loopscope.student_t import critical_t

Luck = Callable[[np.random.Generator, int], np.ndarray]


def finding(name: str, step: int = 30, confidence: float = 0.7) -> Finding:
    return Finding(name, "warning", step, "why", "next", confidence=confidence)


def verdicts(tests: list[ChangeTest]) -> list[bool | None]:
    return [item.confirms for item in tests]


def test_share_of_proportional_rises_is_exact():
    """If a change removes 93 % of every rise, the effect is 0.93 without an error."""
    unchanged = [1.0, 1.5, 0.9, 1.2]
    effect = effect_of(unchanged, [0.07 * rise for rise in unchanged], scale=2.0)
    assert (effect.measure, effect.value) == ("rise", pytest.approx(0.93))
    assert effect.error == pytest.approx(0, abs=1e-12)
    assert effect.unchanged == pytest.approx(1.15 / 2)


def test_error_is_that_of_a_ratio():
    """The error equals t·s(d − e·r)/(√B·mean r), computed here by hand."""
    unchanged, changed = np.array([1.0, 2.0, 3.0, 2.0]), np.array([0.2, 0.1, 0.6, 0.3])
    effect = effect_of(unchanged, changed, scale=1.0)
    share = (2.0 - 0.3) / 2.0
    residuals = (unchanged - changed) - share * unchanged
    expected = critical_t(3) * np.sqrt((residuals**2).sum() / 3) / 2 / 2.0
    assert (effect.value, effect.error) == (pytest.approx(share), pytest.approx(expected))


def test_falling_losses_give_a_share_of_the_loss():
    effect = effect_of([-0.01, -0.011, -0.009, -0.01], [-0.1, -0.11, -0.09, -0.1], scale=2.0)
    assert (effect.measure, effect.value) == ("loss", pytest.approx(0.045))
    assert effect.is_decisive() is True
    assert effect_of([-0.1, -0.1, -0.1, -0.1], [-0.11, -0.12, -0.1, -0.11], scale=2.0).is_decisive() is False


@pytest.mark.parametrize("values", [[1.0, 2.0, 4.0], [3.0, 3.0, 3.0, 3.0]])
def test_null_compares_each_branch_with_the_others(values):
    expected = [np.mean(values[:place] + values[place + 1 :]) - value for place, value in enumerate(values)]
    assert null_effects(values) == pytest.approx(expected)


@pytest.mark.statistical
def test_null_is_zero_within_its_error():
    """Over many draws an unchanged branch has the mean effect 0, and its root mean square is the reported null."""
    draws = np.random.default_rng(0).normal(0.0, 0.3, size=(4000, 4))
    firsts = np.array([null_effects(row)[0] for row in draws])
    assert abs(firsts.mean()) < 3 * firsts.std() / np.sqrt(len(firsts))
    effects = [effect_of(row, row, 1.0) for row in draws]
    squares = [effect.null**2 for effect in effects if effect.measure == "loss"]
    assert np.sqrt(np.mean(squares)) == pytest.approx(firsts.std(), rel=0.05)


@pytest.mark.statistical
@pytest.mark.parametrize("share", [0.0, 0.6, 0.93])
def test_intervals_cover_the_true_share(share):
    """With independent noise of both branches, 93 % to 97 % of the intervals contain the true effect."""
    generator = np.random.default_rng(1)
    unchanged = generator.normal(1.0, 0.1, size=(4000, 4))
    changed = (1 - share) * unchanged + generator.normal(0, 0.05, size=(4000, 4))
    effects = [effect_of(*pair, scale=1.0) for pair in zip(unchanged, changed, strict=True)]
    covered = np.mean([abs(effect.value - share) <= effect.error for effect in effects])
    assert 0.93 <= covered <= 0.97


def test_proportional_decrease_does_not_confirm_learning_rate():
    """A tenth of the learning rate also removes nearly all of the rise by steps that point uphill."""
    unchanged = [1.0, 1.1, 0.9, 1.0]
    effects = {"tenth_rate": effect_of(unchanged, [0.1 * rise for rise in unchanged], 1.0)}
    assert verdicts(change_tests([CHANGES["tenth_rate"]], effects)) == [False]
    effects = {"tenth_rate": effect_of(unchanged, [-0.1 * rise for rise in unchanged], 1.0)}
    assert verdicts(change_tests([CHANGES["tenth_rate"]], effects)) == [True]


def test_specific_cause_outranks_smaller_steps():
    unchanged = [1.0, 1.1, 0.9, 1.0]
    effects = {name: effect_of(unchanged, [-0.1] * 4, 1.0) for name in ("fresh_state", "half_rate")}
    pair = [CHANGES["fresh_state"], CHANGES["half_rate"]]
    assert verdicts(change_tests(pair, effects)) == [True, None]
    assert verdicts(change_tests(pair[1:], effects)) == [True]


@pytest.mark.parametrize(
    ("ordinary", "confirms"),
    [(None, None), ([], None), ([0.1 * place for place in range(-9, 10)], True), ([1.3, *[0.0] * 19], None)],
)
def test_event_must_exceed_ordinary_batches(ordinary, confirms):
    """A rise as an ordinary batch gives it by chance, or without ordinary batches, decides nothing about an event."""
    rises = [3.0, 3.1, 2.9, 3.0] if confirms else [1.0, 1.1, 0.9, 1.0]
    effects = {"fresh_state": effect_of(rises, [0.1] * 4, 1.0, ordinary)}
    assert verdicts(change_tests([CHANGES["fresh_state"]], effects, of_event=True)) == [confirms]


def test_event_without_rise_decides_nothing():
    effects = {"half_rate": effect_of([-1.0, -1.1, -0.9, -1.0], [-9.0] * 4, 1.0)}
    assert verdicts(change_tests([CHANGES["half_rate"]], effects)) == [True]
    assert verdicts(change_tests([CHANGES["half_rate"]], effects, of_event=True)) == [None]


def confirmed_events(count: int, luck: Luck, excess: float = 0.0) -> float:
    """Return how often another batch in place of the event's is confirmed, if that has an excess loss in deviations.

    All branches share the loss of the event's batch; the rises are means over its step and the two after it.
    """
    generator, confirmed = np.random.default_rng(0), 0
    for _ in range(count):
        unchanged = (luck(generator, 1) + excess + generator.normal(0, 0.6, 4)) / 3
        changed = generator.normal(0, 0.6, 4) / 3
        ordinary = rises_by_chance(luck(generator, 20).reshape(4, 5) / 3, generator.normal(0, 0.3, 4) / 3)
        effects = {"without_rows": effect_of(unchanged, changed, 5.0, ordinary)}
        confirmed += verdicts(change_tests([CHANGES["without_rows"]], effects, of_event=True)) == [True]
    return confirmed / count


def normal(generator: np.random.Generator, size: int) -> np.ndarray:
    return generator.normal(size=size)


def skewed(generator: np.random.Generator, size: int) -> np.ndarray:
    values = generator.lognormal(0, 1, size)
    return (values - np.exp(0.5)) / np.sqrt((np.e - 1) * np.e)


@pytest.mark.parametrize("luck", [normal, skewed])
def test_ordinary_events_confirm_nothing(luck):
    """Batches without an excess are events in at most 5 % of healthy trainings."""
    assert confirmed_events(400, luck) <= 0.05


@pytest.mark.parametrize(("luck", "excess", "power"), [(normal, 4.0, 0.8), (normal, 6.0, 0.97), (skewed, 6.0, 0.85)])
def test_events_of_a_bad_batch_are_confirmed(luck, excess, power):
    assert confirmed_events(200, luck, excess) >= power


class NoisyDescent:
    """Stochastic gradient descent with momentum on a quadratic loss of four weights, in branches as in the hook."""

    def __init__(self, learning_rate: float, momentum: float, signal: float, seed: int) -> None:
        self.learning_rate, self.momentum, self.signal = learning_rate, momentum, signal
        self.generator = np.random.default_rng(seed)
        self.weights, self.velocity = np.zeros(4), np.zeros(4)
        for _ in range(40):
            self.step(self.batch())

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        inputs = self.generator.normal(size=(8, 4))
        return inputs, inputs.sum(1) * self.signal + self.generator.normal(size=8)

    def loss(self, batch: tuple[np.ndarray, np.ndarray]) -> float:
        return float(((batch[0] @ self.weights - batch[1]) ** 2).mean())

    def step(self, batch: tuple[np.ndarray, np.ndarray], factor: float = 1.0) -> float:
        loss, errors = self.loss(batch), batch[0] @ self.weights - batch[1]
        self.velocity = self.momentum * self.velocity + 2 * errors @ batch[0] / 8
        self.weights = self.weights - factor * self.learning_rate * self.velocity
        return loss

    def rise(self, batches: list, factor: float) -> float:
        """Return the mean rise over ten steps and four further batches, and restore the state."""
        start, references = (self.weights, self.velocity), [*map(self.loss, batches)]
        losses = [*(self.step(batch, factor) for batch in batches[:10]), *map(self.loss, batches[10:])]
        self.weights, self.velocity = start
        rises = np.subtract(losses, references)
        return float(np.mean([*rises[1:10], rises[10:].mean()]))

    def confirms(self, name: str) -> bool | None:
        orders, factor = [[self.batch() for _ in range(14)] for _ in range(4)], CHANGES[name].rate_factor
        unchanged, changed = ([self.rise(order, value) for order in orders] for value in (1.0, factor))
        return verdicts(change_tests([CHANGES[name]], {name: effect_of(unchanged, changed, 1.0)}))[0]


@pytest.mark.statistical
@pytest.mark.parametrize("learning_rate", [1e-5, 1e-3, 1e-2])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", ["half_rate", "tenth_rate", "hundredth_rate", "tenfold_rate"])
def test_learning_rates_on_noise_confirm_nothing(name, momentum, learning_rate):
    """On targets that are noise, a change of the learning rate is confirmed in at most 5 % of the trainings."""
    trainings = [NoisyDescent(learning_rate, momentum, 0.0, seed) for seed in range(300)]
    assert np.mean([item.confirms(name) is True for item in trainings]) <= 0.05


def test_spread_of_a_common_rise_is_not_chance():
    """Ordinary rises add to the luck of losses, unless all exceed it, as those of a damaged optimizer state do."""
    lucks = [[-0.1, 0.0, 0.1], [-0.1, 0.1, 0.0]]
    assert rises_by_chance(lucks, [0.1, 0.5]) == pytest.approx([-0.3, -0.2, -0.1, 0.1, 0.3, 0.2])
    assert rises_by_chance(lucks, [0.5, 7.5]) == pytest.approx([*lucks[0], *lucks[1]])


@pytest.mark.parametrize(("learning_rate", "share"), [(1e-5, 0.9), (1e-4, 0.9), (0.02, 0.0)])
def test_tenfold_rate_is_confirmed_where_it_is_low(learning_rate, share):
    """The power is 90 % far below a useful learning rate; a healthy training is not told to increase it."""
    trainings = [NoisyDescent(learning_rate, 0.0, 1.0, seed) for seed in range(40)]
    confirmed = np.mean([item.confirms("tenfold_rate") is True for item in trainings])
    assert confirmed >= share if share else confirmed <= 0.05


def test_slower_fall_by_noise_confirms_nothing():
    """The fall without the change has an error too."""
    unchanged, changed = [-0.1, 0.1, -0.3, 0.2], [-0.3, -0.1, -0.5, 0.0]
    assert effect_of(unchanged, changed, 1.0).is_decisive() is None
    assert effect_of([-0.1] * 4, changed, 1.0).is_decisive() is None
    assert effect_of([-0.1] * 4, [-0.31, -0.3, -0.32, -0.29], 1.0).is_decisive() is True


def test_lost_training_refutes_no_learning_rate():
    """Where all branches diverge, a learning rate that is still too high is no evidence."""
    effects = {"half_rate": effect_of([10.0] * 4, [10.0] * 4, 1.0)}
    assert verdicts(change_tests([CHANGES["half_rate"]], effects)) == [None]


@pytest.mark.parametrize(
    ("name", "confirms", "confidence"),
    [
        ("learning-rate-too-high", [False, True], 0.9032),
        ("learning-rate-too-high", [False, False], 0.3684),
        ("learning-rate-too-high", [False, None], 0.7),
        ("loss-spike", [False, False], 0.7),
    ],
)
def test_tests_change_the_confidence(name, confirms, confidence):
    """The odds 7/3 are multiplied or divided by 4; a symptom stays as it was measured."""
    tests = [ChangeTest("a change", 0.9, 0.1, 0.1, 4, item) for item in confirms]
    assert with_tests(finding(name), tests).confidence == pytest.approx(confidence, abs=1e-4)


def test_order_is_renewed_by_tests():
    first, second = finding("learning-rate-too-high", confidence=0.8), finding("weight-decay-too-large", confidence=0.7)
    rises = {"unchanged": [1.0, 1.1, 0.9, 1.0], "no_decay": [-0.1] * 4, "half_rate": [1.0, 1.1, 0.9, 1.0]}
    measured = {"level": 1.0, "scale": 1.0, "rise": rises}
    diagnosis = diagnosis_with_tests(Diagnosis([first, second]), lambda plan: measured, from_present=True)
    assert [item.id for item in diagnosis] == ["weight-decay-too-large", "learning-rate-too-high"]
    assert diagnosis.findings[0].confidence > 0.7 > diagnosis.findings[1].confidence
    content = diagnosis.findings[0].as_dict()
    assert Finding.of(content).as_dict() == content
    assert "confirmed: no weight decay removes more than the rise, 110 % of it," in str(diagnosis)


def test_disabled_hooks_are_named():
    diagnosis = Diagnosis([finding("weight-decay-too-large")])
    measured = {"level": 1.0, "scale": 1.0, "rise": {"unchanged": [1.0] * 4, "no_decay": [0.0] * 4}}
    result = diagnosis_with_tests(diagnosis, lambda plan: measured, from_present=True, left_out=["grad_clip"])
    assert result.untested == ["The branches of the tests ran without grad_clip, unlike the run."]


def test_missing_learning_rate_is_not_tested():
    diagnosis = Diagnosis([finding("learning-rate-too-low")])
    measured = {"level": 1.0, "scale": 1.0, "rise": {"unchanged": [1.0] * 4}}
    result = diagnosis_with_tests(diagnosis, lambda plan: measured, from_present=True)
    assert result.untested == ["learning-rate-too-low was not tested: the optimizer has no numeric learning rate."]


def test_damaged_state_is_not_tested():
    diagnosis = Diagnosis([finding("weight-decay-too-large")])
    result = diagnosis_with_tests(diagnosis, lambda plan: {"level": float("nan"), "rise": {}}, from_present=True)
    assert result.findings == [diagnosis.findings[0]]
    assert "weight-decay-too-large was not tested: the loss is not finite" in result.untested[0]


def test_plans_stay_within_their_branches():
    """One spike uses up the branches; a finding that no branch can test has a sentence."""
    names = ["loss-spike", "learning-rate-too-low", "gradients-not-zeroed"]
    plans, untested = trial_plans(Diagnosis([finding(name) for name in names]), from_present=False)
    assert [(plan.step, plan.event, len(plan.changes)) for plan in plans] == [(28, 3, 6)]
    assert untested[0].startswith("learning-rate-too-low was not tested: earlier findings")
    assert untested[1].startswith("gradients-not-zeroed was not tested: a branch clears the gradients itself")
    assert plans[0].options(History(), 4, 10)["steps"] == 5


def test_every_change_names_known_findings():
    from loopscope.doctor import all_detectors

    known = {detector.name for detector in all_detectors()}
    for item in CHANGES.values():
        assert item.findings <= known
    assert changes_for("dead-units") == []


def test_every_change_belongs_to_a_question():
    """A change has words if findings are tested with it, and a title if steps are explained with it."""
    assert all(bool(change.words) == bool(change.findings) for change in CHANGES.values())
    assert all(change.title or change.words for change in CHANGES.values())
