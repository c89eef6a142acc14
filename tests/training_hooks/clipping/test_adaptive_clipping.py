"""ZClip and AdaGC step by step against their papers' rules in plain Python, on norms with planted spikes."""

import math
import random

import pytest
import torch
from loopscope.training_hooks.clipping.adaptive_clipping import AdaGC, Gammas, ZClip

STEPS = 200
SPIKES = {40: 8.0, 41: 3.0, 90: 50.0, 91: 40.0, 150: 1.5, 180: 1e4}
ZCLIP = ZClip(alpha=0.97, z_threshold=2.5, warmup=25)
ADAGC = AdaGC(beta=0.98, lambda_rel=1.05, lambda_abs=1.0, warmup=100)
CPU = torch.device("cpu")


def norms(seed: int, spikes: dict[int, float] = SPIKES) -> list[float]:
    """Draw norms that scatter by 5 % around a level that falls to a third, with spikes."""
    draw = random.Random(seed)
    return [draw.gauss(1, 0.05) * 3 ** (-step / STEPS) * spikes.get(step, 1) for step in range(STEPS)]


def zclip_by_hand(series: list[float]) -> list[float]:
    """Return the norms that section 3 of arXiv 2504.02507 leaves, at its defaults."""
    mean = sum(series[:25]) / 25
    std = math.sqrt(sum((norm - mean) ** 2 for norm in series[:25]) / 25)
    kept = series[:25]
    for norm in series[25:]:
        z = (norm - mean) / std
        kept.append(mean + 2.5**2 / z * std if z > 2.5 else norm)
        mean = 0.97 * mean + 0.03 * kept[-1]
        std = math.sqrt(0.97 * std**2 + 0.03 * (kept[-1] - mean) ** 2)
    return kept


def adagc_by_hand(table: list[list[float]], warmup: int) -> list[list[float]]:
    """Return the norms, by step and parameter, that algorithm 1 of arXiv 2502.11034 leaves, at its defaults."""
    gammas, kept = [math.inf] * len(table[0]), []
    for step, row in enumerate(table):
        if step < warmup:
            factor = min(1.0, 1.0 / math.sqrt(sum(norm**2 for norm in row)))
            kept.append([factor * norm for norm in row])
            gammas = [min(pair) for pair in zip(gammas, kept[-1], strict=True)]
        else:
            kept.append([min(1.0, 1.05 * gamma / norm) * norm for gamma, norm in zip(gammas, row, strict=True)])
            gammas = [0.98 * gamma + 0.02 * norm for gamma, norm in zip(gammas, kept[-1], strict=True)]
    return kept


def zclip(series: list[float], history: torch.Tensor | None = None) -> tuple[list[float], torch.Tensor]:
    history, kept = torch.zeros(3, dtype=torch.float64) if history is None else history, []
    for norm in series:
        step = ZCLIP(history, torch.tensor(norm, dtype=torch.float64))
        kept.append(norm * step.factor.item())
        history = step.history
    return kept, history


def adagc(table: list[list[float]], rule: AdaGC = ADAGC) -> list[list[float]]:
    gammas, kept = Gammas(), []
    names = [f"p{number}" for number in range(len(table[0]))]
    for row in table:
        step = rule(gammas.take(names, CPU), gammas.taken, torch.tensor(row, dtype=torch.float64))
        gammas.put(names, step)
        kept.append([norm * factor for norm, factor in zip(row, step.factors.tolist(), strict=True)])
    return kept


@pytest.mark.guarantee("numbers-match-plain-formulas")
@pytest.mark.parametrize("seed", range(5))
def test_zclip_matches_the_paper_at_every_step(seed):
    """The hook zclip follows the rules of its paper at every step."""
    series = norms(seed)
    kept, _ = zclip(series)
    assert kept == pytest.approx(zclip_by_hand(series), rel=1e-12)
    clipped = {step for step in range(STEPS) if kept[step] < series[step]}
    assert clipped == {step for step, size in SPIKES.items() if size >= 3}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("warmup", [100, 20])
