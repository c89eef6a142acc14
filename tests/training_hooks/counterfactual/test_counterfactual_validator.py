import math
from itertools import combinations, count

import pytest
import torch
from loopscope.engine import HookManager
from loopscope.errors import UsageError
from loopscope.hooks import HookRegistry
from loopscope.hooks.selection import hook_kind, select_hooks
from loopscope.loops import epoch_loop
from loopscope.training_hooks.counterfactual import CounterfactualValidator
from loopscope.training_hooks.counterfactual.counterfactual import ordering_split, split_errors
from loopscope.training_hooks.counterfactual.counterfactual_validator import estimates_by_count, smallest_within
from loopscope.training_hooks.counterfactual.splits import splits, squared_errors
from torch import Tensor, nn
from torch.nn import functional

from tests.support import STEPS_PER_EPOCH, Case, assert_same_bytes, build, train

K = 8


def epochs(
    draws: int, *, shuffles: int = K, size: int = 30, noise: float = 1.0, effect: float = 0.0, seed: int = 0
) -> Tensor:
    """Draw Gram matrices of a signal of energy 1 with noise; epoch 0 of each has an effect."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(draws, shuffles + 1, size, generator=generator, dtype=torch.float64) * math.sqrt(noise / size)
    vectors[:, :, 0] += 1
    vectors[:, 0, 1] += math.sqrt(effect)
    return vectors @ vectors.transpose(1, 2)


def of_set(gram: Tensor, observed: int, shuffles: tuple[int, ...]) -> dict[str, Tensor]:
    """Split one epoch by the function of the validated hook."""
    chosen = [observed, *shuffles]
    return ordering_split(gram[chosen][:, chosen])


@pytest.mark.parametrize("shuffles", [(1, 2), (2, 5, 7), (1, 2, 3, 4, 5, 6, 7, 8)])
def test_batched_splits_match_counterfactual_hook(shuffles):
    """The splits of several sets in one call equal those of ordering_split on each set."""
    gram = epochs(1, effect=0.5)[0]
    found = splits(gram, torch.tensor([0, 0]), torch.tensor([shuffles, shuffles[::-1]]))
    for name, values in found._asdict().items():
        torch.testing.assert_close(values, of_set(gram, 0, shuffles)[name].expand(2), msg=name)


@pytest.mark.longer
def test_estimates_are_the_means_over_all_sets():
    gram = epochs(1, effect=0.5)[0]
    estimates = estimates_by_count(gram)[0]
    assert list(estimates) == list(range(2, K + 1))
    for size, found in estimates.items():
        sets = [of_set(gram, 0, chosen) for chosen in combinations(range(1, K + 1), size)]
        for name, value in found._asdict().items():
            torch.testing.assert_close(value, torch.stack([split[name] for split in sets]).mean(), msg=name)


def test_errors_match_counterfactual_hook():
    """The squared errors of every set agree with split_errors."""
    gram, sets = epochs(1, effect=0.5)[0], [(1, 3, 4, 8), (2, 5, 6, 7)]
    found = squared_errors(gram, torch.tensor(sets))
    for index, chosen in enumerate(sets):
        expected = split_errors(gram[[0, *chosen]][:, [0, *chosen]])
        for name, values in found._asdict().items():
            torch.testing.assert_close(values[index].sqrt(), expected[f"{name}_error"])


def intervals(grams: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower and upper ends of the intervals at k_max, shape (draws,)."""
    hook = CounterfactualValidator(k_max=grams.shape[1] - 1)
    results = [hook.estimate(gram) for gram in grams]
    low, high = (torch.stack([result[name] for result in results]) for name in ("excess_low", "excess_high"))
    return low, high


@pytest.mark.parametrize(("size", "noise"), [(5, 1.0), (30, 0.1), (30, 1.0), (300, 10.0)])
@pytest.mark.statistical
def test_interval_covers_zero_without_effect(size, noise):
    """At least 93 percent of the intervals cover zero if the order has no effect."""
    low, high = intervals(epochs(200, shuffles=5, size=size, noise=noise))
    assert ((low <= 0) & (high >= 0)).double().mean().item() >= 0.93


@pytest.mark.longer
def test_interval_excludes_zero_with_planted_effect():
    """More than 95 percent of the lower bounds are positive."""
    low, _ = intervals(epochs(20, size=300, noise=1.0, effect=2.0))
    assert (low > 0).double().mean().item() > 0.95


