"""The hook weight_updates in real runs: its metrics, its warnings and its transfers to the host."""

import math
import warnings
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from loopscope.engine import HookManager
from loopscope.errors import RunNotice, UnsuitableError, UsageError
from loopscope.hooks import HookPoint, OptimizerGroup
from loopscope.tensors import reductions
from loopscope.training import Precision
from loopscope.training_hooks.updates import WeightUpdates
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LambdaLR
from torch.overrides import TorchFunctionMode

from tests.support import MODELS, Case, SpyHook, at, build, mean_loss, run_info, train
from tests.training_hooks.epoch_end import epoch_end
from tests.training_hooks.reloading import reloading

pytestmark = pytest.mark.filterwarnings("ignore:Step [0-9,]+")
QUARTILES = ("median", "p95", "min", "max")
GRADIENT_METRICS = {f"grad_norm_{name}" for name in QUARTILES} | {
    "vanishing_count",
    "exploding_count",
    "nonfinite_count",
}
UPDATE_METRICS = {f"update_ratio_{name}" for name in QUARTILES} | {"frozen_count"}


TRANSFORMER = Case("transformer")


def run(hooks, case=TRANSFORMER, steps=6, **options):
    return train(case, hooks, steps=steps, audit=False, every_step=False, **options)


def table(result) -> dict[tuple[str, int], float]:
    """Return the reported values by metric and step."""
    rows = result.sink.rows("weight_updates/")
    return {(name.removeprefix("weight_updates/"), step): value for name, _, step, value in rows}


class Norms(at(SpyHook, HookPoint.POST_BACKWARD, HookPoint.POST_STEP)):
    """Measures the metrics of exact mode with full clones in float64."""

    def compute(self, ctx) -> dict[str, float]:
        parameters = dict(ctx.model.named_parameters())
        if ctx.hook_point is HookPoint.POST_BACKWARD:
            self.before = {name: value.detach().double() for name, value in parameters.items()}
            return {f"grad/{name}": value.grad.double().norm() for name, value in parameters.items()}
        changes = {name: (value.double() - self.before[name]).norm() for name, value in parameters.items()}
        return {f"ratio/{name}": change / self.before[name].norm() for name, change in changes.items()}


@pytest.mark.some_rows(3)
@pytest.mark.parametrize("accumulation_steps", [1, 2])
@pytest.mark.parametrize("loop", ["epoch", "step"])
@pytest.mark.parametrize("model", MODELS)
def test_run_statistics_match_full_clones(model, loop, accumulation_steps):
    hooks = [Norms(), WeightUpdates(interval=2, exact=True)]
    result = run(hooks, Case(model, "adamw_foreach", loop), accumulation_steps=accumulation_steps)
    brute, reported = result.sink.rows("spy/"), table(result)
    assert {step for _, step in reported} == {1, 3, 5}
    for step in (1, 3, 5):
        for kind, prefix in (("grad", "grad_norm"), ("ratio", "update_ratio")):
            values = [value for name, _, at, value in brute if at == step and name.startswith(f"spy/{kind}/")]
            values = sorted(value for value in values if math.isfinite(value))
            half = len(values) // 2
            median = values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2
            expected = [median, values[math.ceil(0.95 * len(values)) - 1], values[0], values[-1]]
            assert [reported[f"{prefix}_{name}", step] for name in QUARTILES] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("topk", [0, 5, 100])
def test_reported_series_match_description_and_topk(topk):
    """The number of named parameters is topk, at most all of them."""
    reported = {name for name, _ in table(run([WeightUpdates(interval=6, topk=topk)]))}
    parameters = {name for name, _ in build(Case("transformer"))[0].model.named_parameters()}
    named = {name for name in reported if name.startswith("topk_frozen/")}
    assert reported - named == GRADIENT_METRICS | UPDATE_METRICS
    assert len(named) == min(topk, len(parameters))
    assert {name.removeprefix("topk_frozen/") for name in named} <= parameters


def test_topk_names_smallest_update_ratios():
    """Names and ratios match full clones of the weights."""
    result = run([Norms(), WeightUpdates(interval=1, topk=3)], steps=1)
    ratios = {name.removeprefix("spy/ratio/"): value for name, _, _, value in result.sink.rows("spy/ratio/")}
    named = {name.removeprefix("topk_frozen/"): v for (name, _), v in table(result).items() if "topk" in name}
    assert named == {name: pytest.approx(ratios[name], rel=1e-5) for name in sorted(ratios, key=ratios.get)[:3]}


