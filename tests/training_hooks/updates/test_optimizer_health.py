"""The hook optimizer_health against a closed form, and against second moments computed by loops in float64."""

import math
from functools import partial

import loopscope
import pytest
import torch
from loopscope.errors import RunNotice, UsageError
from loopscope.hooks import OptimizerGroup
from loopscope.training_hooks.updates import OptimizerHealth
from loopscope.training_hooks.updates.optimizer_health import largest, ratio_sums
from loopscope.training_hooks.updates.second_moments import SecondMoment, second_moment
from torch import Tensor, nn
from torch.optim import Adadelta, Adafactor, Adam, AdamW, NAdam, RAdam, RMSprop

from tests.support import Case, train
from tests.support.ranks import on_ranks
from tests.training_hooks.ranks.shared_runs import trained
from tests.training_hooks.updates.architectures import ARCHITECTURES, Training, trainer_metrics

ALL = {"interval": 1, "names": "*"}
BETA = 0.95
EPSILON = 1e-4
ADAM = {"betas": (0.9, BETA), "eps": EPSILON}


# Closed form


class Scaled(nn.Module):
    """A model whose gradient is the batch."""

    def __init__(self, shape=(3,), dtype=torch.float64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape, dtype=dtype))


def reported(
    folder, optimizer_class, gradients, *, hook_options=ALL, shape=(3,), dtype=torch.float64, display="none", **options
):
    """Train with given gradients; return the hook's metrics of every step."""
    model = Scaled(shape, dtype)
    optimizer = optimizer_class(model.parameters(), **options)
    settings = {
        "hook_options": {"optimizer_health": hook_options},
        "out": folder,
        "display": display,
        "overwrite": True,
    }
    steps = []
    with loopscope.attach(model, optimizer, hooks=["optimizer_health"], **settings) as scope:
        for gradient in scope.batches(gradients):
            scope.backward((model.weight * gradient).sum())
            optimizer.step()
            optimizer.zero_grad()
            newest = scope.last_metrics().items()
            steps.append({k.partition("/")[2]: float(v) for k, v in newest if k.startswith("optimizer_health/")})
    return steps


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("factor", [0.5, 3.0, 1e3])
@pytest.mark.parametrize("step", [2, 7])
def test_ratio_after_steady_gradients_has_closed_form(step, factor, amsgrad, tmp_path):
    """g is 1 at the first steps, then c: c·√((1−β₂^t)/(β₂−β₂^t+(1−β₂)·c²)), with amsgrad the larger moment."""
    gradients = [torch.ones(3, dtype=torch.float64)] * (step - 1) + [torch.full((3,), factor, dtype=torch.float64)]
    options = {"lr": 1e-3, "betas": (0.9, BETA), "amsgrad": amsgrad}
    metrics = reported(tmp_path, Adam, gradients, **options)
    power = BETA**step
    moment = BETA - power + (1 - BETA) * factor**2
    moment = max(moment, 1 - BETA ** (step - 1)) if amsgrad else moment
    expected = factor * math.sqrt((1 - power) / moment)
    assert metrics[-1]["gradient_rms/weight"] == pytest.approx(expected, rel=1e-12)
    assert [row["gradient_rms_max"] for row in metrics[:-1]] == pytest.approx([1.0] * (step - 1), rel=1e-12)


@pytest.mark.parametrize("scale", [2.0**-50, 1.0, 2.0**60])
def test_ratio_does_not_depend_on_the_scale(scale, tmp_path):
    """Squares of float32 gradients near the ends of the range of the moments are not lost."""
    gradients = [torch.tensor([1.0, 2.0, 4.0]) * scale, torch.tensor([3.0, -1.0, 2.0]) * scale]
    metrics = reported(tmp_path, Adam, gradients, dtype=torch.float32, lr=1e-3, betas=(0.9, BETA), eps=0.0)
    unscaled = reported(tmp_path, Adam, [g / scale for g in gradients], lr=1e-3, betas=(0.9, BETA), eps=0.0)
    assert metrics[-1]["gradient_rms/weight"] == pytest.approx(unscaled[-1]["gradient_rms/weight"], rel=1e-5)