@pytest.mark.statistical
def test_excess_error_matches_scatter_over_epochs():
    """The estimated error is within 10 percent of the standard deviation over 700 random epochs."""
    grams = epochs(700, noise=1.0)
    everything = torch.arange(1, K + 1)[None]
    found = [splits(gram, torch.tensor([0]), everything).excess for gram in grams]
    estimated = torch.stack([squared_errors(gram, everything).excess for gram in grams]).mean().sqrt()
    assert estimated.item() == pytest.approx(torch.cat(found).std().item(), rel=0.1)


@pytest.mark.statistical
def test_fraction_errors_match_scatter_over_shuffles():
    """The estimated errors are within 25 percent of the standard deviation over 300 sets of shuffles."""
    generator = torch.Generator().manual_seed(3)
    g = torch.randn(30, generator=generator, dtype=torch.float64) + 1
    estimates, errors = [], []
    everything = torch.arange(1, K + 1)[None]
    for _ in range(300):
        vectors = torch.cat([g[None], torch.randn(K, 30, generator=generator, dtype=torch.float64) + 1])
        gram = vectors @ vectors.T
        estimates.append(torch.cat(splits(gram, torch.tensor([0]), everything)[:2]))
        errors.append(torch.cat(squared_errors(gram, everything)[:2]))
    scatter, estimated = torch.stack(estimates).std(dim=0), torch.stack(errors).mean(dim=0).sqrt()
    torch.testing.assert_close(estimated, scatter, rtol=0.25, atol=0)


@pytest.mark.parametrize(
    ("widths", "expected"), [([0.5, 0.2, 0.09], 5), ([0.09, 0.2, 0.05], 5), ([0.1, 0.05, 0.01], 3), ([0.3, 0.2], None)]
)
def test_smallest_sufficient_count_requires_all_larger_counts(widths, expected):
    """Every larger count must be within the tolerance too; the result is NaN if no count qualifies."""
    found = smallest_within({3 + i: torch.tensor(width) for i, width in enumerate(widths)}, tolerance=0.1).item()
    assert math.isnan(found) if expected is None else found == expected


def test_run_reports_every_described_metric():
    """The hook reports at snapshots, changes no byte of the run and is refused in the step loop."""
    case = Case("batchnorm_mlp", "adamw_fused")
    run = train(case, [CounterfactualValidator(k_max=4)], steps=6)
    assert_same_bytes(run, case, 6)
    found = {row[0].removeprefix("counterfactual_validator/"): row[3] for row in run.sink.rows()}
    assert found.keys() == {info.name for info in CounterfactualValidator().describe_metrics()}
    assert found["excess"].keys() == {"2", "3", "4"}
    assert found["excess_error"].keys() == {"3", "4"}
    half = found["excess_half_width"]["4"]
    assert found["excess_high"] - found["excess_low"] == pytest.approx(2 * half)
    assert found["excess_half_width"]["3"] == pytest.approx(4.302653 * found["excess_error"]["3"])
    train(Case("tied", loop="step"), [CounterfactualValidator()], raises=UsageError)


def test_snapshot_costs_k_max_epochs():
    calls = count()

    def counting_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        next(calls)
        return functional.cross_entropy(model(batch[0]), batch[1])

    task, state = build(Case("tied", "sgd_momentum"))
    task.compute_loss = counting_loss
    epoch_loop(task, HookManager([CounterfactualValidator(k_max=5)], task, state))
    assert next(calls) == (1 + 5) * STEPS_PER_EPOCH


def test_validator_is_selected_only_with_debug():
    """The group all leaves the hook out because its kind is debug; adding with_debug selects it."""
    assert hook_kind(HookRegistry.get("counterfactual_validator")) == "debug"
    assert "counterfactual_validator" not in select_hooks(None, ["all"], {}, "any")
    assert "counterfactual_validator" in select_hooks(None, ["all", "with_debug"], {}, "any")


@pytest.mark.parametrize("options", [{"k_max": 2}, {"k_max": 13}, {"confidence": 1.0}, {"tolerance": 0.0}])
def test_invalid_options_are_refused(options):
    (name,) = options
    with pytest.raises(UsageError, match=rf"counterfactual_validator\.{name} is "):
        CounterfactualValidator(**options)