@pytest.mark.longer
@pytest.mark.slow_rows("{}")
@pytest.mark.parametrize("options", [{}, {"exact": True}], ids=str)
def test_repeatedly_resumed_hook_reports_the_same(options):
    """Patience continues, with sampled and with exact weights."""
    frozen = {"frozen_update_ratio_threshold": 1e30, "frozen_patience_steps": 3, "interval": 1}
    uninterrupted = run([WeightUpdates(**frozen, **options)])
    resumed = run([reloading(WeightUpdates, **frozen, **options)])
    assert table(uninterrupted) == table(resumed)
    counts = [value for (name, _), value in sorted(table(uninterrupted).items()) if name == "frozen_count"]
    assert counts == [0, 0] + 4 * [len(list(uninterrupted.task.model.parameters()))]


# Warnings


class Sick(WeightUpdates):
    """Checks gradients of the first parameter that are multiplied by a factor at some steps."""

    name = "weight_updates"
    factors: dict[int, float] = {}

    def compute(self, ctx):
        first = next(ctx.model.parameters())
        if ctx.hook_point is not HookPoint.POST_BACKWARD or ctx.step not in self.factors:
            return super().compute(ctx)
        seen, first.grad = first.grad, first.grad * self.factors[ctx.step]
        metrics = super().compute(ctx)
        first.grad = seen
        return metrics


def sick(**factors: float) -> WeightUpdates:
    hook = Sick(interval=1)
    hook.factors = {int(step.removeprefix("step")): factor for step, factor in factors.items()}
    return hook


def collect_warnings(hook, **options) -> list[str]:
    """Return a hook's warnings in a run of six steps, in their order."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(Case("transformer", **options), [hook], steps=6, audit=False, every_step=False)
    return [f"{warning.category.__name__}: {warning.message}" for warning in caught]


@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_conditions_are_reported_when_they_change(loop):
    """A condition is reported when it appears, when it ends and when it returns."""
    sentences = collect_warnings(sick(step2=1e9, step3=1e9, step4=1e9, step6=1e9), loop=loop)
    assert [sentence.split(" (")[0] for sentence in sentences] == [
        "Alert: Step 2: 1 of 17 parameters has an exploding gradient: embedding.weight",
        "Recovery: Step 5: no parameter has an exploding gradient any more.",
        "Alert: Step 6: 1 of 17 parameters has an exploding gradient: embedding.weight",
    ]
    assert "(‖g‖ = " in sentences[0]


def test_worst_parameters_are_reported_first():
    """The alert lists five parameters by update ratio and counts the others."""
    hook = WeightUpdates(interval=1, frozen_update_ratio_threshold=1e30, frozen_patience_steps=2)
    (sentence,) = collect_warnings(hook)
    assert sentence.startswith("Alert: Step 2: 17 of 17 parameters are frozen: ")
    assert sentence.endswith(" and 12 more.")
    ratios = [float(part.split()[0]) for part in sentence.split("update ratio ")[1:]]
    assert ratios == sorted(ratios)
    assert sentence.count(" at lr 0.01") == len(ratios) == 5


def test_resumed_hook_does_not_repeat_a_warning():
    """The restored hook keeps the conditions that it has reported."""
    uninterrupted = collect_warnings(sick(step2=1e9, step3=1e9, step4=1e9))
    assert len(uninterrupted) == 2
    earlier, later = sick(step2=1e9), sick(step2=1e9, step3=1e9)
    model = build(Case("transformer"))[0].model
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    earlier.compute(epoch_end(model, hook_point=HookPoint.POST_BACKWARD, step=2))
    later.load_state_dict(earlier.state_dict())
    later.compute(epoch_end(model, hook_point=HookPoint.POST_BACKWARD, step=3))
    (alert,) = later.check({}, 3)
    assert str(alert).startswith("Step 2: 1 of 17")


@pytest.mark.parametrize("normalised", [True, False])
def test_biases_before_normalisation_are_healthy(normalised):
    """The gradient of a convolution's bias before BatchNorm is rounding noise."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)] if normalised else [nn.Conv2d(1, 4, 3)]
    model, hook = nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)).double(), WeightUpdates()
    nn.functional.cross_entropy(model(torch.randn(8, 1, 8, 8).double()), torch.arange(8) % 2).backward()
    metrics = hook.compute(epoch_end(model, hook_point=HookPoint.POST_BACKWARD, step=1))
    assert metrics["vanishing_count"] == normalised
    assert hook.check({}, 1) == []


