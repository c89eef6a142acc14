"""Smoothing against its closed form, without the framework and as a hook, on one process and on two."""

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loopscope.engine import HookManager
from loopscope.errors import UsageError
from loopscope.hooks import HookPoint
from loopscope.loops import NoProgress, epoch_loop
from loopscope.state import LoopState
from loopscope.state.digest import described
from loopscope.tensors import fully_sharded_modules, unsharded
from loopscope.training import TrainingTask, forward_backward, update
from loopscope.training_hooks import ModelSmoother, SmoothingConfig
from loopscope.training_hooks.averaging import ModelSmoothing, smoothing
from loopscope.training_hooks.averaging.smoothing import distance
from torch import nn

from tests.support import (
    LOOPS,
    MODELS,
    OPTIMIZERS,
    Case,
    RecordingSink,
    TiedModel,
    WatchedManager,
    build,
    differences,
    run_info,
    train,
)
from tests.support.cases import matrix
from tests.support.ranks import on_two_ranks
from tests.training_hooks.interrupted import in_one_and_two
from tests.training_hooks.reloading import through_a_file
from tests.training_hooks.sharded_runs import KINDS, sharded

STEPS = 7


def linear(value: float, **options: Any) -> nn.Linear:
    """Make a model of one weight."""
    model = nn.Linear(1, 1, bias=False, **options)
    nn.init.constant_(model.weight, value)
    return model


def descend(model: nn.Module, steps: int, gradient: float, rate: float, smoother: ModelSmoother) -> list[float]:
    """Take steps of SGD along a constant gradient; return the weight after each."""
    seen = []
    for step in range(1, steps + 1):
        with torch.no_grad():
            model.weight -= rate * gradient
        smoother.maybe_smooth(step)
        seen.append(model.weight.item())
    return seen


# Alone


