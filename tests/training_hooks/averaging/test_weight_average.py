"""Averages of the weights against brute force in float64; their evaluation and their files against real models."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from loopscope.engine import HookManager
from loopscope.errors import LoopscopeError, UnsuitableError, UsageError
from loopscope.hooks import HookPoint
from loopscope.loops import epoch_loop
from loopscope.runs import RunFolder
from loopscope.state import TrainingState, without_on_demand
from loopscope.state.digest import described
from loopscope.tensors import fully_sharded_modules
from loopscope.training import TrainingTask
from loopscope.training_hooks.averaging import WeightAverage
from loopscope.training_hooks.averaging.weight_average import Average, average_name, averaged_state_dict
from torch import nn

from tests.support import (
    LOOPS,
    MODELS,
    Case,
    RecordingSink,
    SpyHook,
    TiedModel,
    at,
    build,
    data_for,
    differences,
    mean_loss,
    run_info,
    train,
)
from tests.support.ranks import on_two_ranks
from tests.training_hooks.interrupted import in_one_and_two
from tests.training_hooks.reloading import through_a_file
from tests.training_hooks.sharded_runs import KINDS, sharded

Values = dict[str, torch.Tensor]


def number(value: float, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Make a model of one weight."""
    model = nn.Linear(1, 1, bias=False, dtype=dtype)
    nn.init.constant_(model.weight, value)
    return model


def floating(model: nn.Module) -> Values:
    return {
        name: value.detach().double().clone() for name, value in model.state_dict().items() if value.is_floating_point()
    }


def brute_force(samples: list[tuple[int, Values]], decay: float) -> Values:
    """Return Σ dᵗ⁻ⁱθᵢ / Σ dᵗ⁻ⁱ over (step, weights)."""
    last = samples[-1][0]
    weights = [decay ** (last - step) for step, _ in samples]
    return {
        name: sum(weight * values[name] for weight, (_, values) in zip(weights, samples, strict=True)) / sum(weights)
        for name in samples[0][1]
    }


# The average alone


@pytest.mark.parametrize("decay", [0.5, 0.9, 1.0])
def test_average_is_weighted_sum_at_uneven_steps(decay):
    """The average matches the closed form in float64 for several decays."""
    model, average, seen = number(0.0), Average(decay), []
    for step, value in ((2, 3.0), (3, -1.0), (7, 4.0), (20, 0.5)):
        nn.init.constant_(model.weight, value)
        average.sample(model, step)
        seen.append((step, floating(model)))
        expected = brute_force(seen, decay)["weight"]
        torch.testing.assert_close(average.weights(model)["weight"], expected, rtol=1e-12, atol=1e-12)


def test_updates_at_every_nth_step_decay_per_step():
    """The average of a line θ = i lags by n·dⁿ/(1 − dⁿ) behind the last sample, if every nth is seen."""
    for interval in (1, 10):
        model, average = number(0.0), Average(0.9)
        for step in range(interval, 401, interval):
            nn.init.constant_(model.weight, step)
            average.sample(model, step)
        decay = 0.9**interval
        lag = interval * decay / (1 - decay)
        assert average.weights(model)["weight"].item() == pytest.approx(400 - lag, rel=1e-9)


def test_bfloat16_weights_are_averaged_in_float32():
    """The average moves where a bfloat16 average would round the update away."""
    model, average = number(1.0, torch.bfloat16), Average(0.999)
    for step in range(1, 2001):
        average.sample(model, step)
        nn.init.constant_(model.weight, 1.0078125)  # the next bfloat16
    found = average.weights(model)["weight"]
    rounding = 2**-24 / (1 - 0.999)  # smaller additions are lost to rounding in float32, too
    assert found.dtype is torch.float32
    assert found.item() == pytest.approx(1.0078125, abs=rounding)
    in_bfloat16 = torch.ones((), dtype=torch.bfloat16)
    assert in_bfloat16.lerp(torch.tensor(1.0078125, dtype=torch.bfloat16), 0.001) == 1


