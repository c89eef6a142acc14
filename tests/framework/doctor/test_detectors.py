"""Promises of every registered detector, tested on the registry, and the registry itself."""

import math
import warnings
from copy import deepcopy
from typing import get_args

import numpy as np
import pytest
from loopscope.doctor import Detector, DetectorRegistry, Finding, History, Threshold, all_detectors, diagnose
from loopscope.doctor.detector import Rule, median
from loopscope.doctor.findings import EXCEPTIONS, Stage
from loopscope.errors import RunNotice, UsageError
from loopscope.hooks import HookRegistry, Series
from loopscope.laws import LawRegistry, shipped
from loopscope.training_hooks import TrainingChecks

from docs.findings import paragraphs

FILLED = shipped
DETECTORS = all_detectors()
LAWS = LawRegistry.names()
IDS = [detector.name for detector in DETECTORS]


def healthy_history(steps: int = 200) -> History:
    """Return the history of a training whose loss falls from 2.3 to 0.1, with usual learning rates and updates."""
    groups = [{"optimizer": "Adam", "lr": 1e-3, "eps": 1e-8}]
    history = History({"groups": groups, "trainable": 4, "trainable_elements": 100, "elements": 100})
    at = list(range(1, steps + 1))
    losses = [0.1 + 2.2 * float(np.exp(-step / 40)) for step in at]
    history.add(steps, {"training_checks/loss": Series(at, losses), "training_checks/grad_norm": Series(at, losses)})
    history.add(steps, {"training_checks/lr": Series(at, [1e-3] * steps), "training_checks/class_count": 10})
    history.add(steps, {"training_checks/uniform_loss": float(np.log(10))})
    history.add(steps, {"training_checks/update_ratio": Series([1, 2, 3], [0.02, 0.015, 0.01])})
    return history


@pytest.mark.parametrize("detector", DETECTORS, ids=IDS)
def test_detector_explains_itself(detector: Detector) -> None:
    """Names, texts, limits, the stage and references to hooks are complete."""
    assert detector.name == detector.name.lower()
    assert " " not in detector.name
    texts = paragraphs(detector)
    assert texts["Cause"].endswith(".")
    assert texts.keys() >= {"Symptom", "Applies to"}
    assert all(texts.values())
    assert all(limit.reason for limit in detector.thresholds().values())
    assert detector.stage in get_args(Stage)[1:]
    assert detector.law in {"", *LAWS}
    assert set(detector.needs) <= {TrainingChecks.name, *HookRegistry.names()}


@pytest.mark.parametrize(("share", "why"), [(0.5, ["50% of the labels are wrong."]), (0.1, []), (math.nan, [])])
def test_rule_compares_value_with_limit(share: float, why: list[str]) -> None:
    class WrongLabels(Rule):
        name = "wrong-labels"
        share = Threshold(0.1, "data sets have a few percent")
        read = staticmethod(median)
        metric, above, usual = "mine/wrong_fraction", "share", "0 to 0.05"
        why, remedy, confidence = "{value:.0%} of the labels are wrong.", "Correct them.", 0.7

    history = History()
    history.add(3, {"mine/wrong_fraction": Series([1, 2, 3], [share] * 3)})
    assert [finding.why for finding in WrongLabels().detect(history)] == why


def test_exceptions_of_stages_name_detectors() -> None:
    assert EXCEPTIONS.keys() | set().union(*EXCEPTIONS.values()) <= set(IDS)


@pytest.mark.parametrize("detector", DETECTORS, ids=IDS)
def test_nothing_recorded_gives_no_finding(detector: Detector) -> None:
    assert list(detector.detect(History())) == []


@pytest.mark.parametrize("detector", DETECTORS, ids=IDS)
def test_healthy_history_gives_no_finding(detector: Detector) -> None:
    """The detector also leaves the history as it was."""
    history = healthy_history()
    before = deepcopy(history.facts), history.step, sorted(history.curves)
    assert list(detector.detect(history)) == []
    assert before == (history.facts, history.step, sorted(history.curves))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0, 1e30])
def test_odd_values_break_no_detector(value: float) -> None:
    """A detector that raises would be left out with a notice, which is an error here."""
    history = healthy_history()
    others = ("parameter_norms/total_weight_norm", "training_metrics/evaluation/val_loss", "activations/rms/block")
    for name in [*history.curves, *others]:
        history.add(201, {name: value})
    with warnings.catch_warnings():
        warnings.simplefilter("error", RunNotice)
        diagnose(history)


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 7, 21, 61])
def test_short_histories_break_no_detector(steps: int) -> None:
    history = healthy_history(steps) if steps else History()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RunNotice)
        assert not diagnose(history).at_least("warning")


