"""The path of the parameters against brute force in float64, and on known paths."""

import math
from itertools import pairwise

import loopscope
import pytest
import torch
from loopscope.errors import UsageError
from loopscope.hooks import HookPoint, TrainingHook
from loopscope.state.digest import described
from loopscope.training_hooks.measures import weight_copies
from loopscope.training_hooks.updates import ParameterDelta, PathLength, path_length
from torch import nn

from tests.support import LOOPS, MODELS, Case, SpyHook, assert_same_bytes, at, train
from tests.support.cases import matrix
from tests.training_hooks.epoch_end import epoch_end
from tests.training_hooks.reloading import reloading, through_a_file

REPORT = {"epoch": HookPoint.POST_EPOCH, "step": HookPoint.SNAPSHOT}


class PositionLog(at(SpyHook, HookPoint.PRE_STEP, HookPoint.POST_STEP, *REPORT.values())):
    """Keeps the parameters in float64 before the first step and after every step, and the indices of reports."""

    def __init__(self, loop: str) -> None:
        super().__init__()
        self.loop, self.positions, self.reports = loop, [], []

    def compute(self, ctx):
        if ctx.hook_point is REPORT[self.loop]:
            self.reports.append(len(self.positions) - 1)
        elif ctx.hook_point is HookPoint.POST_STEP or not self.positions:
            self.positions.append(torch.cat([p.detach().double().flatten() for p in ctx.model.parameters()]))
        return {}


def expected(positions: list[torch.Tensor], begin: int, end: int, places: list[int]) -> dict[str, float]:
    """Compute the report of the interval from ``begin`` to ``end`` on the path through the positions ``places``."""
    lengths = {b: float((positions[b] - positions[a]).norm()) for a, b in pairwise(places) if b <= end}
    path, displacement = math.fsum(lengths.values()), float((positions[end] - positions[0]).norm())
    part = math.fsum(length for place, length in lengths.items() if place > begin)
    moved = float((positions[end] - positions[begin]).norm())
    return {
        "path_length": path,
        "displacement": displacement,
        "efficiency": displacement / path,
        "steps": end,
        "interval_path": part,
        "interval_efficiency": moved / part,
        "path_per_step": part / (end - begin),
    }


@pytest.mark.longer
@matrix("loop, every, model", LOOPS, [1, 2, 4, 100], MODELS)
def test_path_reports_match_brute_force(loop, every, model, monkeypatch):
    """The reports match the path through every recorded position, for each loop, model and interval."""
    monkeypatch.setattr(path_length, "FOLD", 2)
    log = PositionLog(loop)
    run = train(Case(model, loop=loop), [PathLength(every=every), log], steps=8, snapshot_every=3, scheduler=None)
    places = sorted({*range(0, len(log.positions), every), *log.reports})
    reports = [metrics for metrics, _, point, _ in run.sink.emitted if point is REPORT[loop]]
    assert len(reports) == len(log.reports) == 3
    for report, begin, end in zip(reports, [0, *log.reports], log.reports, strict=False):
        expected_report = {
            f"path_length/{name}": value for name, value in expected(log.positions, begin, end, places).items()
        }
        assert report == pytest.approx(expected_report, rel=1e-5, abs=1e-6)


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("case", [Case(loop=loop) for loop in LOOPS], ids=str)
def test_resumed_hook_reports_same_metrics(case, monkeypatch):
    """Reloading the hook at every call changes neither its metrics nor the run."""
    monkeypatch.setattr(path_length, "FOLD", 2)
    uninterrupted = train(case, [PathLength()], steps=8)
    reloaded = train(case, [reloading(PathLength)], steps=8)
    assert described(reloaded.sink.rows("path_length/")) == described(uninterrupted.sink.rows("path_length/"))
    assert_same_bytes(reloaded, case, 8)


@pytest.mark.parametrize(
    "hooks", [[PathLength], [ParameterDelta], [PathLength, ParameterDelta]], ids=["path", "delta", "both"]
)
def test_copies_in_a_file_change_no_metric(hooks, monkeypatch):
    """Copies in a temporary file give the same numbers, also after the hooks are reloaded at every call."""
    in_memory = train(Case(), [hook() for hook in hooks], steps=8)
    monkeypatch.setattr(weight_copies, "SMALLEST_FILE", 0)
    in_file = train(Case(), [hook() for hook in hooks], steps=8)
    reloaded = train(Case(), [reloading(hook) for hook in hooks], steps=8)
    assert in_memory.sink.rows("") != []
    assert described(in_file.sink.rows("")) == described(in_memory.sink.rows(""))
    assert described(reloaded.sink.rows("")) == described(in_memory.sink.rows(""))


def walk(hook: TrainingHook, positions: torch.Tensor) -> dict[str, float]:
    """Move a parameter through positions of shape (steps + 1, elements); return the report as numbers."""
    model = nn.Module()
    model.place = nn.Parameter(positions[0].clone())
    for step, position in enumerate(positions[1:], start=1):
        hook.compute(epoch_end(model, hook_point=HookPoint.POST_BACKWARD, step=step))
        model.place.data.copy_(position)
    return {name: float(value) for name, value in hook.compute(epoch_end(model, step=len(positions) - 1)).items()}