def test_adagc_matches_the_paper_at_every_step(seed, warmup):
    """Every parameter matches a plain Python version of the rule, which clips the planted spikes."""
    table = [list(row) for row in zip(norms(seed), norms(seed + 9, {120: 9.0}), norms(seed + 99, {}), strict=True)]
    kept = adagc(table, AdaGC(beta=0.98, lambda_rel=1.05, lambda_abs=1.0, warmup=warmup))
    expected = adagc_by_hand(table, warmup)
    assert [value for row in kept for value in row] == pytest.approx([v for row in expected for v in row], rel=1e-12)
    assert kept[120][1] < table[120][1] / 6
    assert kept[180][0] < table[180][0] / 5000


def test_zclip_statistics_describe_earlier_norms():
    """Mean, deviation, z-score and threshold come from the norms before the step."""
    series = norms(0)[:25]
    _, history = zclip(series)
    step = ZCLIP(history, torch.tensor(2.0))
    mean, std = torch.tensor(series).double().mean().item(), torch.tensor(series).double().std(correction=0).item()
    found = [step.mean.item(), step.std.item(), step.z.item(), step.threshold.item()]
    assert found == pytest.approx([mean, std, (2 - mean) / std, mean + 2.5 * std], rel=1e-6)
    assert step.factor.item() == pytest.approx((mean + 6.25 / step.z.item() * std) / 2, rel=1e-6)


def test_zclip_brings_larger_spikes_closer_to_mean():
    _, history = zclip(norms(0)[:25])
    small, large = (norm * ZCLIP(history, torch.tensor(norm)).factor.item() for norm in (1.5, 1e6))
    assert history[1] < large < small < ZCLIP(history, torch.tensor(1.0)).threshold
    assert large == pytest.approx(history[1].item(), rel=1e-3)


def test_zclip_without_variance_clips_to_the_mean():
    _, history = zclip([2.0] * 25)
    kept, after = zclip([2.0, 5.0, 1.0], history)
    assert kept == pytest.approx([2.0, 2.0, 1.0])
    assert after.isfinite().all()


@pytest.mark.some_rows(3)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("at", [0, 7, 24, 25, 60])
def test_zclip_ignores_nonfinite_norms(bad, at):
    """They neither enter the history nor count for the warmup."""
    series = norms(3)
    with_bad, history = zclip([*series[:at], bad, *series[at:]])
    without, expected = zclip(series)
    assert torch.equal(history, expected)
    assert with_bad[:at] + with_bad[at + 1 :] == without
    assert ZCLIP(expected, torch.tensor(bad)).factor == 1


@pytest.mark.some_rows(3)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("at", [0, 7, 99, 100, 160])
def test_nonfinite_step_leaves_adagc_unchanged(bad, at):
    table = [list(row) for row in zip(norms(0), norms(1), strict=True)]
    kept = adagc([*table[:at], [bad, 7.0], *table[at:]])
    assert kept[at][1] == 7.0
    assert kept[:at] + kept[at + 1 :] == adagc(table)


def test_zero_gradients_do_not_collapse_adagc():
    """A later gradient is not clipped to zero."""
    quiet = [[0.5, 0.0 if step % 2 else 0.5] for step in range(150)]
    for row in adagc(quiet)[100:]:
        assert row[0] == pytest.approx(0.5)
        assert row[1] in (0.0, pytest.approx(0.5))
    assert adagc([[0.5, 0.0]] * 120 + [[0.5, 0.3]] * 2)[-1] == [0.5, 0.3]


def test_parameter_without_gradient_keeps_its_history():
    """A new parameter has no ratio at its first step."""
    gammas, rule = Gammas(), AdaGC(beta=0.5, lambda_rel=1.05, lambda_abs=10.0, warmup=1)
    for names, row in ((["a"], [1.0]), (["b", "a"], [4.0, 1.0]), (["b"], [2.0])):
        gammas.put(names, rule(gammas.take(names, CPU), gammas.taken, torch.tensor(row)))
    assert gammas.names == ["a", "b"]
    assert gammas.values.tolist() == [1.0, 3.0]
    assert gammas.taken == 3
    step = rule(gammas.take(["c", "a"], CPU), gammas.taken, torch.tensor([1.0, 2.0]))
    assert step.ratios.isnan().tolist() == [True, False]
    assert step.ratios[1] == 2.0