@pytest.mark.parametrize("alpha", [0.25, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("interval", [1, 3])
def test_weights_follow_closed_form_under_linear_optimizer(alpha, interval):
    """Smoothing maps b to b − (1 − α)d with d = interval · learning rate · gradient, a line of lower slope."""
    model = linear(2.0, dtype=torch.float64)
    smoother = ModelSmoother(model, SmoothingConfig(update_interval=interval, alpha=alpha))
    seen = descend(model, 12, gradient=0.3, rate=0.1, smoother=smoother)
    for step, weight in enumerate(seen, start=1):
        smoothings, since = divmod(step, interval)
        expected = 2.0 - smoothings * (1 - alpha) * interval * 0.03 - since * 0.03
        assert weight == pytest.approx(expected, abs=1e-12)
    assert alpha < 1 or {seen[at] for at in range(interval - 1, 12, interval)} == {2.0}


def test_weights_follow_closed_form_under_contraction():
    """If each interval scales θ by r, n smoothings scale the start by (α + (1 − α)r)ⁿ."""
    model = linear(1.0, dtype=torch.float64)
    smoother = ModelSmoother(model, SmoothingConfig(update_interval=2, alpha=0.3))
    for step in range(1, 11):
        model.weight.data *= 0.9
        smoother.maybe_smooth(step)
    assert model.weight.item() == pytest.approx((0.3 + 0.7 * 0.81) ** 5, rel=1e-12)
    assert torch.equal(smoother.buffers["weight"], model.weight.detach())


def test_smoothing_happens_at_multiples_of_interval():
    """Step 0 does not count, and the defaults are interval 1000 and alpha 0.5."""
    smoother = ModelSmoother(linear(1.0), SmoothingConfig(update_interval=3))
    assert [step for step in range(10) if smoother.maybe_smooth(step)] == [3, 6, 9]
    assert ModelSmoother(linear(1.0)).config == SmoothingConfig(update_interval=1000, alpha=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_block_and_whole_tensors_smooth_alike(dtype, monkeypatch):
    """Large, empty and transposed tensors match lerp bit for bit in several dtypes."""
    monkeypatch.setattr(smoothing, "BLOCK", 50)
    shapes = {"large": (12, 11), "small": (7,), "scalar": (), "empty": (0, 3)}
    model = nn.ParameterDict({name: nn.Parameter(torch.randn(shape, dtype=dtype)) for name, shape in shapes.items()})
    model["turned"] = nn.Parameter(torch.randn(20, 9, dtype=dtype).t())
    start = {name: value.detach().clone() for name, value in model.items()}
    smoother = ModelSmoother(model, SmoothingConfig(update_interval=1, alpha=0.25))
    for parameter in model.values():
        parameter.data.mul_(3)
    expected = {name: start[name].lerp(3 * start[name], 0.75) for name in start}
    smoother.smooth()
    for name, value in expected.items():
        assert torch.equal(model[name].detach(), value), name
        assert torch.equal(smoother.buffers[name], value), name
        assert smoother.buffers[name].stride() == model[name].stride()


def test_tied_parameter_has_one_buffer_and_moves_once():
    model = TiedModel()
    start = model.embedding.weight.detach().clone()
    smoother = ModelSmoother(model, SmoothingConfig(update_interval=1, alpha=0.25))
    assert "embedding.weight" in smoother.buffers
    assert "decoder.weight" not in smoother.buffers
    model.embedding.weight.data += 1
    smoother.smooth()
    torch.testing.assert_close(model.decoder.weight.detach(), start + 0.75)


def test_frozen_parameters_are_not_smoothed():
    """They have no buffer, and a parameter frozen later stays unchanged together with its buffer."""
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    smoother = ModelSmoother(model, SmoothingConfig(update_interval=1))
    assert list(smoother.buffers) == ["weight"]
    model.weight.requires_grad_(False)
    before = [
        value.clone() for value in (model.weight.data.add_(1), model.bias.data.add_(1), smoother.buffers["weight"])
    ]
    smoother.smooth()
    assert all(map(torch.equal, before, (model.weight.data, model.bias.data, smoother.buffers["weight"])))


def test_smoothing_stores_only_the_buffer():
    model = nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20))
    kept = ModelSmoother(model).state_dict()["copies"]
    assert sum(value.nbytes for value in kept.values()) == sum(value.nbytes for value in model.parameters())


def test_smoother_resumes_from_its_checkpoint():
    whole_run = linear(1.0)
    expected = descend(whole_run, 8, 0.5, 0.1, ModelSmoother(whole_run, SmoothingConfig(update_interval=3)))
    model = linear(1.0)
    first = ModelSmoother(model, SmoothingConfig(update_interval=3))
    seen = descend(model, 4, 0.5, 0.1, first)
    second = ModelSmoother(model, SmoothingConfig(update_interval=3))
    second.load_state_dict(through_a_file(first.state_dict()))
    for step in range(5, 9):
        model.weight.data -= 0.1 * 0.5
        second.maybe_smooth(step)
        seen.append(model.weight.item())
    assert seen == expected


def test_loaded_buffer_is_a_copy():
    model = linear(1.0)
    first, second = ModelSmoother(model), ModelSmoother(model)
    second.load_state_dict(first.state_dict())
    model.weight.data += 1
    second.smooth()
    assert first.buffers["weight"].item() == 1.0


def test_loaded_buffer_takes_the_model_dtype():
    smoother = ModelSmoother(linear(3.0, dtype=torch.bfloat16))
    smoother.load_state_dict(ModelSmoother(linear(1.0)).state_dict())
    smoother.smooth()
    assert torch.equal(smoother.buffers["weight"], torch.full((1, 1), 2.0, dtype=torch.bfloat16))


MISFITS = {
    "shape": (nn.Linear(3, 2), r"concerns weight, which have another shape"),
    "name": (nn.Sequential(nn.Linear(2, 2)), r"concerns weight, bias, which the model does not have"),
    "count": (nn.Linear(2, 2, bias=False), r"concerns bias, which the model does not have"),
    "more": (
        nn.ParameterDict({name: torch.ones(2, 2) for name in ("weight", "bias", "gain")}),
        "concerns gain, which the state lacks",
    ),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_checkpoint_of_another_model_is_refused(kind):
    """The error names the parameters, and the buffers stay unchanged."""
    other, sentence = MISFITS[kind]
    state = ModelSmoother(nn.Linear(2, 2)).state_dict()
    smoother = ModelSmoother(other)
    before = dict(smoother.buffers)
    with pytest.raises(ValueError, match=sentence):
        smoother.load_state_dict(state)
    assert smoother.buffers == before


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"alpha": 0.0}, r"alpha is 0.0; it must be in \(0, 1\]"),
        ({"alpha": 1.5}, r"alpha is 1.5; it must be in \(0, 1\]"),
        ({"alpha": math.nan}, "alpha is nan; it must be in"),
        ({"update_interval": 0}, "update_interval is 0; it must be at least 1"),
        ({"update_interval": 2.5}, "update_interval is 2.5; it must be a whole number of steps"),
    ],
)
def test_invalid_options_are_refused(options, sentence):
    """SmoothingConfig raises ValueError, and the hook raises UsageError with the name of the option."""
    with pytest.raises(ValueError, match=sentence):
        SmoothingConfig(**options)
    with pytest.raises(UsageError, match=f"model_smoothing.{sentence}"):
        ModelSmoothing(**options)


