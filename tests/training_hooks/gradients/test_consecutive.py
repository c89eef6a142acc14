"""The agreement of successive mean gradients against brute force in float64, and errors."""

import math
from itertools import pairwise

import pytest
import torch
from loopscope import attach
from loopscope.errors import UnsuitableError, UsageError
from loopscope.hooks import HookPoint
from loopscope.state.digest import described
from loopscope.tensors import gradients
from loopscope.training_hooks.gradients import Consecutive
from torch import nn
from torch.nn import functional

from tests.support import LOOPS, MODELS, STEPS_PER_EPOCH, Case, SpyHook, assert_same_bytes, at, train
from tests.support.cases import matrix
from tests.training_hooks.epoch_end import epoch_end
from tests.training_hooks.reloading import reloading

Vector = dict[str, torch.Tensor]


class GradientLog(at(SpyHook, HookPoint.POST_BACKWARD)):
    """Keeps every step's gradients in float64."""

    def compute(self, ctx):
        self.seen.append({name: value.double() for name, value in gradients(ctx.model).items()})
        return {}

    def means(self, length: int) -> list[Vector]:
        intervals = [self.seen[first : first + length] for first in range(0, len(self.seen), length)]
        return [{name: sum(step[name] for step in steps) / length for name in steps[0]} for steps in intervals]


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return functional.cosine_similarity(a.flatten(), b.flatten(), dim=0, eps=0).item()


def expected(before: Vector, now: Vector) -> dict[str, float]:
    a, b = (torch.cat([value.flatten() for value in vector.values()]) for vector in (now, before))
    metrics = {
        "cosine": cosine(a, b),
        "norm_ratio": float(a.norm() / b.norm()),
        "relative_change": float((a - b).norm() / b.norm()),
    }
    metrics |= {f"parameter_cosine/{name}": cosine(now[name], before[name]) for name in now}
    return {f"consecutive/{name}": value for name, value in metrics.items()}


