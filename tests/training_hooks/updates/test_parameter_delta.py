"""The change of the parameters over an epoch against brute force in float64."""

import math

import pytest
import torch
from loopscope.hooks import HookPoint
from loopscope.state.digest import described
from loopscope.training_hooks.updates import ParameterDelta
from torch import nn

from tests.support import LOOPS, MODELS, STEPS_PER_EPOCH, Case, SpyHook, assert_same_bytes, at, train
from tests.training_hooks.epoch_end import epoch_end
from tests.training_hooks.reloading import reloading, through_a_file

REPORTS = (HookPoint.POST_EPOCH, HookPoint.SNAPSHOT)


class WeightLog(at(SpyHook, HookPoint.PRE_STEP, HookPoint.POST_EPOCH, HookPoint.SNAPSHOT)):
    """Keeps the parameters in float64 before the first step and at every report of the loop."""

    def __init__(self, loop: str) -> None:
        super().__init__()
        self.point = REPORTS[loop == "step"]

    def compute(self, ctx):
        if ctx.hook_point is self.point or not self.seen:
            self.seen.append({name: value.detach().double() for name, value in ctx.model.named_parameters()})
        return {}


def length(*tensors: torch.Tensor) -> float:
    return math.sqrt(sum(tensor.square().sum().item() for tensor in tensors))


def expected(before: dict[str, torch.Tensor], now: dict[str, torch.Tensor]) -> dict[str, float]:
    delta = {name: now[name] - before[name] for name in now}
    changed = sum(int((value != 0).sum()) for value in delta.values())
    metrics = {
        "total_delta": length(*delta.values()),
        "total_relative_delta": length(*delta.values()) / length(*before.values()),
        "max_abs_delta": max(value.abs().max().item() for value in delta.values()),
        "changed_fraction": changed / sum(value.numel() for value in delta.values()),
    }
    for name, value in delta.items():
        old = length(before[name])
        metrics[f"delta/{name}"] = length(value)
        metrics[f"relative_delta/{name}"] = length(value) / old if old else math.inf
        metrics[f"max_abs/{name}"] = value.abs().max().item()
    return {f"parameter_delta/{name}": value for name, value in metrics.items()}


@pytest.mark.some_rows(3)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("loop", LOOPS)
def test_delta_is_measured_since_last_report(loop, model):
    """The first report compares with the start of the run."""
    log = WeightLog(loop)
    run = train(Case(model, loop=loop), [ParameterDelta(), log], steps=6, snapshot_every=3, scheduler=None)
    reports = [metrics for metrics, _, point, _ in run.sink.emitted if point is log.point]
    assert len(reports) == 6 // STEPS_PER_EPOCH
    for report, before, now in zip(reports, log.seen, log.seen[1:], strict=False):
        assert report == pytest.approx(expected(before, now), rel=1e-5, abs=1e-9)


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("case", [Case(loop=loop) for loop in LOOPS], ids=str)
def test_resumed_hook_reports_the_same_deltas(case):
    """The hook is reloaded before every call, and the run keeps its bytes."""
    uninterrupted = train(case, [ParameterDelta()], steps=9)
    reloaded = train(case, [reloading(ParameterDelta)], steps=9)
    assert described(reloaded.sink.rows("parameter_delta/")) == described(uninterrupted.sink.rows("parameter_delta/"))
    assert_same_bytes(reloaded, case, 9)


def moved(model: nn.Module, hook: ParameterDelta, change) -> dict[str, float]:
    """Report, change the model, report again; return the second report as numbers."""
    hook.compute(epoch_end(model))
    with torch.no_grad():
        change(model)
    return {name: float(value) for name, value in hook.compute(epoch_end(model)).items()}


def test_unchanged_elements_are_counted():
    def one_row(model: nn.Module) -> None:
        model.weight[1] += 2

    report = moved(nn.Embedding(5, 3), ParameterDelta(), one_row)
    assert report["changed_fraction"] == pytest.approx(0.2)
    assert report["total_delta"] == report["delta/weight"] == pytest.approx(math.sqrt(12))
    assert report["max_abs_delta"] == report["max_abs/weight"] == pytest.approx(2)


def test_zero_parameter_has_nonfinite_relative_delta():
    """It is NaN for an unchanged and infinite for a changed parameter."""
    model = nn.Linear(2, 2)
    nn.init.zeros_(model.bias)
    still = moved(model, ParameterDelta(), lambda model: model.weight.mul_(2))
    assert math.isnan(still["relative_delta/bias"])
    assert still["relative_delta/weight"] == pytest.approx(1)
    assert moved(model, ParameterDelta(), lambda model: model.bias.add_(1))["relative_delta/bias"] == math.inf


def test_doubled_bfloat16_weights_have_unit_delta():
    report = moved(nn.Linear(40, 40, dtype=torch.bfloat16), ParameterDelta(), lambda model: model.weight.mul_(2))
    assert report["relative_delta/weight"] == pytest.approx(1, rel=1e-6)


def test_frozen_parameters_are_omitted():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    assert "delta/bias" not in moved(model, ParameterDelta(), lambda model: model.weight.add_(1))


def test_changed_trainable_set_skips_one_report():
    model, hook = nn.Linear(2, 2), ParameterDelta()
    assert moved(model, hook, lambda model: model.bias.requires_grad_(False)) == {}
    assert float(hook.compute(epoch_end(model))["total_delta"]) == 0


def test_replaced_layer_skips_one_report():
    """The new layer has the name of the old one, which no longer moves."""
    model, hook = nn.Sequential(nn.Linear(2, 2)), ParameterDelta()
    hook.compute(epoch_end(model))
    model[0] = nn.Linear(2, 2)
    assert hook.compute(epoch_end(model)) == {}
    with torch.no_grad():
        model[0].bias += 1
    assert float(hook.compute(epoch_end(model))["total_delta"]) == pytest.approx(math.sqrt(2))


def test_checkpoint_copy_survives_a_later_start():
    """A resumed hook compares with the saved weights, not with those at its start."""
    hook, model = ParameterDelta(), nn.Linear(2, 2)
    hook.start(type("Run", (), {"model": model}))
    model.weight.data += 1
    fresh = ParameterDelta()
    fresh.load_state_dict(through_a_file(hook.state_dict()))
    fresh.start(type("Run", (), {"model": model}))
    assert float(fresh.compute(epoch_end(model))["total_delta"]) == pytest.approx(2)


def test_reset_forgets_the_copy():
    hook, model = ParameterDelta(), nn.Linear(2, 2)
    hook.compute(epoch_end(model))
    hook.reset()
    assert hook.compute(epoch_end(model)) == {}
