import json
import math
from dataclasses import replace
from typing import Any

import loopscope
import pytest
import torch
from loopscope.data import TensorLoader, fixed_order
from loopscope.engine import HookManager
from loopscope.errors import UnsuitableError, UsageError
from loopscope.hooks import Recovery
from loopscope.loops import step_loop
from loopscope.state import RandomStreams, TrainingState
from loopscope.training import TrainingTask
from loopscope.training_hooks.gradients import GradientFlow
from loopscope.training_hooks.gradients.gradient_flow import square_norm
from torch import Tensor, nn

from tests.support import RecordingSink, run_info
from tests.training_hooks.device_waits import DeviceWaits
from tests.training_hooks.epoch_end import epoch_end
from tests.training_hooks.reloading import through_a_file

WIDTH, ROWS, DEPTH = 6, 12, 8


class Mlp(nn.Module):
    """Linear blocks with a tanh in between; with ``scales``, orthogonal blocks of these scales without the tanh."""

    def __init__(self, scales: list[float] | None = None) -> None:
        super().__init__()
        self.linear = scales is not None
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in scales or range(DEPTH))
        self.head = nn.Linear(WIDTH, 1)
        for block, scale in zip(self.blocks, scales or [], strict=False):
            nn.init.orthogonal_(block.weight, scale)
        self.outputs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.outputs = []
        for block in self.blocks:
            self.outputs.append(block(x))
            x = self.outputs[-1] if self.linear else torch.tanh(self.outputs[-1])
        return self.head(x)


def data_for(model: nn.Module) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    kind = next(model.parameters())
    return torch.randn(ROWS, WIDTH, generator=generator).to(kind), torch.randn(ROWS, 1, generator=generator).to(kind)