def test_unused_rows_count_as_below_epsilon(tmp_path):
    """Elements without any gradient have v̂ = 0."""
    (metrics,) = reported(tmp_path, AdamW, [torch.tensor([1.0, 0.0, 0.0])], lr=1e-3, weight_decay=0.0)
    assert metrics["gradient_rms/weight"] == pytest.approx(math.sqrt(1 / 3), rel=1e-9)
    assert metrics["below_eps/weight"] == metrics["below_eps_fraction"] == pytest.approx(2 / 3)
    assert metrics["update_per_lr/weight"] == pytest.approx(math.sqrt(1 / 3), rel=1e-6)


def test_updates_of_noise_have_the_documented_size(tmp_path):
    """For independent gradients RMS(Δθ)/η is √((1−β₁)/(1+β₁)), and RMS(g/√v̂) is about 1."""
    noise = list(torch.randn(80, 4000, generator=torch.Generator().manual_seed(0)))
    options = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0}
    last = reported(tmp_path, AdamW, noise, hook_options={"interval": 79}, shape=(4000,), **options)[-1]
    assert last["update_per_lr/weight"] == pytest.approx(math.sqrt(0.1 / 1.9), rel=0.05)
    assert last["gradient_rms/weight"] == pytest.approx(1, rel=0.05)


# Brute force


def averaged_squares(kind: str, gradients: list[Tensor]) -> Tensor:
    """Return v̂ after the last of the gradients, by the formulas of the optimizers, in float64."""
    v = torch.zeros_like(gradients[0])
    mean, largest_v = v.clone(), v.clone()
    for step, gradient in enumerate(gradients, start=1):
        beta = 1 - step**-0.8 if kind in ("adafactor", "transformers") else BETA
        v = beta * v + (1 - beta) * gradient**2
        mean = BETA * mean + (1 - BETA) * gradient
        largest_v = torch.maximum(largest_v, v)
    if kind in ("adafactor", "transformers"):
        return v
    if kind == "centered":
        return v - mean**2
    if kind in ("rmsprop", "adadelta"):
        return v
    return (largest_v if kind == "amsgrad" else v) / (1 - BETA ** len(gradients))


def factored(v: Tensor) -> Tensor:
    """Return the approximation of rank 1 of a matrix, or of each matrix of several: row sums · column sums / sum."""
    return v.sum(-1, keepdim=True) * v.sum(-2, keepdim=True) / v.sum((-2, -1), keepdim=True) if v.ndim > 1 else v


OPTIMIZERS = {
    "adam": partial(Adam, lr=1e-3, **ADAM),
    "adamw": partial(AdamW, lr=1e-3, weight_decay=0.1, **ADAM),
    "amsgrad": partial(AdamW, lr=1e-3, weight_decay=0.1, amsgrad=True, **ADAM),
    "nadam": partial(NAdam, lr=1e-3, **ADAM),
    "radam": partial(RAdam, lr=1e-3, **ADAM),
    "rmsprop": partial(RMSprop, lr=1e-3, alpha=BETA, eps=EPSILON),
    "centered": partial(RMSprop, lr=1e-3, alpha=BETA, eps=EPSILON, centered=True),
    "adadelta": partial(Adadelta, lr=1e-3, rho=BETA, eps=EPSILON**2),
    "adafactor": partial(Adafactor, lr=1e-3, eps=(EPSILON, 1e-3)),
}


def check(training: Training, kind: str, tolerance: float = 1e-4) -> None:
    """Compare the families with brute force, at every step."""
    history: dict[str, list[Tensor]] = {}
    for place in training.run():
        if place == "update":
            before = training.weights()
            for name, gradient in training.gradients().items():
                history.setdefault(name, []).append(gradient)
        if place == "end":
            expected = expected_metrics(kind, history, before, training.weights())
            families = {name: value for name, value in training.metrics.items() if "/" in name}
            assert families == pytest.approx(expected, rel=tolerance, abs=1e-6)
            ratios = [value for name, value in families.items() if name.startswith("gradient_rms/")]
            assert training.metrics["gradient_rms_max"] == max(ratios)