def test_distance_matches_float64_brute_force(monkeypatch):
    monkeypatch.setattr(smoothing, "BLOCK", 40)
    a = {"large": torch.randn(30, 5), "low": torch.randn(9, 9).bfloat16(), "small": torch.randn(3)}
    b = {name: value + torch.randn_like(value) for name, value in a.items()}
    squares = [(a[name].double() - b[name].double()).square().sum() for name in a]
    assert distance(a, b).item() == pytest.approx(math.sqrt(sum(squares)), rel=1e-6)


def test_xla_is_not_imported_without_xla_parameters():
    smoother = ModelSmoother(linear(1.0), SmoothingConfig(update_interval=1))
    smoother.smooth()
    assert not any(name.startswith("torch_xla") for name in sys.modules)


# As a hook


def custom_loop(case: Case, config: SmoothingConfig) -> TrainingTask:
    """Train in a loop as one would write it."""
    task, _ = build(case, steps=STEPS)
    smoother, step = ModelSmoother(task.model, config), 0
    for epoch in range(3):
        for batch in task.loader.batches(epoch):
            if case.loop == "epoch" or step < STEPS:
                step += 1
                forward_backward(task, batch)
                update(task, step_scheduler=case.loop == "step")
                smoother.maybe_smooth(step)
        if case.loop == "epoch":
            task.scheduler.step()
    return task


@matrix("model, optimizer, loop, interval", MODELS, OPTIMIZERS, LOOPS, [1, 2])
def test_hook_equals_custom_loop_with_smoother(model, optimizer, loop, interval):
    """The parameters agree bit for bit for models, optimizers, loops and intervals."""
    case = Case(model, optimizer, loop)
    task = custom_loop(case, SmoothingConfig(update_interval=interval, alpha=0.3))
    run = train(case, [ModelSmoothing(update_interval=interval, alpha=0.3)], steps=STEPS)
    for expected, found in zip(task.model.parameters(), run.task.model.parameters(), strict=True):
        assert torch.equal(expected, found)


def test_metrics_report_distance_and_jump():
    """They match a float64 computation and appear only at steps that smooth."""
    log: dict[tuple[int, HookPoint], dict[str, torch.Tensor]] = {}

    class Watching(WatchedManager):
        def watch_call(self, point, call):
            weights = self.task.model.named_parameters()
            log[self.state.loop.step, point] = {name: value.detach().double().clone() for name, value in weights}
            call()

    run = train(Case("transformer"), [ModelSmoothing(update_interval=2, alpha=0.25)], steps=3, manager_class=Watching)
    values = {name.split("/")[1]: (step, value) for name, _, step, value in run.sink.rows("model_smoothing")}
    start = {name: value.double() for name, value in build(Case("transformer"))[0].model.named_parameters()}
    before = log[2, HookPoint.POST_STEP]
    far = math.sqrt(sum((before[name] - start[name]).square().sum().item() for name in start))
    length = math.sqrt(sum(value.square().sum().item() for value in before.values()))
    assert {name: step for name, (step, _) in values.items()} == dict.fromkeys(values, 2)
    assert values["distance"][1] == pytest.approx(far, rel=1e-5)
    assert values["relative_jump"][1] == pytest.approx(0.25 * far / length, rel=1e-5)
    assert values["smoothings"][1] == 1
    assert values.keys() == {info.name for info in ModelSmoothing().describe_metrics()}


def test_full_smoothing_keeps_the_initial_weights():
    """With alpha 1 and interval 1, every step returns to the start."""
    task, _ = build(Case("transformer"))
    run = train(Case("transformer"), [ModelSmoothing(update_interval=1, alpha=1.0)], steps=6)
    for expected, found in zip(task.model.parameters(), run.task.model.parameters(), strict=True):
        assert torch.equal(expected, found)
    assert [row[3] for row in run.sink.rows("model_smoothing/smoothings")] == [1, 2, 3, 4, 5, 6]