def mean_square(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def prepared(
    model: nn.Module, hook: GradientFlow, steps: int = 1, **options: Any
) -> tuple[TrainingTask, TrainingState, HookManager, RecordingSink]:
    data = data_for(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = TensorLoader(data, ROWS, fixed_order(torch.arange(ROWS)))
    task = TrainingTask(model, optimizer, loader, mean_square, length=steps, snapshot_every=steps, **options)
    state, sink = TrainingState(model, optimizer, RandomStreams(1), scaler=task.scaler), RecordingSink()
    return task, state, HookManager([hook], task, state, loop="step", sinks=[sink], audit=True), sink


def run(model: nn.Module, hook: GradientFlow, steps: int = 1, **options: Any) -> dict[str, float]:
    """Train with a learning rate of zero; return the hook's report of the last step."""
    task, _, manager, sink = prepared(model, hook, steps, **options)
    manager.start(run_info(task, manager, "step"))
    step_loop(task, manager)
    manager.end("completed")
    return {name.removeprefix("gradient_flow/"): value for name, _, step, value in sink.rows() if step == steps}


def build_mlp(scales: list[float] | None = None, dtype: torch.dtype = torch.float64) -> Mlp:
    torch.manual_seed(0)
    return Mlp(scales).to(dtype)


def by_hand(model: Mlp) -> list[float]:
    """Compute the norms of the loss's gradient at the outputs of the blocks with autograd."""
    loss = mean_square(model, data_for(model))
    return [float(gradient.norm()) for gradient in torch.autograd.grad(loss, model.outputs)]


@pytest.mark.longer
def test_norms_and_gains_match_autograd():
    model = build_mlp()
    norms = by_hand(model)
    metrics = run(model, GradientFlow())
    blocks = [f"blocks.{number}" for number in range(DEPTH)]
    assert [metrics[f"norm/{block}"] for block in blocks] == pytest.approx(norms, rel=1e-12)
    expected = [norms[number] / norms[number + 1] for number in range(DEPTH - 1)]
    assert [metrics[f"gain/{block}"] for block in blocks[1:]] == pytest.approx(expected, rel=1e-12)
    assert "gain/blocks.0" not in metrics
    assert (metrics["smallest_gain"], metrics["largest_gain"]) == pytest.approx((min(expected), max(expected)))
    assert metrics["total_gain/blocks"] == pytest.approx(math.prod(expected), rel=1e-12)


@pytest.mark.longer
def test_planted_faulty_blocks_are_reported():
    """The gain of each block equals its scale, and the two warnings name only the planted blocks."""
    scales = [1.0, 1.0, 0.9, 0.01, 1.0, 1.2, 50.0, 1.0]
    with pytest.warns(UserWarning, match="backpropagated gradient") as caught:
        metrics = run(build_mlp(scales), GradientFlow())
    for number, scale in enumerate(scales[1:], start=1):
        assert metrics[f"gain/blocks.{number}"] == pytest.approx(scale, rel=1e-6)
    assert (metrics["vanishing_count"], metrics["amplifying_count"]) == (1, 1)
    assert sorted(str(warning.message) for warning in caught) == [
        "Step 1: the backpropagated gradient is amplified (gain ≥ 10) in blocks.6 (50).",
        "Step 1: the backpropagated gradient vanishes (gain ≤ 0.1) in blocks.3 (0.01).",
    ]


@pytest.mark.longer
def test_gradients_beyond_float32_squares_are_measured():
    with pytest.warns(UserWarning, match=r"blocks.* and 1 more"):
        metrics = run(build_mlp([1e-6] * 7, torch.float32), GradientFlow())
    assert 0 < metrics["norm/blocks.0"] < 1e-35
    assert metrics["gain/blocks.1"] == pytest.approx(1e-6, rel=1e-4)
    assert float(square_norm(torch.full((3,), 60000.0, dtype=torch.float16))) == pytest.approx(3 * 60000.0**2)


@pytest.mark.longer
@pytest.mark.slow_rows("5")
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("parts", [2, 3, 5])
def test_micro_batch_norms_combine_to_batch_norms(parts):
    single, accumulated = (run(build_mlp(), GradientFlow(), accumulation_steps=count) for count in (1, parts))
    assert accumulated == pytest.approx(single, rel=1e-10)


@pytest.mark.longer
def test_float16_loss_scale_is_divided_out():
    """A run with a GradScaler reports the same metrics as a run without one."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    assert run(build_mlp(), GradientFlow(), scaler=scaler) == pytest.approx(run(build_mlp(), GradientFlow()), rel=1e-12)


@pytest.mark.longer
def test_non_finite_gradients_are_reported():
    """They change no state of the hook, and later runs report the same metrics as before."""
    model, hook = build_mlp(), GradientFlow(interval=1)
    finite_metrics = run(model, hook)
    with torch.no_grad():
        model.head.bias.fill_(torch.inf)
    metrics = run(model, hook)
    assert not math.isfinite(metrics["norm/blocks.0"])
    assert hook.state_dict() == {"vanishing": [], "amplifying": [], "file": {"size": 0}}
    assert run(build_mlp(), hook) == finite_metrics


@pytest.mark.slow_rows("3")
@pytest.mark.compile
@pytest.mark.parametrize("parts", [1, 3])
def test_compiled_model_matches_eager_metrics(parts):
    model = build_mlp()
    model.compile(backend="eager", dynamic=False)
    metrics = run(model, GradientFlow(), accumulation_steps=parts)
    assert metrics == pytest.approx(run(build_mlp(), GradientFlow()), rel=1e-10)


class Recurrent(Mlp):
    """Applies its blocks twice."""

    def forward(self, x: Tensor) -> Tensor:
        outputs: list[Tensor] = []
        for _ in range(2):
            super().forward(x)
            outputs += self.outputs
            x = torch.tanh(self.outputs[-1])
        self.outputs = outputs
        return self.head(x)


@pytest.mark.longer
def test_reused_block_combines_both_uses():
    """The norm of a block that is used twice is the root of the sum of both squared norms."""
    torch.manual_seed(0)
    model = Recurrent().double()
    norms = by_hand(model)
    metrics = run(model, GradientFlow())
    combined = [math.hypot(*norms[number::DEPTH]) for number in range(DEPTH)]
    assert [metrics[f"norm/blocks.{number}"] for number in range(DEPTH)] == pytest.approx(combined, rel=1e-12)


@pytest.mark.longer
def test_blocks_without_a_gradient_are_omitted():
    model = build_mlp()
    for block in model.blocks[:3]:
        block.requires_grad_(False)
    norms, metrics = by_hand_of_trained(model), run(model, GradientFlow())
    measured = [name.removeprefix("norm/") for name in metrics if name.startswith("norm/")]
    assert measured == [f"blocks.{number}" for number in range(3, DEPTH)]
    assert {name for name in metrics if name.startswith("gain/")} == {f"gain/{block}" for block in measured[1:]}
    assert metrics["total_gain/blocks"] == pytest.approx(norms[0] / norms[-1], rel=1e-12)


def by_hand_of_trained(model: Mlp) -> list[float]:
    loss = mean_square(model, data_for(model))
    return [float(gradient.norm()) for gradient in torch.autograd.grad(loss, model.outputs[3:])]


def test_run_without_block_gradients_reports_nothing():
    model = build_mlp()
    model.blocks.requires_grad_(False)
    assert run(model, GradientFlow()) == {}


class TwoStacks(nn.Module):
    """An encoder and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = build_mlp(), build_mlp([1.0, 0.5, 2.0])
        self.encoder.head = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


@pytest.mark.longer
def test_stacks_are_separate_chains():
    """Encoder and decoder each have a total gain, and there is no gain between them."""
    metrics = run(TwoStacks(), GradientFlow())
    assert {name for name in metrics if name.startswith("total_gain/")} == {
        "total_gain/encoder.blocks",
        "total_gain/decoder.blocks",
    }
    assert metrics["total_gain/decoder.blocks"] == pytest.approx(1.0, rel=1e-6)
    assert "gain/decoder.blocks.0" not in metrics
    assert metrics["gain/decoder.blocks.2"] == pytest.approx(2.0, rel=1e-6)


@pytest.mark.longer
def test_pattern_selects_the_blocks():
    metrics = run(TwoStacks(), GradientFlow(pattern="*.blocks.1", vanishing_gain=1e-6))
    assert {name for name in metrics if "/" in name} == {
        "norm/encoder.blocks.1",
        "norm/decoder.blocks.1",
        "gain/decoder.blocks.1",
        "total_gain/*.blocks.1",
    }
    assert {info.column for info in GradientFlow().describe_metrics()} == {name.split("/")[0] for name in metrics}


@pytest.mark.longer
def test_measurement_starts_at_first_step():
    """With interval=3, steps 1, 4, 7 and 10 are measured."""
    hook = GradientFlow(interval=3)
    assert [step for step in range(1, 12) if hook.step_schedule.is_due(step)] == [1, 4, 7, 10]
    assert run(build_mlp(), GradientFlow(interval=3), steps=3) == {}
    assert run(build_mlp(), GradientFlow(interval=3), steps=4) == run(build_mlp(), GradientFlow(), steps=1)


# Warnings


def check_gains(hook: GradientFlow, step: int, **gains: float) -> list[tuple[bool, str]]:
    """Check gains of blocks; return the hook's alerts as pairs (is a recovery, sentence)."""
    alerts = hook.check({"norm/a": 1.0} | {f"gain/{block}": gain for block, gain in gains.items()}, step)
    return [(isinstance(alert, Recovery), str(alert)) for alert in alerts]


def test_condition_is_reported_on_start_growth_end():
    """An alert reports that a condition starts or that a block joins it, and a recovery its end."""
    hook = GradientFlow()
    assert check_gains(hook, 1, a=1.0, b=0.5) == []
    assert check_gains(hook, 101, a=0.05, b=0.5) == [(False, sentence(101, "a (0.05)"))]
    assert check_gains(hook, 201, a=0.04, b=0.5) == []
    assert check_gains(hook, 301, a=0.04, b=0.01) == [(False, sentence(301, "b (0.01), a (0.04)"))]
    assert check_gains(hook, 401, a=1.0, b=0.01) == []
    assert check_gains(hook, 501, a=1.0, b=1.0) == [
        (True, "Step 501: the backpropagated gradient no longer vanishes (gain ≤ 0.1) in any block.")
    ]
    assert check_gains(hook, 601, a=0.1, b=1.0) == [(False, sentence(601, "a (0.1)"))]


def sentence(step: int, named: str) -> str:
    return f"Step {step}: the backpropagated gradient vanishes (gain ≤ 0.1) in {named}."


def test_gain_near_threshold_warns_once():
    """The condition ends only when the gain is below half of the threshold."""
    hook = GradientFlow()
    assert len(check_gains(hook, 1, a=11.0)) == 1
    assert [check_gains(hook, 100 * n, a=gain) for n, gain in enumerate((9.5, 10.5, 5.1, 12.0), start=1)] == [[]] * 4
    assert [notice for notice, _ in check_gains(hook, 501, a=4.9)] == [True]


def test_reported_conditions_survive_checkpoint():
    """Non-finite gains leave the reported conditions unchanged, and reset() clears them."""
    hook, resumed = GradientFlow(), GradientFlow()
    check_gains(hook, 1, a=0.01, b=100.0)
    resumed.load_state_dict(through_a_file(hook.state_dict()))
    assert check_gains(resumed, 101, a=0.01, b=100.0) == []
    assert not list(resumed.check({"norm/a": math.nan, "gain/a": math.nan, "gain/b": 1.0}, 201))
    assert resumed.state_dict() == hook.state_dict() == {"vanishing": ["a"], "amplifying": ["b"], "file": {"size": 0}}
    resumed.reset()
    assert len(check_gains(resumed, 301, a=0.01, b=100.0)) == 2


def test_deep_model_reports_extreme_blocks(tmp_path):
    """The extremes of each family are reported, and the smallest gain, the counts and the file are those of all."""
    hook = GradientFlow(top=2, bottom=1, names="3", write_all=True)
    model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(8)])
    task, _, manager, _ = prepared(model, hook)
    hook.start(replace(run_info(task, manager, "step"), output_dir=tmp_path))
    for index, tap in enumerate(hook.taps(model)):
        tap.function(torch.tensor([2.0 ** -(index**2)], dtype=torch.float64))
    metrics = hook.compute(epoch_end(model))
    assert [name for name in metrics if "/" in name] == [
        "total_gain/model", "norm/0", "norm/1", "norm/3", "norm/7", "gain/1", "gain/3", "gain/6", "gain/7",
    ]  # fmt: skip
    assert (metrics["smallest_gain"], metrics["largest_gain"], metrics["amplifying_count"]) == (2.0, 2.0**13, 5)
    (path,) = tmp_path.glob("*.gradient_flow.jsonl")
    assert json.loads(path.read_text())["gain"] == {str(block): 2.0 ** (2 * block - 1) for block in range(1, 8)}