def expected_metrics(kind, history, before, after) -> dict[str, float]:
    expected = {}
    for name, gradients in history.items():
        v = averaged_squares(kind, gradients)
        v = factored(v) if kind in ("adafactor", "transformers") else v
        floor = 0.0 if kind == "transformers" else EPSILON**2
        ratio = torch.where(v.clamp(min=floor) > 0, gradients[-1] ** 2 / v.clamp(min=floor), 0.0)
        implied = 1e-3
        if kind == "adafactor":
            implied = max(1e-3, float(before[name].square().mean().sqrt())) * min(1e-3, len(gradients) ** -0.5)
        expected[f"gradient_rms/{name}"] = float(ratio.mean().sqrt())
        expected[f"update_per_lr/{name}"] = float((after[name] - before[name]).square().mean().sqrt()) / implied
        if floor:
            expected[f"below_eps/{name}"] = float((v < floor).double().mean())
    return expected


@pytest.mark.trainer
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_match_brute_force(name, tmp_path):
    check(Training(tmp_path, name, "optimizer_health", OPTIMIZERS["adamw"], options=ALL), "adamw")


@pytest.mark.longer
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_matches_brute_force(kind, tmp_path):
    check(Training(tmp_path, "lstm", "optimizer_health", OPTIMIZERS[kind], options=ALL, dtype=torch.float64), kind)


@pytest.mark.trainer
def test_adafactor_of_transformers_matches_brute_force(tmp_path):
    from transformers.optimization import Adafactor as Factored

    make = partial(Factored, lr=1e-3, scale_parameter=False, relative_step=False)
    check(Training(tmp_path, "mixtral", "optimizer_health", make, options=ALL), "transformers")


@pytest.mark.trainer
@pytest.mark.parametrize("checkpointing", [False, True], ids=["non-reentrant", "reentrant"])
def test_micro_batches_and_checkpointing_match_brute_force(checkpointing, tmp_path):
    settings = {"accumulate": 2, "checkpointing": checkpointing, "dtype": torch.float64}
    check(Training(tmp_path, "llama", "optimizer_health", OPTIMIZERS["adamw"], options=ALL, **settings), "adamw")


@pytest.mark.trainer
def test_first_step_in_a_trainer_has_ratio_one(tmp_path):
    """At step 1 v̂ = g², so that the ratio is 1 for every element above ε, and the update of each is the rate."""
    frame, _ = trainer_metrics(tmp_path, "optimizer_health", ALL)
    first = frame.loc[1]
    ratios = first[[name for name in frame if name.startswith("gradient_rms/")]]
    below = first[[name for name in frame if name.startswith("below_eps/")]]
    assert len(ratios) == len(below) == 21
    assert all(1 - share <= ratio**2 * (1 + 1e-5) for ratio, share in zip(ratios, below, strict=True))
    assert ratios.max() == pytest.approx(1, rel=1e-4)
    assert first["update_per_lr_max"] == pytest.approx(1, rel=0.01)


def test_bfloat16_states_match_brute_force(tmp_path):
    """Moments in bfloat16 have a relative error of 2^-9 per step."""
    training = Training(tmp_path, "lstm", "optimizer_health", OPTIMIZERS["adamw"], options=ALL, dtype=torch.bfloat16)
    check(training, "adamw", tolerance=0.02)


def test_coupled_decay_is_part_of_the_gradient(tmp_path):
    """Adam(weight_decay=λ) averages (g + λθ₋)², with ``maximize`` (λθ₋ − g)²."""
    for maximize in (False, True):
        options = {"lr": 0.1, "weight_decay": 0.5, "betas": (0.9, BETA), "maximize": maximize}
        first, second = reported(tmp_path, Adam, [torch.ones(3), 2 * torch.ones(3)], **options)
        sign = -1 if maximize else 1
        inputs = [sign * 1.0 + 0.5 * 1.0]
        inputs.append(sign * 2.0 + 0.5 * (1.0 - 0.1 * math.copysign(1, inputs[0])))
        v = (BETA * inputs[0] ** 2 + inputs[1] ** 2) / (1 + BETA)
        assert first["gradient_rms/weight"] == pytest.approx(1.0)
        assert second["gradient_rms/weight"] == pytest.approx(abs(inputs[1]) / math.sqrt(v), rel=1e-6)