def test_initially_frozen_parameters_are_named_once():
    """One warning names the parameters that the hook leaves alone, since they were frozen at the start."""
    task, state = build(Case())
    task.model[0].bias.requires_grad_(False)
    hook = ModelSmoothing(update_interval=1)
    hook.start(run_info(task, HookManager([hook], task, state), "epoch"))
    with pytest.warns(
        UserWarning, match="does not smooth 0.bias at step 1: these parameters were frozen when the run started"
    ) as caught:
        train(Case(), [hook])
    assert len(caught) == 1


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("model", MODELS)
def test_resumed_run_matches_uninterrupted_run(model, loop, tmp_path):
    case = Case(model, loop=loop)
    one, two, middle = in_one_and_two(case, lambda: ModelSmoothing(update_interval=4, alpha=0.4), tmp_path)
    assert not differences(one.final, two.final)
    assert described(two.rows) == described(one.after(middle)) != "[]"


def test_hook_refuses_state_of_another_model():
    """The error names the parameters that differ."""
    run = train(Case("tied"), [ModelSmoothing(update_interval=1)])
    hook = ModelSmoothing()
    hook.load_state_dict(run.manager.hooks.state_dict()["model_smoothing"])
    other = train(Case("batchnorm_mlp"))
    with pytest.raises(UsageError, match=r"Hook 'model_smoothing' cannot resume .* concerns embedding\.weight"):
        hook.start(run_info(other.task, other.manager, "epoch"))


# On two processes


def smoothed(kind: str | None, hooks: list[ModelSmoothing]) -> dict[str, Any]:
    """Train with a hook, or with a smoother in a custom loop; return the full weights and the reported metrics."""
    task, state = sharded(kind)
    sink = RecordingSink()
    manager = HookManager(hooks, task, state, sinks=[sink], audit=True)
    manager.start(run_info(task, manager, "epoch"))
    smoother = None if hooks else ModelSmoother(task.model, SmoothingConfig(update_interval=3, alpha=0.4))
    epoch_loop(task, manager, progress=ByHand(smoother, task))
    manager.end("completed")
    for module in fully_sharded_modules(task.model):
        module.reshard()
    found = {name: unsharded(value.detach()) for name, value in task.model.named_parameters()}
    kept = {name: type(value).__name__ for name, value in (smoother.buffers if smoother else {}).items()}
    return {"weights": found, "rows": {(name, step): value for name, _, step, value in sink.rows()}, "kept": kept}


class ByHand(NoProgress):
    """Smooths after every step where there is a smoother, which has gone through a file in the middle."""

    def __init__(self, smoother: ModelSmoother | None, task: TrainingTask) -> None:
        self.smoother, self.task = smoother, task

    def step(self, loop: LoopState) -> None:
        if self.smoother is not None:
            self.smoother.maybe_smooth(loop.step)
            if loop.step == 5:
                self.smoother.load_state_dict(through_a_file(self.smoother.state_dict()))


def all_results() -> dict[str, Any]:
    """Train every kind of model with the hook and with a smoother."""
    return {kind: {way: smoothed(kind, hooks()) for way, hooks in WAYS.items()} for kind in KINDS}


WAYS: dict[str, Callable[[], list[ModelSmoothing]]] = {
    "hook": lambda: [ModelSmoothing(update_interval=3, alpha=0.4)],
    "by hand": list,
}


@pytest.mark.ranks
@pytest.mark.slow
def test_two_rank_run_matches_one_rank(tmp_path):
    """Sharded parameters stay sharded, and the hook equals a direct use of ModelSmoother."""
    ranks = on_two_ranks(all_results, tmp_path)
    expected = smoothed(None, WAYS["hook"]())
    assert smoothed(None, [])["weights"].keys() == expected["weights"].keys()
    for found in (results[kind][way] for results in ranks for kind in KINDS for way in WAYS):
        torch.testing.assert_close(found["weights"], expected["weights"], rtol=1e-5, atol=1e-6)
    for results in (ranks[rank][kind] for rank in (0, 1) for kind in KINDS):
        assert results["hook"]["rows"] == pytest.approx(expected["rows"], rel=1e-4)
        assert set(results["by hand"]["kept"].values()) >= {"DTensor"}
        for name, value in results["hook"]["weights"].items():
            assert torch.equal(value, results["by hand"]["weights"][name])