def test_block_within_reported_extremes_keeps_condition():
    """A block whose gain is not reported recovers once all reported blocks have recovered, not before."""
    hook = GradientFlow(top=1, bottom=1)
    assert len(check_gains(hook, 1, a=0.05, b=1.0)) == 1
    assert check_gains(hook, 101, c=0.15, b=1.0) == []
    assert hook.state_dict()["vanishing"] == ["a"]
    assert check_gains(hook, 201, b=1.0) == []  # without a budget in force, a is a block without a gradient
    assert hook.state_dict()["vanishing"] == ["a"]
    assert [is_over for is_over, _ in check_gains(hook, 301, c=0.5, b=1.0)] == [True]


# Errors and costs


def refusal(model: nn.Module, **options: Any) -> str:
    with pytest.raises(UnsuitableError) as error:
        run(model, GradientFlow(**options))
    return str(error.value)


def test_model_without_blocks_is_refused():
    """The error names the pattern option; a pattern that matches too few modules is refused as well."""
    model = nn.ModuleDict({"only": nn.Linear(WIDTH, 1)})
    assert "the model has none; name the blocks with hook_options={'gradient_flow': {'pattern'" in refusal(model)
    assert "modules of the model are only." in refusal(model)
    assert "pattern 'blocks.9' matches fewer modules" in refusal(build_mlp(), pattern="blocks.9")
    assert "pattern 'block.*' matches fewer modules" in refusal(build_mlp(), pattern="blocks.*, block.*")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"interval": 0}, "gradient_flow.interval is 0; it must be at least 1 step"),
        ({"vanishing_gain": 1.0}, "gradient_flow.vanishing_gain is 1.0; it must be between 0 and 1"),
        ({"amplifying_gain": 0.5}, "gradient_flow.amplifying_gain is 0.5; it must be a number above 1"),
        ({"amplifying_gain": math.nan}, "gradient_flow.amplifying_gain is nan; it must be a number above 1"),
    ],
)
def test_options_that_cannot_work_are_refused(options, words):
    with pytest.raises(UsageError, match=words):
        GradientFlow(**options)


