"""Metrics of counts, and the sums_of_counts with counts by layer and role, on one rank and on two."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from loopscope.lowbit.casts import MAXIMA, SUMS, Cast, Counts
from loopscope.training import Ranks
from loopscope.training_hooks.lowbit import GradientOverflow
from loopscope.training_hooks.lowbit.overflow_ledger import (
    READINGS,
    Alarm,
    CountSums,
    StepCounts,
    close_counts,
    readings,
)

from tests.support.ranks import on_two_ranks
from tests.training_hooks.lowbit.low_bit_runs import LowBitRun, network
from tests.training_hooks.reloading import through_a_file

CPU = torch.device("cpu")
CAST = Cast("e2m1", "nvfp4")
pytestmark = pytest.mark.filterwarnings("ignore:Step [0-9,]+")


def counts_of(*values: torch.Tensor, cast: Cast = CAST) -> Counts:
    total = Counts.zeros()
    for tensor in values:
        total.add(cast.with_counts(tensor)[1])
    return total


def read(counts: Counts) -> dict[str, float]:
    return {name: float(value) for name, value in readings(counts.sums.numpy(), counts.maxima.numpy()).items()}


def turned(sums_of_counts: CountSums) -> StepCounts:
    return close_counts({"": sums_of_counts}, CPU)[""]


def test_readings_are_the_formulas_that_are_described():
    sums = dict(zip(SUMS, (4.0, 3.0, 100.0, 10.0, 20.0, 4.0, 30.0, 15.0, 24.0, 216.0), strict=True))
    maxima = dict(zip(MAXIMA, (2.5, 8.0, 0.5), strict=True))
    found = readings(np.array([*sums.values()]), np.array([*maxima.values()]))
    assert {name: float(value) for name, value in found.items()} == {
        "element_overflow_rate": 0.1,
        "batch_overflow_rate": 0.75,
        "total_elements": 100,
        "total_overflow_elements": 10,
        "total_quantizations": 4,
        "overflow_count": 3,
        "excess_mean": 1.5,
        "excess_max": 2.5,
        "underflow_rate": 0.2,
        "non_finite_count": 4,
        "quantization_error": 0.25,
        "gradient_to_noise_ratio": 3.0,
        "scale_min": 2.0,
        "scale_max": 8.0,
        "scale_spread": 4.0,
        "upper_half_fraction": 0.3,
    }
    assert found.keys() == READINGS.keys()


def test_nothing_counted_reads_as_nothing_measured():
    found = read(Counts.zeros())
    whole = ("total_elements", "total_overflow_elements", "total_quantizations", "overflow_count", "non_finite_count")
    assert {name for name, value in found.items() if value == 0} == {*whole}
    assert all(math.isnan(value) for name, value in found.items() if name not in whole)


@pytest.mark.parametrize("rule", ["tensor", "block", "current", "mx_ceil", "mx_rceil"])
@pytest.mark.parametrize("kind", ["gaussian", "cauchy", "constant", "outlier"])
def test_overflow_free_rules_report_zero_overflow(rule, kind):
    """Values in the upper half of the range are counted separately."""
    torch.manual_seed(0)
    gaussian = torch.randn(64, 96)
    values = {
        "gaussian": gaussian,
        "cauchy": torch.empty(64, 96).cauchy_(),
        "constant": torch.full((64, 96), 0.3),
        "outlier": gaussian.index_put((torch.tensor([3]), torch.tensor([5])), torch.tensor(1e6)),
    }[kind]
    found = read(counts_of(values, cast=Cast("e2m1", rule)))
    assert found["element_overflow_rate"] == found["batch_overflow_rate"] == found["overflow_count"] == 0
    assert found["upper_half_fraction"] > 0 or kind == "constant"
    assert math.isnan(found["excess_max"])


def test_gaussian_rates_match_the_descriptions():
    torch.manual_seed(0)
    gaussian = torch.randn(100, 640)
    under = {rule: read(counts_of(gaussian, cast=Cast("e2m1", rule))) for rule in ("block", "nvfp4", "mx_floor")}
    assert under["mx_floor"]["element_overflow_rate"] == pytest.approx(0.023, abs=0.002)
    assert under["nvfp4"]["element_overflow_rate"] == pytest.approx(0.035, abs=0.003)
    assert under["nvfp4"]["excess_max"] <= 17 / 16
    assert under["block"]["upper_half_fraction"] == pytest.approx(0.32, abs=0.01)
    assert under["block"]["underflow_rate"] == pytest.approx(0.07, abs=0.01)


def test_page_holds_step_and_run_sums():
    """Sums are kept by layer and role."""
    torch.manual_seed(0)
    sums_of_counts, tensors = CountSums(["a", "b"], ["in", "out"]), [torch.randn(8, 32) * 10**n for n in range(4)]
    for tensor in tensors[:2]:
        sums_of_counts.add("a", "out", counts_of(tensor))
    first = turned(sums_of_counts)
    sums_of_counts.add("b", "out", counts_of(tensors[2]))
    sums_of_counts.add("a", "in", counts_of(tensors[3]))
    second = turned(sums_of_counts)
    assert (first.active_roles(), second.active_roles()) == ([1], [0, 1])
    assert first.sums[0, 1].tolist() == counts_of(*tensors[:2]).sums.tolist()
    assert not first.sums[1].any()
    assert second.run_sums[0, 1].tolist() == first.sums[0, 1].tolist()
    step, run = second.over((0, 1))
    assert run["total_elements"] == sum(tensor.numel() for tensor in tensors)
    assert step["scale_max"] == float(counts_of(tensors[3]).maxima[1])
    assert [name for name, _ in second.worst("scale_max", 1, largest=True)] == ["b"]


def test_ledger_resumes_only_with_same_layers():
    """With other layers the counts restart at zero."""
    sums_of_counts = CountSums(["a"], ["in"])
    sums_of_counts.add("a", "in", counts_of(torch.randn(4, 16)))
    turned(sums_of_counts)
    state = through_a_file(sums_of_counts.state_dict())
    for layers, expected in ((["a"], 128), (["other"], 64)):
        resumed = CountSums(layers, ["in"])
        resumed.load_state_dict(state)
        resumed.add(layers[0], "in", counts_of(torch.randn(4, 16)))
        step_count = turned(resumed)
        assert step_count.over((0, 1))[1]["total_elements"] == expected


def test_saved_sums_are_not_overwritten_later():
    sums_of_counts = CountSums(["a"], ["in"])
    for _ in range(2):
        sums_of_counts.add("a", "in", counts_of(torch.randn(4, 16)))
        turned(sums_of_counts)
        if sums_of_counts.steps == 1:
            kept = sums_of_counts.state_dict()["run"]["sums"]
            before = kept.clone()
    assert torch.equal(kept, before)


# Ranks


def page_of(ratios: list[float], rates: list[float]) -> StepCounts:
    """Make a step_count of gradients, one a layer, with these ratios of gradient to noise and rates of overflow."""
    sums = np.zeros((len(ratios), 1, len(SUMS)))
    for row, ratio, rate in zip(sums[:, 0], ratios, rates, strict=True):
        named = {"quantizations": 1, "total_elements": 100, "total_overflow_elements": 100 * rate, "squared_error": 1}
        for name, value in {**named, "squared_norm": ratio**2}.items():
            row[SUMS.index(name)] = value
    layers = [f"layer{index}" for index in range(len(ratios))]
    return StepCounts(
        layers, ["gradients/e2m1/tensor"], sums, np.zeros((len(ratios), 1, len(MAXIMA))), sums, sums[..., :0]
    )


def sentences_of(step_counts: list[StepCounts]) -> list[str]:
    """Return what an alarm with thresholds 0.1 and √3 says at step_counts of successive steps."""
    alarm, said = Alarm(0.1, math.sqrt(3)), []
    for step, step_count in enumerate(step_counts, start=1):
        alarm.update(step_count, step)
        said += [str(alert).replace(" gradients/e2m1/tensor", "") for alert in alarm.alerts.take_due(step)]
    return said


def test_alarm_separates_new_and_unrecovered_layers():
    """A cast recovers only well within its threshold, and the end of the condition is reported."""
    quiet = [0.0] * 4
    ratios = [
        [1.0, 1.5, 5.0, 5.0],
        [2.0, 3.3, 1.2, 5.0],
        [2.0, 9.0, 3.0, 3.0],
        [2.0, 9.0, 9.0, 9.0],
        [4.0, 9.0, 9.0, 9.0],
    ]
    below = "gradient-to-noise ratio below 1.73"
    assert sentences_of([page_of(each, quiet) for each in ratios]) == [
        f"Step 1: 2 of 4 casts have a {below}: layer0 (1), layer1 (1.5).",
        f"Step 2: 1 of 4 casts has a {below}: layer2 (1.2); not yet recovered: layer0 (2), layer1 (3.3).",
        f"Step 5: no cast has a {below} any more.",
    ]
    rates = [[0.2, 0.0], [0.07, 0.3], [0.07, 0.07], [0.01, 0.02]]
    over = "in more than 0.1 of its elements"
    assert sentences_of([page_of([9.0, 9.0], each) for each in rates]) == [
        f"Step 1: 1 of 2 casts overflows {over}: layer0 (0.2).",
        f"Step 2: 1 of 2 casts overflows {over}: layer1 (0.3); not yet recovered: layer0 (0.07).",
        f"Step 4: no cast overflows {over} any more.",
    ]


def counted_on_a_rank() -> dict[str, float]:
    return alone(torch.distributed.get_rank(), ranks=Ranks([torch.distributed.group.WORLD]))


def alone(rank: int, **options: Any) -> dict[str, float]:
    """Train one step with separate weights on each rank, without averaging, and return the metrics."""
    model = network("nvfp4")
    with torch.no_grad():
        model[0].weight.mul_(1 + 9 * rank)
    hook = GradientOverflow(formats="e2m1", interval=1, of="gradients,activations")
    run = LowBitRun(model, [hook], steps=1, audit=False, options=options).train()
    return {name: value for name, value in run.values(1).items() if not name.startswith("topk")}


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_sum_activations_but_not_gradients(tmp_path):
    """Activations and layer counts are combined; each rank reports its own gradients, which DDP makes equal."""
    both, (one, other) = on_two_ranks(counted_on_a_rank, tmp_path), (alone(0), alone(1))
    scales = {name for found in (one, other) for name in found if name.startswith("scale_exponents_of/activations")}
    assert {name: both[0][name] for name in scales} == {name: one.get(name, 0) + other.get(name, 0) for name in scales}
    one, other = ({n: v for n, v in each.items() if not n.startswith("scale_exp")} for each in (one, other))
    shared = [name for name in one if "gradients/" not in name]
    assert [both[0][name] for name in shared] == pytest.approx([both[1][name] for name in shared], nan_ok=True)
    for name in shared:
        pair = np.array([one[name], other[name]])
        if name.startswith(("total", "overflow_count", "cumulative_total", "non_finite")):
            assert both[0][name] == pair.sum()
        elif name.startswith(("scale_max", "excess_max")):
            assert both[0][name] == pytest.approx(np.fmax(*pair), nan_ok=True)
        elif name.startswith("scale_min"):
            assert both[0][name] == pytest.approx(np.fmin(*pair))
    gradients = [name for name in one if "gradients/" in name]
    assert [both[1][name] for name in gradients] == pytest.approx([other[name] for name in gradients], nan_ok=True)