def test_statistics_are_averaged_and_counters_copied():
    """BatchNorm statistics match brute force, and num_batches_tracked is that of the live model."""
    model, average, seen = MODELS["batchnorm_mlp"](), Average(0.7), []
    for step in range(1, 5):
        model(torch.randn(6, 4) * step)
        average.sample(model, step)
        seen.append((step, floating(model)))
    state, expected = averaged_state_dict(model, average.weights(model)), brute_force(seen, 0.7)
    assert expected["1.running_var"].sub(model[1].running_var).abs().max() > 0.01
    for name, value in expected.items():
        torch.testing.assert_close(state[name].double(), value, rtol=1e-5, atol=1e-6)
    assert state["1.num_batches_tracked"] == 4


def test_infinite_masks_and_growing_caches_are_supported():
    """A mask keeps its infinities, and a buffer that changes its shape takes the newest values."""
    model, average = number(1.0), Average(0.9)
    model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    for step in range(1, 4):
        average.sample(model, step)
        model.cache = torch.full((2 + step,), float(step))
    assert average.weights(model)["mask"].tolist() == [0.0, -math.inf]
    assert average.weights(model)["cache"].tolist() == [2.0] * 4


def test_tied_parameters_share_one_average():
    """Frozen parameters have no average and keep their live values."""
    model, average = TiedModel(), Average(1.0)
    model.mix.requires_grad_(False)
    start = model.embedding.weight.detach().clone()
    average.sample(model, 1)
    model.embedding.weight.data += 1
    model.mix.bias.data += 1
    average.sample(model, 2)
    assert list(average.weights(model)) == ["embedding.weight"]
    other = TiedModel()
    other.load_state_dict(averaged_state_dict(model, average.weights(model)))
    torch.testing.assert_close(other.decoder.weight, start + 0.5)
    assert torch.equal(other.mix.bias, model.mix.bias)


def test_average_resumes_from_file_without_sharing_memory():
    """Later changes of the live weights do not reach the saved average."""
    model, average = nn.Linear(3, 2), Average(0.9)
    average.sample(model, 1)
    again = Average(0.9)
    again.load_state_dict(through_a_file(average.state_dict()))
    again.fit(model)
    nn.init.ones_(model.weight)
    for each in (average, again):
        each.sample(model, 5)
    assert described(average.state_dict()) == described(again.state_dict())


# As a hook