# What is left out


class Overwriting(Adam):
    """Normalises the gradients in place."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(parameter.grad.norm())
        return super().step(closure)


class Rescaled(Adam):
    """Averages squares of gradients that are 1,000 times smaller."""

    def step(self, closure=None):
        parameters = self.param_groups[0]["params"]
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = parameter.grad / 1000
        super().step(closure)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (Overwriting, "the optimizer overwrites the gradient"),
        (Rescaled, "the second moment is not an average of squared gradients"),
    ],
)
def test_unsuitable_moments_are_left_out(kind, cause):
    """One notice reports the parameters; there are no numbers."""

    def introduce(task, state):
        task.optimizer = state.optimizer = kind(task.model.parameters(), lr=1e-3)
        task.scheduler = state.scheduler = None

    with pytest.warns(RunNotice) as caught:
        result = train(Case("tied"), [OptimizerHealth(interval=1)], audit=False, every_step=False, introduce=introduce)
    (sentence,) = [str(warning.message) for warning in caught if "leaves out" in str(warning.message)]
    names = "embedding.weight, mix.weight, mix.bias"
    assert sentence == f"optimizer_health leaves out 3 parameters, since {cause}: {names}."
    assert result.sink.rows("optimizer_health/") == []


@pytest.mark.parametrize("state", [{}, {"momentum_buffer": torch.ones(2, 2)}, {"exp_avg_sq": torch.ones(3)}])
def test_states_without_second_moments_give_none(state):
    group = OptimizerGroup(("weight",), 1e-3, 0.0, (0.9, BETA), {"eps": EPSILON})
    assert second_moment(state, group, torch.ones(2, 2)) is None
    rotated = {"exp_avg_sq": torch.ones(2, 2), "step": 1, "Q": []}
    assert second_moment(rotated, group, torch.ones(2, 2)) is None


def test_missing_learning_rates_have_no_update_ratio(tmp_path):
    (metrics,) = reported(tmp_path, Adam, [torch.ones(3)], lr=0.0)
    assert "gradient_rms/weight" in metrics
    assert not [name for name in metrics if "update_per_lr" in name]


def test_optimizers_without_second_moments_are_refused():
    with pytest.raises(UsageError, match="reads second moments, such as those of Adam, RMSprop and Adafactor, but the"):
        train(Case("tied", "sgd_momentum"), [OptimizerHealth()])


@pytest.mark.parametrize("options", [{"interval": 0}, {"bottom": -1}], ids=str)
def test_invalid_options_are_refused(options):
    ((name, value),) = options.items()
    with pytest.raises(UsageError, match=rf"optimizer_health\.{name} is {value}; it must be at least"):
        OptimizerHealth(**options)


def test_largest_propagates_nan():
    assert math.isnan(largest([1.0, math.nan]))
    sums, below = ratio_sums(torch.tensor([math.nan]), SecondMoment(torch.tensor([1.0])), 0.0)
    assert math.isnan(sums)
    assert below == 0


# Ranks


def _trained(kind: str) -> dict[str, float]:
    metrics = trained(kind, [OptimizerHealth(**ALL)], tied=False, recipe=None)["metrics"]
    return {f"{name} at step {step}": float(v) for (name, _, step), v in metrics.items() if "optimizer_health" in name}


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DDP", "FSDP2", "TP"])
def test_three_ranks_match_one_process(kind, tmp_path):
    expected = _trained("one process")
    assert len(expected) > 100
    for rank in on_ranks(partial(_trained, kind), tmp_path, 3):
        assert rank == pytest.approx(expected, rel=1e-6, abs=1e-9)