@pytest.mark.some_rows(3)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("loop", "options"), [("epoch", {}), ("step", {}), ("step", {"interval": 2})])
def test_metrics_match_mean_gradients(loop, options, model):
    log, length = GradientLog(), options.get("interval", STEPS_PER_EPOCH)
    run = train(Case(model, loop=loop), [log, Consecutive(**options)], steps=9, scheduler=None)
    rows = run.sink.rows("consecutive/")
    means = log.means(length)[: 9 // length]
    for number, (before, now) in enumerate(pairwise(means), start=2):
        metrics = {name: value for name, _, step, value in rows if step == number * length}
        assert metrics == pytest.approx(expected(before, now), rel=1e-4, abs=1e-5)
    assert {row[2] for row in rows} == {number * length for number in range(2, len(means) + 1)}


@pytest.mark.longer
@matrix("model, optimizer, loop", MODELS, ["adamw_fused", "adafactor"], LOOPS)
def test_resumed_hook_reports_same_metrics(model, optimizer, loop):
    """Reloading the hook at every call changes neither its metrics nor the run."""
    case = Case(model, optimizer, loop)
    uninterrupted = train(case, [Consecutive()], steps=9)
    reloaded = train(case, [reloading(Consecutive)], steps=9)
    assert uninterrupted.sink.rows("consecutive/")
    assert described(reloaded.sink.rows("consecutive/")) == described(uninterrupted.sink.rows("consecutive/"))
    assert_same_bytes(uninterrupted, case, 9)


def report(hook: Consecutive, model: nn.Module, **gradient: list[float]) -> dict[str, float]:
    """Return the report of an epoch with this mean gradient as numbers."""
    vector = {name: torch.tensor(value) for name, value in gradient.items()}
    metrics = hook.compute(epoch_end(model, accumulated_grads=vector))
    return {name: float(value) for name, value in metrics.items()}


def pair() -> nn.Module:
    model = nn.Module()
    model.a, model.b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    return model


def test_first_epoch_reports_no_metrics():
    """The same holds for the first epoch after reset()."""
    hook, model = Consecutive(), pair()
    assert report(hook, model, a=[1.0, 0.0]) == {}
    assert report(hook, model, a=[1.0, 0.0])["cosine"] == 1
    hook.reset()
    assert report(hook, model, a=[1.0, 0.0]) == {}


def test_cosines_of_known_directions_are_exact():
    """Equal, opposite and perpendicular gradients have cosines of 1, -1 and 0."""
    hook, model = Consecutive(), pair()
    report(hook, model, a=[3.0, 0.0], b=[0.0, 4.0])
    longer = report(hook, model, a=[6.0, 0.0], b=[0.0, 8.0])
    assert (longer["cosine"], longer["norm_ratio"], longer["relative_change"]) == (1, 2, 1)
    assert report(hook, model, a=[-6.0, 0.0], b=[0.0, -8.0])["cosine"] == -1
    turned = report(hook, model, a=[0.0, 8.0], b=[6.0, 0.0])
    assert turned["cosine"] == turned["parameter_cosine/a"] == 0
    assert turned["relative_change"] == pytest.approx(math.sqrt(2))


def test_missing_gradient_counts_as_zeros():
    """A parameter without a gradient has no cosine."""
    hook, model = Consecutive(), pair()
    report(hook, model, a=[1.0, 0.0])
    both = report(hook, model, a=[1.0, 0.0], b=[1.0, 0.0])
    assert both["cosine"] == pytest.approx(math.sqrt(0.5))
    assert set(both) == {"cosine", "norm_ratio", "relative_change", "parameter_cosine/a"}
    assert "parameter_cosine/b" not in report(hook, model, a=[1.0, 0.0])


def test_a_zero_gradient_has_no_direction():
    hook, model = Consecutive(), pair()
    report(hook, model, a=[0.0, 0.0])
    metrics = report(hook, model, a=[1.0, 0.0])
    assert math.isnan(metrics["cosine"])
    assert metrics["norm_ratio"] == math.inf


def test_epoch_without_gradients_restarts_comparison():
    """The epoch after it reports no metrics."""
    hook, model = Consecutive(), pair()
    report(hook, model, a=[1.0, 0.0])
    assert report(hook, model) == {}
    assert report(hook, model, a=[1.0, 0.0]) == {}


def test_stored_gradient_is_a_copy():
    """Later changes to the accumulated gradients do not change the stored one."""
    hook, gradient = Consecutive(), {"weight": torch.ones(1, 2)}
    model = nn.Linear(2, 1, bias=False)
    hook.compute(epoch_end(model, accumulated_grads=gradient))
    gradient["weight"].neg_()
    assert float(hook.compute(epoch_end(model, accumulated_grads=gradient))["cosine"]) == pytest.approx(-1)


def test_changed_parameters_restart_comparison():
    """After a parameter is frozen, the next epoch reports no metrics, and later epochs exclude it."""
    hook, model = Consecutive(), pair()
    report(hook, model, a=[1.0, 0.0], b=[1.0, 0.0])
    model.b.requires_grad_(False)
    assert report(hook, model, a=[1.0, 0.0], b=[1.0, 0.0]) == {}
    assert report(hook, model, a=[1.0, 0.0], b=[1.0, 0.0]).keys() >= {"cosine", "parameter_cosine/a"}
    assert "parameter_cosine/b" not in report(hook, model, a=[1.0, 0.0], b=[1.0, 0.0])


@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_a_run_of_one_epoch_is_refused(loop):
    with pytest.raises(UnsuitableError, match="two intervals of 3 steps, but the run has only 3 steps"):
        raise train(Case(loop=loop), [Consecutive()], steps=3, raises=UnsuitableError).error


def test_negative_interval_is_refused():
    with pytest.raises(UsageError, match=r"consecutive.interval is -1; it must be 0 .* or more"):
        Consecutive(interval=-1)


def test_unknown_length_of_a_pass_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sentence = r"their length is unknown; set hook_options=.*'interval': STEPS"
    with (
        pytest.raises(UnsuitableError, match=sentence),
        attach(model, optimizer, hooks=[Consecutive()], loop="step", sinks=(), display="none") as scope,
    ):
        next(scope.batches(iter([torch.ones(3, 2)])))