# Mixed precision and skipped steps


def in_float16(task, state) -> None:
    task.compute_loss = Precision.of("fp16", torch.device("cpu")).autocast(mean_loss)
    task.scaler = state.scaler = GradScaler("cpu", init_scale=2.0**17)


def test_skipped_step_has_gradients_but_no_update():
    """A step that the loss scaler skips gives no warning and no frozen parameter."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.simplefilter("ignore", RunNotice)
        result = run([WeightUpdates(interval=1, exact=True)], Case("tied"), introduce=in_float16)
    reported, skipped = table(result), result.state.loop.skipped_steps
    infinite = {step for (name, step), value in reported.items() if name == "nonfinite_count" and value}
    updated = {step for name, step in reported if name == "update_ratio_median"}
    assert len(infinite) == skipped > 0
    assert updated == set(range(1, 7)) - infinite
    assert max(value for (name, _), value in reported.items() if name == "frozen_count") == 0


def test_bfloat16_weights_report_rounded_away_fraction():
    def convert(task, state):
        task.model.bfloat16()
        task.optimizer.param_groups[0]["lr"] = 1e-4

    reported = table(run([WeightUpdates(interval=6)], Case("tied", "sgd_momentum"), introduce=convert))
    assert 0.1 < reported["rounded_away_fraction", 1] < 1


def test_bfloat16_warmup_does_not_warn():
    """A learning rate of zero at the first step does not count as rounding away."""

    def warming_up(task, state):
        task.model.bfloat16()
        task.scheduler = state.scheduler = LambdaLR(task.optimizer, lambda step: step / 100)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.simplefilter("ignore", RunNotice)
        result = run(
            [WeightUpdates(interval=100, vanishing_grad_threshold=0.0)],
            Case("tied", "sgd_momentum", loop="step"),
            introduce=warming_up,
        )
    assert ("rounded_away_fraction", 1) not in table(result)


# Costs and errors


class Transfers(TorchFunctionMode):
    """Counts function calls that transfer numbers of tensors to the host."""

    names = {"tolist", "item", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "nonzero"}

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += getattr(function, "__name__", "") in self.names
        return function(*args, **(kwargs or {}))

    def __enter__(self):
        # so that sums take the way of an accelerator, which reads nothing
        self.patched = patch.object(reductions, "is_readable", lambda tensor: False)
        self.patched.start()
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        self.patched.stop()


@pytest.mark.parametrize("options", [{"topk": 0}, {"topk": 100}, {"exact": True}, {"sample_size": 7}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_dispatch_uses_one_host_transfer(dtype, options):
    """This holds from the second step on, and the metrics are plain numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(9, 9) for _ in range(6)]).to(dtype)
    hook, counts = WeightUpdates(**options), []
    for step in (1, 2):
        model(torch.randn(3, 9, dtype=dtype)).square().mean().backward()
        for point in (HookPoint.POST_BACKWARD, HookPoint.POST_STEP):
            with Transfers() as transfers:
                metrics = hook.compute(context(model, point, step))
            counts.append(transfers.count)
            assert not any(isinstance(value, Tensor) for value in metrics.values())
    assert counts[2:] == [1, 1]


def context(model: nn.Module, point: HookPoint, step: int):
    ctx = epoch_end(model, hook_point=point, step=step)
    group = OptimizerGroup(tuple(dict(model.named_parameters())), 0.1, 0.0, None, {})
    return replace(ctx, services=replace(ctx.services, optimizer_groups=lambda: (group,)))


def test_a_model_without_trained_parameters_is_refused():
    task, state = build(Case())
    task.model.requires_grad_(False)
    hook = WeightUpdates()
    run = run_info(task, HookManager([hook], task, state), "epoch")
    with pytest.raises(UnsuitableError, match="'weight_updates' needs trainable parameters, but the model has none"):
        hook.start(run)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"interval": 0}, r"weight_updates\.interval is 0; it must be at least 1"),
        ({"topk": -1}, r"weight_updates\.topk is -1; it must be at least 0"),
        ({"sample_size": 0}, r"weight_updates\.sample_size is 0; it must be at least 1"),
        ({"vanishing_grad_threshold": -1.0}, r"weight_updates\.vanishing_grad_threshold is -1\.0; it must be a number"),
    ],
)
def test_invalid_options_are_refused(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        WeightUpdates(**options)