class Samples(at(SpyHook, HookPoint.POST_STEP)):
    """Keeps all floating-point tensors after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[int, Values]] = []

    def compute(self, ctx):
        self.steps.append((ctx.step, floating(ctx.model)))
        return {}


def first_loss(model: nn.Module) -> dict[str, float]:
    kind = "batchnorm_mlp" if isinstance(model, nn.Sequential) else "transformer"
    return {"val_loss": mean_loss(model, data_for(kind)).item()}


def loss_of(case: Case, weights: Values) -> float:
    """Return the loss of another model that loaded these weights."""
    model = build(case)[0].model
    model.load_state_dict({**model.state_dict(), **weights})
    with torch.no_grad():
        return first_loss(model.eval())["val_loss"]


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("loop", LOOPS)
def test_averages_match_brute_force_and_evaluation(loop, model):
    """Distances match float64, and losses match a model that loaded the average."""
    case, log = Case(model, loop=loop), Samples()
    hook = WeightAverage(decay=0.8, interval=2, swa_start=5, swa_interval=3)
    run = train(case, [hook, log], steps=12, evaluate=first_loss, snapshot_every=4 if loop == "epoch" else 12)
    reports = {name.removeprefix("weight_average/"): value for name, _, step, value in run.sink.rows("weight_average")}
    live = dict(run.task.model.named_parameters())
    for kind, decay, steps in (("ema", 0.8, (2, 4, 6, 8, 10, 12)), ("swa", 1.0, (6, 10))):
        expected = brute_force([(step, values) for step, values in log.steps if step in steps], decay)
        far = math.sqrt(sum((expected[name] - live[name].double()).square().sum().item() for name in live))
        assert reports[f"{kind}_samples"] == len(steps)
        assert reports[f"{kind}_distance"] == pytest.approx(far, rel=1e-4)
        assert reports[kind]["val_loss"] == pytest.approx(loss_of(case, expected), rel=1e-5)
    assert reports["ema"] != reports["swa"] != first_loss(run.task.model.eval())


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.parametrize(
    ("start", "expected"), [(0.0, [1, 2, 3, 4, 5, 6]), (0.5, [3, 4, 5, 6]), (0.75, [5, 6]), (4, [4, 5, 6]), (9, [])]
)
def test_swa_starts_at_step_or_run_fraction(start, expected):
    """The average includes exactly the steps after the start."""
    log = Samples()
    hook = WeightAverage(interval=1, swa_interval=1, swa_start=start, averages="swa")
    run = train(Case("transformer"), [hook, log], steps=6, scheduler=None)
    average = hook._averages["swa"]
    assert average.samples == len(expected)
    if expected:
        wanted = brute_force([log.steps[step - 1] for step in expected], 1.0)
        for name, value in average.weights(run.task.model).items():
            torch.testing.assert_close(value.double(), wanted[name], rtol=1e-5, atol=1e-6)


def test_single_average_omits_the_other():
    """With the EMA alone, neither state nor metrics of the other average exist."""
    run = train(Case(), [WeightAverage(interval=1, averages="ema", evaluate=False)])
    names = {name.removeprefix("weight_average/") for name, *_ in run.sink.rows("weight_average")}
    assert names == {"ema_distance", "ema_relative_distance", "ema_samples"}
    assert list(run.manager.hooks.state_dict()["weight_average"]) == ["snapshots", "ema"]


def test_nothing_is_reported_before_first_update(tmp_path):
    """The hook also writes no file."""
    hook = WeightAverage(interval=50)
    run = train(Case(), [hook])
    assert run.sink.rows("weight_average") == []
    hook.start(replace(run_info(run.task, run.manager, "epoch"), output_dir=tmp_path))
    hook.end("completed")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_averages_load_and_match_reported_loss(dtype, tmp_path):
    """The files have the names and dtypes of the state dict, also in bfloat16."""

    def with_folder(task: TrainingTask, state: TrainingState) -> None:
        task.model.to(dtype)

    class Writing(WeightAverage):
        def start(self, run):
            super().start(replace(run, output_dir=tmp_path))

    case = Case("transformer")
    run = train(case, [Writing(interval=1, swa_start=0.5)], steps=6, evaluate=first_loss, introduce=with_folder)
    reports = {name: value for name, _, step, value in run.sink.rows("weight_average") if step == 6}
    for kind in ("ema", "swa"):
        state = torch.load(tmp_path / f"only_{kind}.pt", weights_only=True)
        assert [(name, value.dtype) for name, value in state.items()] == [
            (name, value.dtype) for name, value in run.task.model.state_dict().items()
        ]
        model = build(case)[0].model.to(dtype)
        model.load_state_dict(state)
        with torch.no_grad():
            assert first_loss(model.eval())["val_loss"] == reports[f"weight_average/{kind}"]["val_loss"]


def test_average_files_count_as_run_output(tmp_path):
    """They block a new run, and an overwriting run removes them."""
    for kind in ("ema", "swa"):
        path = tmp_path / average_name("plain", kind)
        path.touch()
        with pytest.raises(UsageError, match="already holds an unfinished run"):
            RunFolder(tmp_path, "plain").refuse_to_overwrite(allowed=False)
        RunFolder(tmp_path, "plain").claim()
        assert not path.exists()


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("model", MODELS)
def test_resumed_run_reports_the_same_averages(model, loop, tmp_path):
    """Final state and rows match those of the uninterrupted run."""

    def make() -> WeightAverage:
        return WeightAverage(interval=2, swa_start=4, swa_interval=2)

    one, two, middle = in_one_and_two(Case(model, loop=loop), make, tmp_path)
    assert not differences(one.final, two.final)
    assert described(two.rows) == described(one.after(middle)) != "[]"


def test_averages_of_another_model_are_refused():
    """The error names the differing parameters."""
    run = train(Case("tied"), [WeightAverage(interval=1)])
    hook = WeightAverage()
    hook.load_state_dict(run.manager.hooks.state_dict()["weight_average"])
    other = train(Case("batchnorm_mlp"))
    with pytest.raises(UsageError, match=r"Hook 'weight_average' cannot resume .* concerns embedding\.weight"):
        hook.start(run_info(other.task, other.manager, "epoch"))


def test_a_model_without_trained_parameters_is_refused():
    task, state = build(Case())
    task.model.requires_grad_(False)
    with pytest.raises(UnsuitableError, match="Hook 'weight_average' needs trained parameters; the model has none"):
        WeightAverage().start(run_info(task, HookManager([], task, state), "epoch"))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"decay": 1.0}, "weight_average.decay is 1.0; it must be between 0 and 1"),
        ({"interval": 0}, "weight_average.interval is 0; it must be at least 1 step"),
        ({"swa_interval": 0}, "weight_average.swa_interval is 0; it must be at least 1 step"),
        ({"swa_start": -0.1}, r"weight_average.swa_start is -0.1; it must be a share of the steps in \[0, 1\)"),
        ({"swa_start": 7.5}, "weight_average.swa_start is 7.5; .* or a whole step"),
        ({"averages": "emma"}, "Unknown choice of weight_average.averages: 'emma'. Did you mean 'ema'"),
    ],
)
def test_invalid_options_are_refused(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        WeightAverage(**options)


# On two processes


def averaged(kind: str | None, folder: Path, *, hooks: bool = True) -> dict[str, Any]:
    """Train; return what was reported, the digest at the end and, from rank 0, the files."""
    task, state = sharded(kind)
    sink = RecordingSink()
    made = [WeightAverage(decay=0.8, interval=1, swa_start=0.5)] if hooks else []
    manager = HookManager(made, task, state, sinks=[sink], audit=True)
    manager.start(replace(run_info(task, manager, "epoch"), output_dir=folder))
    epoch_loop(task, manager)
    manager.end("completed")
    for module in fully_sharded_modules(task.model):
        module.reshard()
    return {"rows": {name: value for name, _, _, value in sink.rows()}, "final": without_on_demand(state.digest())}


def refusal() -> str:
    """Ask for an evaluation of other weights under FSDP2."""
    task, state = sharded("fully sharded")
    spy = at(SpyHook, HookPoint.POST_STEP)(lambda ctx: ctx.evaluate({}))
    try:
        epoch_loop(task, HookManager([spy], task, state))
    except LoopscopeError as error:
        return str(error)
    return "none"


def all_results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"refusal": refusal()}
    for kind in KINDS:
        own = folder / kind
        own.mkdir(exist_ok=True)
        found[kind] = averaged(kind, own)
        found[kind]["same"] = found[kind]["final"] == averaged(kind, folder / "none", hooks=False)["final"]
    return found


@pytest.mark.ranks
@pytest.mark.slow
def test_two_rank_averages_match_one_process(tmp_path):
    """FSDP2 and tensor parallelism give the same averages, but FSDP2 refuses to evaluate them."""
    ranks = on_two_ranks(partial(all_results, tmp_path), tmp_path)
    (tmp_path / "one").mkdir()
    expected = averaged(None, tmp_path / "one")["rows"]
    evaluated = {kind: expected.pop(f"weight_average/{kind}") for kind in ("ema", "swa")}
    for results in ranks:
        assert results["fully sharded"]["same"]
        assert results["tensor parallel"]["same"]
        found = {kind: results["tensor parallel"]["rows"].pop(f"weight_average/{kind}") for kind in evaluated}
        assert found == {kind: pytest.approx(numbers, rel=1e-4) for kind, numbers in evaluated.items()}
        assert results["tensor parallel"]["rows"] == pytest.approx(expected, rel=1e-4)
        assert results["fully sharded"]["rows"] == pytest.approx(expected, rel=1e-4)
        assert "under FSDP2 (fully_shard) cannot be replaced" in results["refusal"]
    for kind in ("ema", "swa"):
        one, *others = (
            torch.load(tmp_path / way / f"only_{kind}.pt") for way in ("one", "fully sharded", "tensor parallel")
        )
        for other in others:
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


@pytest.mark.longer
def test_averages_are_evaluated_at_interval_and_end() -> None:
    """evaluate_every counts snapshots and must be at least 1."""
    hook = WeightAverage(interval=1, averages="ema", evaluate_every=2)
    run = train(Case(), [hook], steps=15, snapshot_every=1, evaluate=first_loss)
    steps = sorted({step for name, _, step, _ in run.sink.rows("weight_average/ema") if name == "weight_average/ema"})
    assert steps == [6, 12, 15]
    with pytest.raises(UsageError, match="evaluate_every is 0; it must be at least 1"):
        WeightAverage(evaluate_every=0)