def test_taps_and_compute_do_not_synchronise():
    model, hook = build_mlp(), GradientFlow()
    task, _, manager, _ = prepared(model, hook)
    hook.start(run_info(task, manager, "step"))
    with DeviceWaits() as waits:
        for tap in hook.taps(model):
            tap.function(torch.ones(3))
        metrics = hook.compute(epoch_end(model))
        assert waits.count == 0
        assert float(metrics["smallest_gain"]) == 1.0
    assert waits.count == 1
    assert len(metrics) == 2 * DEPTH - 1 + 5


class Uncalled(nn.Module):
    """Blocks that are never called themselves: their members, or functions of their weights, are."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "dict":
            self.layers = nn.ModuleList(nn.ModuleDict({"a": nn.Linear(4, 4)}) for _ in range(4))
        elif kind == "list":
            self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4)]) for _ in range(4))
        else:
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        if kind == "frozen":
            self.layers.requires_grad_(False)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        for layer in self.layers:
            if self.kind == "functional":
                x = nn.functional.linear(x, layer.weight, layer.bias)
            else:
                key = {"dict": "a", "list": 0}.get(self.kind)
                x = layer(x) if key is None else layer[key](x)
        return self.head(x)


@pytest.mark.filterwarnings("always::loopscope.errors.RunNotice")
@pytest.mark.parametrize("kind", ["dict", "list", "functional", "frozen", "called"])
def test_blocks_without_gradients_are_reported_once(kind, tmp_path, capsys):
    """A notice names blocks at whose outputs no gradient arrives, and the option with which to choose others."""
    model = Uncalled(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"gradient_flow": {"interval": 1, "pattern": "layers.*"}}
    with loopscope.attach(model, optimizer, hooks=["gradient_flow"], hook_options=options, out=tmp_path) as scope:
        for x in scope.batches([torch.randn(3, 4) for _ in range(3)]):
            scope.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    printed = capsys.readouterr()
    text = " ".join((printed.out + printed.err).split())
    assert text.count("no gradient arrived at the outputs of layers.0") == (kind != "called")
    assert ("name other modules with" in text) is (kind != "called")