class Broken(Detector):
    """A detector with an error."""

    name = "broken"

    def detect(self, history: History) -> list[Finding]:
        """Divide by zero."""
        return [self.finding("critical", 1 // 0, "", "")]


def test_broken_detector_hides_no_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is left out with a notice that names it."""
    DetectorRegistry.register(Broken)
    try:
        history = History({"without_optimizer": {"count": 1, "names": ["head.weight"], "share": 0.1}, "trainable": 2})
        with pytest.warns(RunNotice, match="detector 'broken' failed"):
            diagnosis = diagnose(history)
    finally:
        DetectorRegistry.unregister("broken")
    assert [finding.id for finding in diagnosis] == ["parameters-without-optimizer"]


def test_incomplete_detector_is_refused() -> None:
    class Nameless(Detector):
        """A detector without texts."""

    with pytest.raises(UsageError, match="Nameless has no name"):
        DetectorRegistry.register(Nameless)


def test_unknown_stage_is_refused() -> None:
    class Staged(Broken):
        stage = "gradient"  # type: ignore[assignment]

    with pytest.raises(UsageError, match="Staged has the stage 'gradient'; choose one of '', 'set-up', "):
        DetectorRegistry.register(Staged)


@pytest.mark.parametrize(("gain", "severity"), [(0.1, "info"), (0.01, "warning"), (-0.1, "warning")])
def test_rising_accuracy_makes_overfitting_a_remark(gain: float, severity: str) -> None:
    """The validation loss rises by half, and the accuracy by ``gain``, as in delayed generalisation."""
    history = History()
    for step in range(1, 101):
        history.add(step, {"training_checks/loss": 1.0 / step})
        if step % 20 == 0:
            history.add(step, {"training_metrics/evaluation/val_loss": 2.0 + step / 100})
            history.add(step, {"training_metrics/val_acc": 0.3 + gain * (step - 20) / 80})
    (finding,) = [item for item in diagnose(history) if item.id == "train-validation-diverging"]
    assert (finding.severity, finding.step) == (severity, 20)


def never_trained(names: list[str], *, last_check: int = 101) -> History:
    """Return a history in which parameters have had no gradient at any checked step."""
    history = healthy_history()
    checks = [1, 2, 3, 51, last_check]
    for family in ("never_gradient", "without_gradient"):
        history.add(last_check, {f"training_checks/{family}_count": Series(checks, [len(names)] * len(checks))})
        for name in names:
            history.add(last_check, {f"training_checks/{family}/{name}": Series(checks, [1, 2, 3, 4, 5])})
    return history


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["experts.1.weight", "experts.2.weight"], "router-collapse"),
        (["experts.1.weight", "head.weight"], "parameters-without-gradient"),
    ],
)
def test_experts_without_gradient_are_a_collapse(names: list[str], expected: str) -> None:
    """Unless other parameters have no gradient, either."""
    assert [item.id for item in diagnose(never_trained(names)).at_least("warning")] == [expected]


def test_unused_pooler_is_a_remark() -> None:
    """Encoders of transformers have one, which another pooling replaces."""
    found = diagnose(never_trained(["model.pooler.dense.weight", "model.pooler.dense.bias"]))
    assert [item.id for item in found] == ["parameters-without-gradient"]
    assert not found.at_least("warning")


def test_idle_experts_are_accepted_at_first() -> None:
    assert not diagnose(never_trained(["experts.1.weight"], last_check=60)).at_least("warning")


@pytest.mark.parametrize(("last_check", "expected"), [(151, ["router-collapse"]), (60, [])])
def test_experts_that_stop_learning_are_a_collapse(last_check: int, expected: list[str]) -> None:
    """Experts that had a gradient at first, and then none for a hundred steps."""
    history = healthy_history()
    checks = [1, 2, 10, 51, last_check]
    counts = {"never_gradient_count": [0] * 5, "without_gradient_count": [0, 2, 2, 2, 2]}
    for name, values in counts.items():
        history.add(last_check, {f"training_checks/{name}": Series(checks, values)})
    for name in ("experts.0.weight", "experts.1.weight"):
        history.add(last_check, {f"training_checks/without_gradient/{name}": Series(checks[1:], [1, 2, 3, 4])})
    assert [item.id for item in diagnose(history).at_least("warning")] == expected


@pytest.mark.parametrize(("entropy", "expected"), [(0.2, ["router-collapse"]), (0.9, [])])
def test_unequal_loads_are_a_collapse(entropy: float, expected: list[str]) -> None:
    history = healthy_history()
    history.add(151, {"moe_router/load_entropy": Series([1, 51, 101, 151], [0.95, *[entropy] * 3])})
    assert [item.id for item in diagnose(history).at_least("warning")] == expected


@pytest.mark.parametrize("family", ["frozen_later", "without_gradient"])
@pytest.mark.parametrize(("steps", "expected"), [(200, ["layers-stop-learning"]), (95, [])])
def test_layers_that_stop_learning_are_found(family: str, steps: int, expected: list[str]) -> None:
    """Frozen or without a gradient, if that lasts for at least 50 steps."""
    history = healthy_history(steps)
    counts = {f"training_checks/{family}_count": Series([20, 51, 70, 90], [0, 1, 1, 1])}
    history.add(90, {"training_checks/never_gradient_count": Series([20, 51, 70, 90], [0] * 4)} | counts)
    history.add(90, {f"training_checks/{family}/trunk.weight": Series([51, 70, 90], [1, 2, 3])})
    assert [item.id for item in diagnose(history).at_least("warning")] == expected


@pytest.mark.parametrize(("before", "expected"), [(1e-3, []), (1.0, ["schedule-ends-early"])])
def test_burst_of_the_learning_rate_is_no_decay(before: float, expected: list[str]) -> None:
    """The rate returns from 1 to its value before a few high ones; without such a return, a schedule has ended."""
    history = healthy_history(1000)
    rates = [before] * 200 + [1.0] * 3 + [1e-3] * 797
    history.add(1000, {"training_metrics/lr": Series(list(range(1, 1001)), rates)})
    history.curves.pop("training_checks/lr")
    history.status = "completed"
    assert [item.id for item in diagnose(history) if item.id == "schedule-ends-early"] == expected


@pytest.mark.parametrize(
    ("high", "scheduler", "expected"),
    [
        (20, "MultiStepLR", ["schedule-ends-early"]),
        (200, "MultiStepLR", []),
        (20, "ReduceLROnPlateau", []),
        (20, "CosineAnnealingWarmRestarts", []),
    ],
)
def test_hundredth_of_the_rate_comes_late(high: int, scheduler: str, expected: list[str]) -> None:
    """Milestones in epochs, stepped per batch, are reached in the first steps; a plateau or restart may come early."""
    history = healthy_history(400)
    history.settings = {**history.settings, "scheduler": scheduler}
    history.curves.pop("training_checks/lr")
    history.add(400, {"training_metrics/lr": Series(list(range(1, 401)), [0.1] * high + [1e-3] * (400 - high))})
    history.status = "completed"
    assert [item.id for item in diagnose(history) if item.id == "schedule-ends-early"] == expected


@pytest.mark.parametrize(("best", "is_suspicious"), [(2.0, False), (8.0, True)])
def test_validation_far_above_the_start_is_suspicious(best: float, is_suspicious: bool) -> None:
    """Overfitting starts near the first training loss; data that are prepared differently start above it."""
    history = healthy_history()
    values = Series([50, 100, 150, 200], [best, 1.5 * best, 2 * best, 2 * best])
    history.add(200, {"training_metrics/evaluation/val_loss": values})
    (finding,) = [item for item in diagnose(history) if item.id == "train-validation-diverging"]
    assert ("prepared differently" in finding.why) == is_suspicious
    assert ("memorises" in finding.why) != is_suspicious


@pytest.mark.parametrize(("share", "severity"), [(0.66, "info"), (0.9, "warning")])
def test_dead_units_of_a_network_that_learns(share: float, severity: str) -> None:
    """Two thirds are a remark if the loss falls by 95 %, more are a warning."""
    history = healthy_history()
    history.add(200, {"training_checks/dead_units/wide.weight": Series([100, 150, 200], [share] * 3)})
    history.add(200, {"training_checks/dead_units_max": share, "training_checks/zero_gradient_count": 0})
    (finding,) = [item for item in diagnose(history) if item.id == "dead-units"]
    assert finding.severity == severity


def test_vanishing_gradients_show_a_weight() -> None:
    """The bias of a key has no effect by design, so it is no evidence; the count is that of the last checks."""
    history = History({"groups": [{"optimizer": "Adam"}], "trainable": 4})
    steps = [1, 2, 51, 101]
    history.add(101, {"training_checks/loss": Series(list(range(1, 102)), [1.0] * 101)})
    history.add(101, {"parameter_norms/total_grad_norm": Series(steps, [1.0] * 4)})
    for name, norm in {"query.weight": 1e-6, "key.weight": 2e-6, "key.bias": 1e-12}.items():
        history.add(101, {f"parameter_norms/grad_norm/{name}": Series(steps, [norm] * 4)})
    (finding,) = [item for item in diagnose(history) if item.id == "vanishing-gradients"]
    assert finding.evidence[0].metric == "parameter_norms/grad_norm/query.weight"
    assert finding.why.startswith("At each of the last 3 checks, the gradients of 3 of 3 parameters were")


@pytest.mark.parametrize(("level", "accuracy", "expected"), [(1.0, None, 1), (1.0, 0.5, 0), (0.9, None, 0)])
def test_labels_that_belong_to_no_input_are_suspicious(level: float, accuracy: float | None, expected: int) -> None:
    """The validation loss stays at ln(C), unless the accuracy is above chance, as before a late generalisation."""
    history, uniform = healthy_history(), float(np.log(10))
    losses = [factor * level * uniform for factor in (1.0, 1.01, 1.0, 1.01)]
    history.add(200, {"training_metrics/evaluation/val_loss": Series([50, 100, 150, 200], losses)})
    if accuracy is not None:
        history.add(200, {"training_metrics/val_acc": accuracy})
    assert sum("equal probabilities" in item.why for item in diagnose(history)) == expected


@pytest.mark.parametrize(("end", "severity"), [(2.0, "info"), (4.5, "warning")])
def test_spike_is_followed_by_a_fall(end: float, severity: str) -> None:
    """As in a curriculum: the loss rises to 5 at step 101, and falls to its end within 100 steps."""
    history, steps = History({"groups": [{"optimizer": "Adam"}]}), list(range(1, 201))
    losses = [0.1] * 100 + list(np.linspace(5, end, 100))
    history.add(200, {"training_checks/loss": Series(steps, losses)})
    sentence = "The loss has not recovered from its spike at step 101."
    alert = {"hook": "loss_spikes", "metric": "loss_rise", "step": 101, "value": 50.0, "limit": 6.0}
    history.add_alert({**alert, "sentence": sentence, "severity": "warning"})
    (finding,) = [item for item in diagnose(history) if item.id == "loss-spike"]
    assert finding.severity == severity


def test_many_layers_that_stop_learning_are_all_counted() -> None:
    """The family names eight parameters at most, so that its names alone would make a remark of them."""
    history = healthy_history()
    history.facts = {**history.facts, "trainable": 200}
    history.add(90, {"training_checks/never_gradient_count": 0})
    history.add(90, {"training_checks/without_gradient_count": Series([51, 70, 90], [150] * 3)})
    for index in range(8):
        history.add(90, {f"training_checks/without_gradient/block.{index}": Series([51, 70, 90], [1, 2, 3])})
    (finding,) = diagnose(history).at_least("warning")
    assert "150 of 200 trainable parameters have no gradient since step 51" in finding.why


def test_zero_before_a_peak_divides_nothing() -> None:
    """Numpy warns about a division by zero, which tests turn into an error."""
    history = healthy_history(400)
    rates = [0.0] * 20 + [1.0] * 80 + [1e-4] * 300
    history.add(400, {"training_metrics/lr": Series(list(range(1, 401)), rates)})
    history.status = "completed"
    assert "schedule-ends-early" in [item.id for item in diagnose(history)]


def ids(history: History) -> list[str]:
    return [item.id for item in diagnose(history).at_least("warning")]


def with_losses(losses: list[float], **facts: object) -> History:
    """Return a history with these losses of the first steps, and the loss of equal probabilities over ten classes."""
    history = healthy_history()
    history.curves.pop("training_checks/loss")
    history.facts = {**history.facts, **facts}
    history.add(len(losses), {"training_checks/loss": Series(list(range(1, len(losses) + 1)), losses)})
    history.status = "completed"
    return history


@pytest.mark.parametrize(("deviation", "last", "expected"), [(0.0, 2.3, True), (1.0, 2.3, False), (0.0, 0.1, False)])
def test_constant_inputs_come_before_their_consequences(deviation: float, last: float, expected: bool) -> None:
    """A model that learns without inputs is no fault."""
    history = with_losses([*np.linspace(2.31, last, 200)])
    for metric, value in (("input_std", deviation), ("input_mean", 0.0), ("dead_units_max", 1.0)):
        history.add(51, {f"training_checks/{metric}": Series([1, 2, 51], [value] * 3)})
    history.add(51, {"training_checks/dead_units/stem.weight": Series([1, 2, 51], [1.0] * 3)})
    assert (ids(history)[:1] == ["inputs-constant"]) is expected


@pytest.mark.parametrize(("growth", "is_found"), [(1.9, True), (1.1, False)])
def test_rate_that_grows_without_end_is_found(growth: float, is_found: bool) -> None:
    """The loss rises once the rate is large; a rate that only doubles is no fault."""
    losses = [*np.linspace(2.3, 0.1, 100), *np.linspace(0.1, 2.3, 100)]
    history = with_losses(losses)
    history.curves.pop("training_checks/lr")
    rates = [1e-3 * growth ** (step // 20) for step in range(200)]
    history.add(200, {"training_metrics/lr": Series(list(range(1, 201)), rates)})
    assert ("learning-rate-jump" in ids(history)) is is_found


@pytest.mark.parametrize(("power", "is_found"), [(2.0, True), (0.5, False)])
def test_loss_that_falls_ever_faster_is_unbounded(power: float, is_found: bool) -> None:
    """Likelihoods of continuous data become negative, too, but fall ever more slowly."""
    history = with_losses([3.0 - 4000 * (step / 200) ** power for step in range(200)])
    assert ("loss-unbounded" in ids(history)) is is_found


@pytest.mark.parametrize(
    ("name", "scores", "is_found"),
    [("val_iou", [0.0] * 6, True), ("val_iou", [0.0] * 5 + [0.1], False), ("val_errors", [0.0] * 6, False)],
)
def test_score_that_stays_zero_is_found(name: str, scores: list[float], is_found: bool) -> None:
    history = healthy_history()
    history.add(200, {f"training_metrics/evaluation/{name}": Series(list(range(10, 70, 10)), scores)})
    assert ("score-contradicts-loss" in ids(history)) is is_found


@pytest.mark.parametrize(("last", "is_found"), [(2.25, True), (1.2, False)])
def test_validation_that_hardly_moves_is_suspicious(last: float, is_found: bool) -> None:
    """The evaluated weights may not be those that are trained."""
    history = healthy_history()
    for name in ("uniform_loss", "class_count"):
        history.curves.pop(f"training_checks/{name}")
    values = Series([10, 50, 100, 150, 200], [*np.linspace(2.3, last, 5)])
    history.add(200, {"training_metrics/evaluation/val_loss": values})
    assert ("train-validation-diverging" in ids(history)) is is_found


@pytest.mark.parametrize(("batchnorms", "first"), [(2, "model-in-eval-mode"), (0, "learning-rate-too-high")])
def test_eval_mode_explains_rates_of_batch_normalised_models(batchnorms: int, first: str) -> None:
    history = with_losses([2.3, *[5.0] * 199], batchnorms=batchnorms, dropouts=1)
    history.add(3, {"training_checks/update_ratio": Series([1, 2, 3], [0.6, 0.2, 0.2])})
    history.add(51, {"training_checks/model_in_eval": Series([1, 2, 51], [1.0] * 3)})
    assert ids(history)[0] == first


def test_eval_mode_in_some_steps_is_found() -> None:
    """A loop that calls model.train() once in an epoch, and evaluates several times within it."""
    history = with_losses([2.3, *[1.0] * 199], batchnorms=2)
    history.add(101, {"training_checks/model_in_eval": Series([1, 5, 10, 51, 101], [0.0, 0.0, 1.0, 1.0, 0.0])})
    (found,) = [item for item in diagnose(history).at_least("info") if item.id == "model-in-eval-mode"]
    assert (found.step, found.severity) == (10, "warning")
    assert "in some of its training steps" in found.why


@pytest.mark.parametrize(("loss", "first"), [(2e7, "targets-not-normalised"), (2.0, "learning-rate-too-high")])
def test_huge_targets_explain_rates_and_infinities(loss: float, first: str) -> None:
    history = with_losses([loss, loss**2, *[math.nan] * 5])
    for name in ("uniform_loss", "class_count"):
        history.curves.pop(f"training_checks/{name}")
    history.add(3, {f"training_checks/{name}": 0 for name in ("class_count", "loss_is_summed")})
    history.add(3, {"training_checks/update_ratio": Series([1, 2, 3], [7e16, 7e16, 7e16])})
    assert ids(history)[0] == first


@pytest.mark.parametrize("loss", [math.inf, math.nan])
def test_nonfinite_first_loss_says_nothing_about_targets(loss: float) -> None:
    history = with_losses([loss] * 5)
    for name in ("uniform_loss", "class_count"):
        history.curves.pop(f"training_checks/{name}")
    history.add(3, {f"training_checks/{name}": 0 for name in ("class_count", "loss_is_summed")})
    assert ids(history)[0] == "nonfinite"
    assert "targets-not-normalised" not in ids(history)


def test_single_extreme_row_is_no_learning_rate() -> None:
    """The updates are small until one gradient spoils the weights; a loss that rises step by step is another fault."""
    history = with_losses([2.3, 2.1, 2.4, 2.0, 3e5, 1e26, math.inf])
    for name in ("grad_norm", "update_ratio"):
        history.curves.pop(f"training_checks/{name}")
    history.add(7, {"training_checks/grad_norm": Series(list(range(1, 7)), [2.0, 2.5, 1.8, 2.2, 1.9e7, 1e30])})
    history.add(7, {"training_checks/update_ratio": Series([1, 2, 3, 5], [0.004, 0.003, 0.004, 7e3])})
    finding = next(iter(diagnose(history)))
    assert (finding.id, finding.step) == ("exploding-gradients", 5)
    assert finding.next.startswith("Look at the rows of the batch of step 5;")


@pytest.mark.parametrize(("losses", "expected"), [([31.0, 9e5, math.nan], True), ([31.0, 5.0, 0.3], False)])
def test_large_first_gradient_of_diverging_loss_explodes(losses: list[float], expected: bool) -> None:
    history = with_losses(losses)
    for name in ("grad_norm", "uniform_loss", "class_count"):
        history.curves.pop(f"training_checks/{name}")
    history.add(
        3, {"training_checks/grad_norm": Series([1, 2, 3], [4e3, 4e3, 4e3]), "training_checks/loss_is_summed": 0}
    )
    history.add(3, {"training_checks/update_ratio": Series([1, 2, 3], [27.9, 2.0, 2.0])})
    assert (ids(history)[:1] == ["exploding-gradients"]) is expected


def test_first_loss_that_is_infinite_blames_no_rate() -> None:
    history = with_losses([math.inf, math.inf, math.nan])
    history.curves.pop("training_checks/update_ratio")
    history.add(3, {"training_checks/update_ratio": Series([1, 2, 3], [0.7, 0.7, 0.7])})
    assert "learning-rate-too-high" not in ids(history)


def test_diagnosis_in_progress_names_what_it_lacks() -> None:
    history = healthy_history()
    assert any("in progress" in sentence for sentence in diagnose(history).missing)
    history.status = "completed"
    assert not any("in progress" in sentence for sentence in diagnose(history).missing)


def test_rare_extreme_gradients_point_to_rows() -> None:
    history = healthy_history()
    history.curves.pop("training_checks/grad_norm")
    norms = [1e4 if step % 50 == 49 else 1.0 for step in range(200)]
    history.add(200, {"training_checks/grad_norm": Series(list(range(1, 201)), norms)})
    (finding,) = [item for item in diagnose(history) if item.id == "exploding-gradients"]
    assert finding.next.startswith("Look at the rows of the batches of steps 50, 100, 150, 200")


def test_frozen_part_is_named_where_nothing_is_learned() -> None:
    history = with_losses([2.3] * 200, frozen_modules={"encoder": 0.96})
    (finding,) = [item for item in diagnose(history) if item.id == "no-better-than-uniform"]
    assert "Frozen: 96% of encoder. " in finding.why


def test_loss_of_a_scaler_is_no_high_loss() -> None:
    history = with_losses([2.3 * 65536.0] * 10, scaler=True)
    assert "initial-loss-high" not in ids(history)


def test_hook_that_failed_is_missing_from_the_diagnosis() -> None:
    """A hook that does not suit the training is listed, and does not make the diagnosis incomplete."""
    history = healthy_history()
    history.left_out = {
        "training_checks": "Hook 'training_checks' cannot run: compute failed with ValueError: no",
        "optimizer_health": "Hook 'optimizer_health' reads second moments, and SGD has none.",
    }
    history.hooks = [*history.left_out, "training_metrics", "activations", "first_nonfinite", "loss_spikes"]
    history.hooks += ["parameter_norms"]
    history.status = "completed"
    reasons = history.left_out
    assert diagnose(history).missing == [
        f"The diagnosis is incomplete: {reasons['training_checks']}.",
        f"Not checked: {reasons['optimizer_health'].rstrip('.')}.",
    ]


@pytest.mark.parametrize(("factor", "expected"), [(0.0, True), (1e-6, False)])
def test_gradients_zeroed_before_the_update_are_found(factor: float, expected: bool) -> None:
    history = History()
    history.add(3, {"training_checks/grad_norm": Series([1, 2, 3], [1.0] * 3)})
    history.add(3, {"training_checks/clip_factor": Series([1, 2, 3], [factor] * 3)})
    assert ("gradients-zeroed-too-early" in ids(history)) is expected


@pytest.mark.parametrize(("lost", "expected"), [(1.0, True), (0.5, False)])
def test_gradients_zeroed_between_micro_batches_are_found(lost: float, expected: bool) -> None:
    """Half of the parameters may belong to the second of two losses."""
    history = History()
    history.add(3, {"training_checks/lost_gradient_fraction": Series([1, 2, 3], [lost] * 3)})
    assert ("gradients-zeroed-too-early" in ids(history)) is expected


@pytest.mark.parametrize(
    ("fractions", "tops", "expected"),
    [
        ([1.0, 1.0, 0.6, 1.0], [0, 0, 1, 2], True),
        ([1.0, 1.0, 1.0, 0.95], [0, 0, 0, 0], False),
        ([0.6, 0.5, 0.4, 0.6], [0, 1, 2, 3], False),
    ],
    ids=["sorted", "unbalanced", "shuffled"],
)
def test_batches_of_changing_single_classes_are_sorted(fractions: list[float], tops: list[int], expected: bool) -> None:
    history = History(settings={"batch_size": 40})
    steps = [1, 2, 3, 5]
    history.add(5, {"training_checks/class_count": 6, "training_checks/single_class_batch_fraction": 0.5})
    history.add(5, {"training_checks/target_top_fraction": Series(steps, fractions)})
    history.add(5, {"training_checks/target_top": Series(steps, tops)})
    assert ("data-sorted-by-class" in ids(history)) is expected


@pytest.mark.parametrize(("decay", "expected"), [(5e-4, False), (0.5, True)])
def test_usual_weight_decay_is_no_cause(decay: float, expected: bool) -> None:
    """Weights that hardly get a gradient shrink under any decay."""
    history = with_losses([2.3] * 200, groups=[{"optimizer": "Adam", "lr": 1e-3, "weight_decay": decay}])
    history.add(200, {"parameter_norms/total_weight_norm": Series([1, 51, 101], [10.0, 3.0, 2.0])})
    assert ("weight-decay-too-large" in ids(history)) is expected


@pytest.mark.parametrize(("ratio", "expected"), [(4e-4, False), (0.2, True)])
def test_small_updates_need_no_warm_up(ratio: float, expected: bool) -> None:
    """Losses of single batches rise by noise, too."""
    losses = [7.4, 9.0, 10.3, 9.9, 9.7, *np.linspace(9.0, 1.0, 195)]
    history = with_losses(list(losses))
    history.curves.pop("training_checks/update_ratio")
    history.add(3, {"training_checks/update_ratio": Series([1, 2, 3], [ratio] * 3)})
    assert ("warm-up-missing" in ids(history)) is expected


@pytest.mark.parametrize(
    ("largest", "deviation", "expected"), [(0.9, 1.0, False), (17.0, 1.0, True), (0.9, 80.0, True)]
)
def test_high_first_loss_needs_unusual_scales(largest: float, deviation: float, expected: bool) -> None:
    """With usual weights and inputs it is that of a pretrained model."""
    history = with_losses([9.4] * 3, weight_scales={"count": 3, "median": 0.7, "largest": ["out.weight", largest]})
    history.add(3, {"training_checks/input_mean": 0.1, "training_checks/input_std": deviation})
    assert ("initial-loss-high" in ids(history)) is expected


def test_models_may_normalise_their_inputs() -> None:
    """Activations of usual size behind inputs from 0 to 255 come from a normalisation within the model."""
    history = History()
    history.add(1, {"training_checks/input_mean": 127.0, "training_checks/input_std": 52.0})
    assert "inputs-not-normalised" in ids(history)
    history.add(1, {"activations/rms/first": 0.6, "activations/rms/second": 0.4})
    assert "inputs-not-normalised" not in ids(history)


def test_equal_labels_are_named() -> None:
    history = History(settings={"batch_size": 40})
    for step in (1, 2, 3):
        numbers = {"class_count": 6, "single_class_batch_fraction": 1.0, "target_top": 2, "target_top_fraction": 1.0}
        history.add(step, {f"training_checks/{name}": value for name, value in numbers.items()})
    (finding,) = diagnose(history).at_least("warning")
    assert "are the class 2" in finding.why
    assert "Print the labels" in finding.next


@pytest.mark.parametrize(("classes", "expected"), [(1, True), (2, False)])
def test_cross_entropy_of_one_class_is_found(classes: int, expected: bool) -> None:
    history = History()
    history.add(1, {"training_checks/class_count": classes})
    assert ("cross-entropy-of-one-class" in ids(history)) is expected


@pytest.mark.parametrize(("level", "expected"), [(0.3, True), (0.0, False)])
def test_gradients_of_zero_at_a_loss_are_found(level: float, expected: bool) -> None:
    """A hinge loss of 0 has no gradient, either."""
    history, steps = History(), list(range(1, 31))
    history.add(30, {"training_checks/loss": Series(steps, [0.5] * 10 + [level] * 20)})
    history.add(30, {"training_checks/grad_norm": Series(steps, [1.0] * 10 + [0.0] * 20)})
    assert ("gradients-all-zero" in ids(history)) is expected


def with_updates_at(updates: list[int], leftover: list[float]) -> History:
    """Return a history of 24 backward passes with updates after some of them."""
    history, steps = History({"trainable": 4}, hooks=["training_checks", "parameter_norms"]), list(range(1, 25))
    history.add(24, {"training_checks/grad_norm": Series(steps, [1.0] * 24)})
    history.add(24, {"training_checks/leftover_gradient_count": Series([2, 3, 5, 10, 20], leftover)})
    if updates:
        history.add(24, {"parameter_norms/total_clipped_grad_norm": Series(updates, [1.0] * len(updates))})
    history.status = "completed"
    return history


@pytest.mark.parametrize(
    ("leftover", "expected"),
    [
        ([4, 4, 4, 4], {"second-backward-pass"}),
        ([0, 4, 4, 4], {"gradients-not-zeroed"}),
        ([4, 0, 0, 0], set()),
        ([1, 1, 1, 1], set()),
    ],
    ids=["second pass", "not zeroed", "a pass before the training", "a few parameters"],
)
def test_gradients_of_the_same_step_are_distinguished(leftover: list[int], expected: set[str]) -> None:
    """Before the first reported pass of the first step, only another pass of this step has filled gradients."""
    history = History({"trainable": 4})
    history.add(5, {"training_checks/leftover_gradient_count": Series([1, 2, 3, 5], [*map(float, leftover)])})
    assert {*ids(history)} & {"second-backward-pass", "gradients-not-zeroed"} == expected


@pytest.mark.parametrize(
    ("updates", "leftover", "expected"),
    [
        ([], [4.0] * 5, {"optimizer-not-stepped": "critical"}),
        (list(range(4, 25, 4)), [4.0, 4.0, 0.0, 4.0, 4.0], {"optimizer-not-stepped": "info"}),
        (list(range(1, 25)), [4.0] * 5, {"gradients-not-zeroed": "critical"}),
        (list(range(1, 25)), [0.0] * 5, {}),
    ],
    ids=["never", "accumulation", "not zeroed", "sound"],
)
def test_updates_that_do_not_follow_each_pass(
    updates: list[int], leftover: list[float], expected: dict[str, str]
) -> None:
    found = {item.id: item.severity for item in diagnose(with_updates_at(updates, leftover))}
    assert {
        name: found[name] for name in found if name in ("optimizer-not-stepped", "gradients-not-zeroed")
    } == expected


@pytest.mark.parametrize(
    ("factor", "identifier"), [(65536.0, "gradients-not-unscaled"), (1.0, None)], ids=["not unscaled", "unscaled"]
)
def test_updates_by_scaled_gradients_are_found(factor: float, identifier: str | None) -> None:
    history = History({"scaler": True})
    history.add(1, {"training_checks/loss_scale": 65536.0, "training_checks/clip_factor": factor})
    assert next(iter(ids(history)), None) == identifier


def test_clipping_of_scaled_gradients_is_named() -> None:
    """The norm after clipping, times the scale, is the limit in every step."""
    history, steps = History({"scaler": True}), list(range(1, 21))
    norms = np.linspace(0.4, 0.6, 20).tolist()
    history.add(20, {"parameter_norms/total_grad_norm": Series(steps, norms)})
    history.add(20, {"parameter_norms/total_clipped_grad_norm": Series(steps, [1 / 65536] * 20)})
    history.add(20, {"parameter_norms/clipped_fraction": Series(steps, [1.0] * 20)})
    history.add(20, {"training_checks/loss_scale": 65536.0})
    (finding,) = [item for item in diagnose(history) if item.id == "clipping-too-strong"]
    assert "unscale_" in finding.next


def test_evaluations_without_any_change_are_found() -> None:
    history = healthy_history()
    history.add(200, {"training_metrics/evaluation/val_loss": Series([50, 100, 150, 200], [1.817] * 4)})
    (finding,) = [item for item in diagnose(history) if item.id == "train-validation-diverging"]
    assert "exactly 1.817 in all 4 evaluations" in finding.why


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"training_checks/loss_divisor": 1 / 1500}, "the loss is multiplied by 1,500"),
        ({"activations/rms/first": 2.0, "activations/rms/last": 4e4}, "activations grow from block to block"),
        ({}, "the logits are too large"),
    ],
    ids=["factor", "blocks", "logits"],
)
def test_high_first_losses_have_different_reasons(facts: dict[str, float], expected: str) -> None:
    history = with_losses([1500 * 2.3] * 3)
    history.add(1, facts)
    (finding,) = [item for item in diagnose(history) if item.id == "initial-loss-high"]
    assert expected in finding.why


def test_used_up_rates_are_found_in_progress() -> None:
    """After a fall by 10,000 no schedule comes back, so the finding needs neither a plan nor the end."""
    history, steps = healthy_history(), list(range(1, 201))
    history.add(200, {"training_metrics/lr": Series(steps, [0.5**step for step in steps])})
    assert "schedule-ends-early" in ids(history)


def test_records_without_steps_are_incomplete() -> None:
    history = History(status="completed")
    assert any("No step with a loss was recorded" in sentence for sentence in diagnose(history).missing)


def test_updates_within_the_backward_pass_leave_no_gradients() -> None:
    """An optimizer that steps in hooks of the parameters clears each gradient at once; the loss falls."""
    history = healthy_history()
    history.hooks = ["training_checks", "parameter_norms"]
    history.curves.pop("training_checks/grad_norm")
    history.curves.pop("training_checks/update_ratio")
    steps = list(range(1, 201))
    history.add(200, {"training_checks/grad_norm": Series(steps, [0.0] * 200)})
    history.add(200, {"training_checks/without_gradient_count": Series([1, 2, 3], [4] * 3)})
    history.add(200, {"training_checks/never_gradient_count": Series([1, 2, 3], [4] * 3)})
    assert ids(history) == []


def test_updates_no_hook_sees_are_not_judged() -> None:
    history = with_updates_at([], [4.0] * 5)
    history.left_out = {"parameter_norms": "it cannot run: MemoryError"}
    assert "optimizer-not-stepped" not in ids(history)
    assert "gradients-not-zeroed" in ids(history)


@pytest.mark.parametrize(("averages", "expected"), [([1, 1], []), ([0, 0], ["accumulation-not-averaged"]), ([], [])])
def test_shorter_last_step_is_no_missing_average(averages: list[int], expected: list[str]) -> None:
    """Steps 1 and 2 have three micro-batches, step 3 has one and does not report whether it averages them."""
    history = healthy_history()
    history.add(3, {"training_checks/micro_batches": Series([1, 2, 3], [3, 3, 1])})
    history.add(3, {"training_checks/loss_divisor": Series([1, 2, 3], [1, 1, 1])})
    history.add(3, {"training_checks/averages_micro_batches": Series([1, 2][: len(averages)], averages)})
    assert [finding.id for finding in diagnose(history)] == expected


def checked(**curves: list[float]) -> History:
    """Return a history whose loss falls, with metrics of ``training_checks`` at evenly spaced steps."""
    history = with_losses([*np.linspace(2.3, 0.5, 400)])
    for name, values in curves.items():
        history.curves.pop(f"training_checks/{name}", None)
        steps = [1 + index * (399 // len(values)) for index in range(len(values))]
        history.add(400, {f"training_checks/{name}": Series(steps, values)})
    return history


@pytest.mark.parametrize(
    ("losses", "missing", "expected"),
    [
        ([0.0] * 20, 0, "gradients-all-zero"),
        ([1.0] * 20, 0, "gradients-all-zero"),
        ([0.0] * 20, 4, "parameters-without-gradient"),
        ([0.0] * 5, 0, ""),
    ],
    ids=["margin that is met", "collapsed", "detached", "few steps"],
)
def test_gradients_of_zero_are_not_missing(losses: list[float], missing: int, expected: str) -> None:
    history = with_losses(losses)
    history.facts = {"trainable": 4}
    history.curves.pop("training_checks/grad_norm")
    steps = list(range(1, len(losses) + 1))
    for name, value in (("grad_norm", 0.0), ("without_gradient_count", missing), ("never_gradient_count", 4)):
        history.add(len(losses), {f"training_checks/{name}": Series(steps, [value] * len(losses))})
    assert [name for name in ids(history) if "gradient" in name][:1] == [expected] * bool(expected)


@pytest.mark.parametrize(
    ("deviations", "expected"),
    [
        ([1.0, 1.1, 0.9, 3.0, 12.0, 50.0, 80.0], True),
        ([1.0, 1.1, 0.9, 3.0, 3.0, 3.1, 3.0], False),
        ([1.0, 1.0, 1.0, 1 / 255, 1e-5, 1e-5, 1e-5], True),
        ([30.0] * 7, False),
    ],
    ids=["normalised again", "states of an agent", "divided again", "never normalised"],
)
def test_inputs_that_leave_their_range(deviations: list[float], expected: bool) -> None:
    history = checked(input_std=deviations, input_mean=[0.0] * 7)
    assert ("inputs-drift" in ids(history)) is expected


@pytest.mark.parametrize(
    ("first_epoch", "repeated", "expected"), [(100, 0.0, True), (50, 0.0, False), (100, 0.5, False)]
)
def test_validation_apart_after_one_epoch(first_epoch: int, repeated: float, expected: bool) -> None:
    """No model can have memorised rows that it sees for the first time."""
    history = checked(repeated_row_fraction=[repeated] * 8)
    history.first_epoch_end = first_epoch
    history.add(400, {"training_metrics/evaluation/val_loss": Series([100, 200, 300, 400], [5.0, 5.1, 5.0, 5.2])})
    texts = [finding.why for finding in diagnose(history) if finding.id == "train-validation-diverging"]
    assert any("first epoch" in text for text in texts) is expected


@pytest.mark.parametrize(
    ("variation", "loss", "terms", "expected"),
    [(1e-8, 1.0, 0, True), (0.001, 1.0, 0, False), (0.01, 1.0, 1, True), (0.3, 1.0, 1, False), (1e-8, 0.5, 0, False)],
)
def test_equal_outputs_of_all_rows_are_found(variation: float, loss: float, terms: int, expected: bool) -> None:
    """Other terms of the loss leave a little variation."""
    history = checked(output_variation=[variation] * 8, term_loss=[loss] * 8, constant_loss=[1.0] * 8)
    history.add(400, {"training_checks/loss_has_terms": terms})
    assert ("outputs-ignore-inputs" in ids(history)) is expected


@pytest.mark.parametrize(
    ("accuracy", "loss", "expected"),
    [(0.1, 0.01, True), (0.1, 0.6, False), (0.97, 0.01, False), (0.5, 0.2, True)],
    ids=["impossible", "allowed", "agreeing", "far below the bound"],
)
def test_accuracy_below_the_bound_of_its_loss(accuracy: float, loss: float, expected: bool) -> None:
    """A wrong class costs ln 2 or more, so that at most loss / ln 2 of the rows are wrong."""
    history = checked(uniform_loss=[2.3] * 8)
    for name, value in (("val_acc", accuracy), ("val_loss", loss)):
        history.add(400, {f"training_metrics/evaluation/{name}": Series([100, 200, 300, 400], [value] * 4)})
    assert ("score-contradicts-loss" in ids(history)) is expected


@pytest.mark.parametrize(("invalid", "expected"), [(0.2, True), (0.0, False)])
def test_targets_beyond_probabilities_are_found(invalid: float, expected: bool) -> None:
    history = checked(invalid_target_fraction=[invalid] * 8, target_min=[0.0] * 8, target_max=[255.0] * 8)
    assert ("targets-not-probabilities" in ids(history)) is expected


def test_nonfinite_targets_come_before_their_last_bias() -> None:
    history = with_losses([1.0] * 6 + [math.nan] * 10)
    history.add(7, {"training_checks/nonfinite_target_fraction": Series([1, 7], [0.0, 0.1])})
    (finding,) = [finding for finding in diagnose(history) if finding.id == "nonfinite"]
    assert "targets" in finding.why


@pytest.mark.parametrize(
    ("curves", "expected"),
    [
        ({"ignored_inside_fraction": [0.6] * 5, "ignored_target_fraction": [0.5] * 5}, True),
        ({"ignored_inside_fraction": [0.0] * 5, "ignored_target_fraction": [0.5] * 5}, False),
        ({"ignored_inside_fraction": [0.9] * 5, "ignored_target_fraction": [0.85] * 5}, False),
        ({"ignored_end_fraction": [1.0] * 5}, True),
        ({"ignored_end_fraction": [0.2] * 5}, False),
    ],
    ids=["class", "padding", "masked language model", "end of text", "texts that are cut off"],
)
def test_class_that_is_never_a_target(curves: dict[str, list[float]], expected: bool) -> None:
    assert ("class-never-a-target" in ids(checked(**curves))) is expected


@pytest.mark.parametrize(
    ("facts", "evaluated", "expected"),
    [
        ({"largest_batchnorm_momentum": 0.99, "batchnorms": 2}, 1.0, True),
        ({"largest_batchnorm_momentum": 0.1, "batchnorms": 2}, 1.0, False),
        ({"largest_batchnorm_momentum": 0.1, "batchnorms": 2}, 5.0, True),
        ({"batchnorms": 0}, 5.0, False),
    ],
)
def test_running_statistics_of_one_batch(facts: dict[str, float], evaluated: float, expected: bool) -> None:
    history = checked()
    history.facts = facts
    history.add(400, {"training_metrics/evaluation/train_loss": Series([200, 300, 400], [evaluated] * 3)})
    assert ("batchnorm-momentum" in ids(history)) is expected


def ids_with(curves: dict[str, list[float]], **facts: object) -> list[str]:
    """Return the ids of findings about a healthy history with these values at the first checks."""
    history = healthy_history()
    history.facts |= facts  # type: ignore[operator]
    for name, values in curves.items():
        history.add(200, {f"training_checks/{name}": Series([1, 2, 3, 5, 10, 20][: len(values)], values)})
    return [finding.id for finding in diagnose(history).at_least("warning")]


@pytest.mark.parametrize(
    ("copies", "trained", "moved", "expected"),
    [(4, 0, 0, False), (4, 2, 0, True), (0, 0, 0, True), (0, 0, 4, False)],
    ids=["target network", "forgotten copies", "forgotten", "target network of other weights"],
)
def test_target_networks_need_no_optimizer(copies: int, trained: int, moved: int, expected: bool) -> None:
    missing = {"count": 4, "names": ["a", "b"], "share": 0.3, "copies": copies}
    found = ids_with({"outside_gradient_count": [trained], "outside_moved_count": [moved]}, without_optimizer=missing)
    assert found == ["parameters-without-optimizer"] * expected


@pytest.mark.parametrize(
    ("factors", "expected"),
    [([1.0] * 4, True), ([0.37, 0.51, 0.44, 1.0], True), ([1 / 192, 1 / 180, 0.003, 1 / 192], False)],
)
def test_sums_that_are_divided_later_are_no_fault(factors: list[float], expected: bool) -> None:
    assert ids_with({"loss_is_summed": [1], "clip_factor": factors}) == ["loss-summed"] * expected


@pytest.mark.parametrize(("factors", "expected"), [([0.0] * 6, True), ([0.0, 0.0, 0.3, 0.0, 0.0, 0.0], False)])
def test_masks_over_rows_zero_single_gradients(factors: list[float], expected: bool) -> None:
    assert ids_with({"clip_factor": factors}) == ["gradients-zeroed-too-early"] * expected


@pytest.mark.parametrize(("highs", "expected"), [([1.0] * 6, True), ([1, 2, 5, 10, 40, 50], False)])
def test_losses_of_growing_targets_may_rise(highs: list[float], expected: bool) -> None:
    history = History()
    history.add(100, {"training_checks/loss": Series(list(range(1, 101)), [float(step) for step in range(1, 101)])})
    for name in ("low", "high"):
        history.add(100, {f"training_checks/target_{name}": Series([1, 2, 3, 5, 10, 20], highs)})
    assert ("loss-rising" in [finding.id for finding in diagnose(history)]) is expected


@pytest.mark.parametrize(
    ("metric", "expected"),
    [("reported/reward", False), ("policy_health/approx_kl", False), ("reported/accuracy", True)],
)
def test_losses_of_policies_with_critics_may_rise(metric: str, expected: bool) -> None:
    steps = list(range(1, 101))
    history = History()
    history.add(
        100, {name: Series(steps, [float(step) for step in steps]) for name in ("training_checks/loss", metric)}
    )
    assert ("loss-rising" in [finding.id for finding in diagnose(history)]) is expected


def test_contrastive_losses_have_no_sorted_classes() -> None:
    history = healthy_history()
    history.settings = {"batch_size": 32}
    history.add(200, {"training_checks/single_class_batch_fraction": Series([1, 2, 3, 5], [1, 1, 1, 1])})
    assert [finding.id for finding in diagnose(history)] == ["data-sorted-by-class"]
    history.add(200, {"training_checks/loss_compares_outputs": 1})
    assert [finding.id for finding in diagnose(history)] == []


@pytest.mark.parametrize(("moved", "expected"), [(4, []), (0, ["gradients-all-zero"])])
def test_optimizers_in_backward_leave_no_gradient(moved: int, expected: list[str]) -> None:
    history = with_losses([1.0] * 20)
    history.curves.pop("training_checks/grad_norm")
    history.add(20, {"training_checks/grad_norm": Series(list(range(1, 21)), [0.0] * 20)})
    history.add(20, {"training_checks/moved_count": moved} if moved else {})
    assert [name for name in ids(history) if "gradient" in name] == expected


def test_outputs_of_critics_follow_growing_returns() -> None:
    history = checked(output_variation=[1e-7] * 8, term_loss=[1.0] * 8, constant_loss=[1.0] * 8)
    assert "outputs-ignore-inputs" in ids(history)
    for name in ("low", "high"):
        history.add(400, {f"training_checks/target_{name}": Series([1, 51, 101], [1.0, 3.0, 9.0])})
    assert "outputs-ignore-inputs" not in ids(history)


@pytest.mark.parametrize(
    ("scale", "classes", "expected"), [(1.0, 128, True), (1.0, 10, True), (10.0, 128, False), (1.0, 2, False)]
)
def test_cosines_of_many_classes_need_a_temperature(scale: float, classes: int, expected: bool) -> None:
    history = healthy_history()
    history.add(200, {"training_checks/cosine_scale": scale, "training_checks/class_count": classes})
    assert ("temperature-missing" in ids(history)) is expected


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([0.11, 0.1, 0.09, 0.02, 0.05, 0.03], False),
        ([0.11, 0.11, 0.11, 0.11, 0.11, 0.11], True),
        ([0.7, 0.1, 0.09, 0.02, 0.05, 0.03], True),
    ],
)
def test_brief_large_updates_explain_no_flat_loss(ratios: list[float], expected: bool) -> None:
    """The first updates of Adam are large for a new layer of small weights; a loss that stays has another reason."""
    history = with_losses([2.3] * 60)
    del history.curves["training_checks/update_ratio"]
    history.add(60, {"training_checks/update_ratio": Series([1, 2, 3, 5, 10, 20], ratios)})
    assert ("learning-rate-too-high" in ids(history)) is expected


@pytest.mark.parametrize(
    ("first", "last", "severity"), [(500.0, 0.4, "warning"), (500.0, 0.1, "info"), (1.1, 0.1, "info")]
)
def test_fall_from_a_huge_loss_is_no_learning(first: float, last: float, severity: str) -> None:
    """A fault that makes the first loss huge is a remark only if the loss is far below that of the best constant."""
    history = with_losses([first * 0.9**step + last for step in range(200)])
    for name, values in (("term_loss", [first, last, last]), ("constant_loss", [1.0] * 3), ("input_std", [500.0] * 3)):
        history.add(200, {f"training_checks/{name}": Series([1, 101, 151], values)})
    history.add(200, {"training_checks/input_mean": 0.0, "training_checks/class_count": 0})
    del history.curves["training_checks/uniform_loss"]
    found = {finding.id: finding.severity for finding in diagnose(history)}
    assert found["inputs-not-normalised"] == severity
