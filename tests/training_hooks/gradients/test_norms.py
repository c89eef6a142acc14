"""The norms hook against brute force in float64, on gradients collected step by step."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from loopscope.errors import UsageError
from loopscope.hooks import HookPoint, RunDataContext
from loopscope.tensors import gradients, norm_of_each
from loopscope.training_hooks.gradients import Norms
from torch import nn

from tests.support import MODELS, Case, SpyHook, at, train
from tests.training_hooks.epoch_end import epoch_end


def length(*tensors: torch.Tensor) -> float:
    """Square, add and take the root, in float64."""
    return math.sqrt(sum(tensor.detach().double().square().sum().item() for tensor in tensors))


class GradientLog(at(SpyHook, HookPoint.POST_BACKWARD)):
    """Keeps every step's gradients in float64."""

    def compute(self, ctx: RunDataContext) -> dict[str, float]:
        self.seen.append({name: value.double() for name, value in gradients(ctx.model).items()})
        return {}

    def mean(self) -> dict[str, torch.Tensor]:
        return {name: sum(step[name] for step in self.seen) / len(self.seen) for name in self.seen[0]}


@pytest.mark.some_rows(2)
@pytest.mark.parametrize("model", MODELS)
def test_gradient_norms_match_epoch_mean_gradient(model):
    log = GradientLog()
    ((metrics, *_),) = train(Case(model), [log, Norms()]).sink.emitted
    mean = log.mean()
    assert metrics["norms/total_grad_norm"] == pytest.approx(length(*mean.values()), rel=1e-5)
    assert metrics["norms/max_abs_grad"] == pytest.approx(max(g.abs().max().item() for g in mean.values()), rel=1e-5)
    for name, gradient in mean.items():
        assert metrics[f"norms/grad_norm/{name}"] == pytest.approx(length(gradient), rel=1e-4, abs=1e-8)


@pytest.mark.parametrize("model", MODELS)
def test_weight_norms_count_shared_weights_once(model):
    """The norms are those after the epoch."""
    run = train(Case(model), [Norms()])
    ((metrics, *_),) = run.sink.emitted
    parameters = dict(run.task.model.named_parameters())
    assert metrics["norms/total_weight_norm"] == pytest.approx(length(*parameters.values()), rel=1e-6)
    for name, parameter in parameters.items():
        assert metrics[f"norms/weight_norm/{name}"] == pytest.approx(length(parameter), rel=1e-6)
    ratio = metrics["norms/total_grad_norm"] / metrics["norms/total_weight_norm"]
    assert metrics["norms/grad_weight_ratio"] == pytest.approx(ratio, rel=1e-6)


def test_norm_of_each_returns_norms_of_parts():
    vector = {"a": torch.full((3,), 2.0), "b": torch.full((4,), -1.0)}
    parts = norm_of_each(vector)
    assert parts == {"a": torch.tensor(math.sqrt(12)), "b": torch.tensor(2.0)}


def test_half_precision_is_reduced_in_float32():
    large = {"w": torch.full((4,), 3e4, dtype=torch.float16)}
    assert norm_of_each(large)["w"].item() == 6e4
    tiny = {"w": torch.full((4,), 2.0**-20, dtype=torch.float16)}
    assert norm_of_each(tiny)["w"].item() == 2.0**-19


def test_maximum_is_absolute_and_propagates_nan():
    model = nn.Linear(2, 1, bias=False)
    measured = Norms().compute(epoch_end(model, accumulated_grads={"weight": torch.tensor([[1.0, -5.0]])}))
    assert measured["max_abs_grad"] == 5
    broken = Norms().compute(epoch_end(model, accumulated_grads={"weight": torch.tensor([[1.0, math.nan]])}))
    assert broken["max_abs_grad"].isnan()
    assert broken["total_grad_norm"].isnan()


def test_without_gradients_only_the_weights_are_reported():
    measured = Norms().compute(epoch_end(nn.Linear(2, 1)))
    assert set(measured) == {"total_weight_norm", "weight_norm/weight", "weight_norm/bias"}


def test_frozen_parameters_are_omitted():
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    assert "weight_norm/bias" not in Norms().compute(epoch_end(model))


def test_large_model_reports_twenty_series_per_family(tmp_path):
    """The extremes of each family and the named parameters are reported, and the file has all of them."""
    model = nn.ModuleDict({f"layer{index}": nn.Linear(1, index + 1, bias=False) for index in range(40)})
    for layer in model.values():
        nn.init.constant_(layer.weight, 1.0)
    gradients = {name: -value.detach() * len(value) for name, value in model.named_parameters()}
    hook = Norms(names="layer20.*", write_all=True)
    hook.start(SimpleNamespace(model=model, output_dir=tmp_path, strategy="only"))
    measured = hook.compute(epoch_end(model, accumulated_grads=gradients))
    for family in ("weight_norm", "grad_norm"):
        reported = [name for name in measured if name.startswith(f"{family}/")]
        assert reported == [f"{family}/layer{index}.weight" for index in [*range(10), 20, *range(30, 40)]]
    assert measured["weight_norm/layer38.weight"] == pytest.approx(math.sqrt(39))
    line = json.loads((tmp_path / "only.norms.jsonl").read_text())
    assert line["grad_norm"] == pytest.approx({f"layer{n}.weight": (n + 1) ** 1.5 for n in range(40)})
    assert measured["total_weight_norm"] == pytest.approx(math.sqrt(sum(range(1, 41))))


def test_budget_of_norms_is_checked(tmp_path):
    hook = Norms(names="layr*")
    with pytest.raises(UsageError, match=r"norms.names has the pattern 'layr\*', which matches none of the 2 names"):
        hook.start(SimpleNamespace(model=nn.Linear(2, 1), output_dir=tmp_path, strategy="only"))
    with pytest.raises(UsageError, match=r"norms.top is -1; it must be at least 0"):
        Norms(top=-1)


@pytest.mark.parametrize("model", MODELS)
def test_every_reported_name_is_described(model):
    ((metrics, *_),) = train(Case(model), [Norms()]).sink.emitted
    infos = Norms().describe_metrics()
    for name in metrics:
        assert sum(info.describes(name.removeprefix("norms/")) for info in infos) == 1, name