def test_a_straight_line_is_fully_efficient():
    report = walk(PathLength(), torch.arange(5.0)[:, None] * torch.tensor([3.0, 4.0]))
    assert report["path_length"] == report["displacement"] == report["interval_path"] == 20
    assert report["efficiency"] == report["interval_efficiency"] == 1
    assert (report["path_per_step"], report["steps"]) == (5, 4)


def test_oscillation_has_no_displacement():
    report = walk(PathLength(), torch.tensor([[0.0], [1.0], [0.0], [1.0], [0.0]]))
    assert (report["path_length"], report["displacement"], report["efficiency"]) == (4, 0, 0)


def test_three_square_sides_have_unit_displacement():
    """The path length is 3 and the displacement is 1."""
    report = walk(PathLength(), torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]))
    assert (report["path_length"], report["displacement"]) == (3, 1)


def test_random_walk_has_known_efficiency():
    """The efficiency is one over the square root of the number of steps."""
    positions = torch.randn(101, 4000, generator=torch.Generator().manual_seed(1)).cumsum(dim=0)
    report = walk(PathLength(), positions)
    assert report["efficiency"] == pytest.approx(1 / math.sqrt(report["steps"]), rel=0.05)


def test_motionless_path_has_no_efficiency():
    report = walk(PathLength(), torch.ones(3, 2))
    assert (report["path_length"], report["displacement"]) == (0, 0)
    assert math.isnan(report["efficiency"])


def test_bfloat16_steps_are_measured_in_float32():
    positions = torch.tensor([[256.0, 1.0], [258.0, 1.0078125], [256.0, 1.0]], dtype=torch.bfloat16)
    report = walk(PathLength(), positions)
    assert report["path_length"] == pytest.approx(2 * math.hypot(2, 0.0078125), rel=1e-7)


def test_report_without_steps_is_empty():
    hook, model = PathLength(), nn.Linear(2, 2)
    hook.compute(epoch_end(model, hook_point=HookPoint.POST_BACKWARD, step=1))
    assert hook.compute(epoch_end(model, step=1))
    assert hook.compute(epoch_end(model, step=1)) == {}


def test_repeated_step_is_measured_once():
    hook, model = PathLength(), nn.Linear(2, 2)
    for step in (1, 2, 2):
        hook.compute(epoch_end(model, hook_point=HookPoint.POST_BACKWARD, step=step))
    assert hook.compute(epoch_end(model, step=2))["steps"] == 2


def test_zero_step_legs_are_refused():
    with pytest.raises(UsageError, match=r"path_length.every is 0; it must be at least 1"):
        PathLength(every=0)


def test_reset_begins_a_new_path():
    hook = PathLength()
    first = walk(hook, torch.tensor([[0.0], [1.0], [3.0]]))
    hook.reset()
    assert walk(hook, torch.tensor([[0.0], [1.0], [3.0]])) == first


def test_restored_path_continues_after_start():
    """The path loaded from a checkpoint is kept if start() is called after load_state_dict()."""
    hook, model = PathLength(), nn.Linear(2, 2)
    hook.start(type("Run", (), {"model": model}))
    hook.compute(epoch_end(model, hook_point=HookPoint.POST_BACKWARD, step=1))
    model.weight.data += 1
    fresh = PathLength()
    fresh.load_state_dict(through_a_file(hook.state_dict()))
    fresh.start(type("Run", (), {"model": model}))
    assert float(fresh.compute(epoch_end(model, step=1))["displacement"]) == 2


@pytest.mark.parametrize("hook", ["path_length", "gradient_flow"])
def test_skipped_steps_are_not_on_the_path(tmp_path, hook):
    """Only steps that were made are on the path; no gain comes of gradients that overflowed."""
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model = nn.Sequential(nn.Sequential(*[block() for _ in range(3)]), nn.Linear(4, 3))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.001), torch.amp.GradScaler("cpu", init_scale=2.0**22)
    rows, lengths, values = torch.randn(24, 4, 4), [], {}
    options = {"path_length": {"every": 1}, "gradient_flow": {"interval": 1}}
    with loopscope.attach(
        model, optimizer, hooks=[hook], hook_options={hook: options[hook]}, scaler=scaler, out=tmp_path,
        display="none", log_every=1,
    ) as scope:  # fmt: skip
        for batch in scope.batches([*rows]):
            with torch.autocast("cpu", torch.float16):
                loss = model(batch).float().square().sum()
            scope.backward(loss)
            before = [parameter.detach().clone() for parameter in model.parameters()]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            values |= scope.last_metrics()
            legs = [after - old for after, old in zip(model.parameters(), before, strict=True)]
            lengths.append(sum(leg.detach().square().sum().item() for leg in legs) ** 0.5)
        scope.epoch_end()
        values |= scope.last_metrics()
    made = [length for length in lengths if length]
    assert 0 < len(made) < len(lengths)
    assert not any(math.isnan(value) for name, value in values.items() if name.startswith("gradient_flow"))
    if hook == "path_length":
        assert values["path_length/steps"] == len(made)
        assert values["path_length/path_per_step"] == pytest.approx(sum(made) / len(made), rel=1e-4)
