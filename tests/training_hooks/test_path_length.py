"""The path of the parameters against brute force in float64, and paths whose shape is known."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from framework.digest import described
from framework.hook_points import HookPoint
from framework.hooks import TrainingHook
from tests.support import LOOPS, MODELS, Case, SpyHook, assert_same_bytes, at, train
from tests.training_hooks.epoch_end import epoch_end
from tests.training_hooks.reloading import reloading, through_a_file
from training_hooks import path_length
from training_hooks.path_length import PathLength, sums_over, turns

REPORT = {"epoch": HookPoint.POST_EPOCH, "step": HookPoint.SNAPSHOT}


class PositionLog(at(SpyHook, HookPoint.PRE_STEP, HookPoint.POST_STEP, *REPORT.values())):
    """Keeps the trained parameters in float64 before the first step and after every one, and where reports fall."""

    def __init__(self, loop: str) -> None:
        super().__init__()
        self.loop, self.positions, self.reports = loop, [], []

    def compute(self, ctx):
        if ctx.hook_point is REPORT[self.loop]:
            self.reports.append(len(self.positions) - 1)
        elif ctx.hook_point is HookPoint.POST_STEP or not self.positions:
            self.positions.append(torch.cat([p.detach().double().flatten() for p in ctx.model.parameters()]))
        return {}


def expected(positions: list[torch.Tensor], begin: int, end: int) -> dict[str, float]:
    """Compute the report at ``end`` of the interval from ``begin``."""
    steps = [b - a for a, b in pairwise(positions)][:end]
    lengths = [float(step.norm()) for step in steps]
    cosines = [float(steps[t] @ steps[t - 1]) / (lengths[t] * lengths[t - 1]) for t in range(max(begin, 1), end)]
    path, displacement = math.fsum(lengths), float((positions[end] - positions[0]).norm())
    part, moved = math.fsum(lengths[begin:end]), float((positions[end] - positions[begin]).norm())
    return {
        "path_length": path,
        "displacement": displacement,
        "efficiency": displacement / path,
        "steps": end,
        "interval_path": part,
        "interval_displacement": moved,
        "interval_efficiency": moved / part,
        "mean_step": part / (end - begin),
        "turn_cosine": sum(cosines) / len(cosines),
        "turn_angle": sum(map(math.acos, cosines)) / len(cosines),
    }


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("loop", LOOPS)
def test_reports_are_those_of_the_positions_after_every_step(loop, model, monkeypatch):
    monkeypatch.setattr(path_length, "FOLD", 2)
    log = PositionLog(loop)
    run = train(Case(model, loop=loop), [PathLength(), log], steps=8, snapshot_every=3, scheduler=None)
    reports = [metrics for metrics, _, point, _ in run.sink.emitted if point is REPORT[loop]]
    assert len(reports) == len(log.reports) == 3
    for report, begin, end in zip(reports, [0, *log.reports], log.reports, strict=False):
        wanted = {f"path_length/{name}": value for name, value in expected(log.positions, begin, end).items()}
        assert report == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("case", [Case(loop=loop) for loop in LOOPS], ids=str)
def test_a_hook_resumed_at_every_fire_reports_the_same_numbers(case, monkeypatch):
    monkeypatch.setattr(path_length, "FOLD", 2)
    whole = train(case, [PathLength(per_step=True)], steps=8)
    parts = train(case, [reloading(PathLength, per_step=True)], steps=8)
    assert described(parts.sink.rows("path_length/")) == described(whole.sink.rows("path_length/"))
    assert_same_bytes(parts, case, 8)


def walk(hook: TrainingHook, positions: torch.Tensor) -> dict[str, float]:
    """Lead a parameter through positions, shape (steps + 1, elements), and return the report as numbers."""
    model = nn.Module()
    model.place = nn.Parameter(positions[0].clone())
    hook.compute(epoch_end(model))
    for position in positions[1:]:
        model.place.data.copy_(position)
        hook.compute(epoch_end(model, hook_point=HookPoint.POST_STEP))
    return {name: float(value) for name, value in hook.compute(epoch_end(model)).items()}


def test_a_straight_line_is_fully_efficient_and_never_turns():
    report = walk(PathLength(), torch.arange(5.0)[:, None] * torch.tensor([3.0, 4.0]))
    assert report["path_length"] == report["displacement"] == report["interval_path"] == 20
    assert report["efficiency"] == report["interval_efficiency"] == report["turn_cosine"] == 1
    assert (report["turn_angle"], report["mean_step"], report["steps"]) == (0, 5, 4)


def test_going_back_and_forth_leads_nowhere():
    report = walk(PathLength(), torch.tensor([[0.0], [1.0], [0.0], [1.0], [0.0]]))
    assert (report["path_length"], report["displacement"], report["efficiency"]) == (4, 0, 0)
    assert report["turn_cosine"] == -1
    assert report["turn_angle"] == pytest.approx(math.pi)


def test_a_square_turns_by_a_right_angle_at_each_corner():
    corners = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    report = walk(PathLength(), corners)
    assert (report["path_length"], report["displacement"], report["turn_cosine"]) == (3, 1, 0)
    assert report["turn_angle"] == pytest.approx(math.pi / 2)


def test_a_random_walk_has_the_efficiency_of_the_inverse_root_of_its_steps():
    positions = torch.randn(101, 4000, generator=torch.Generator().manual_seed(1)).cumsum(dim=0)
    report = walk(PathLength(), positions)
    assert report["efficiency"] == pytest.approx(1 / math.sqrt(report["steps"]), rel=0.05)
    assert abs(report["turn_cosine"]) < 0.01


def test_standing_still_has_no_efficiency_and_no_turn():
    report = walk(PathLength(), torch.ones(3, 2))
    assert (report["path_length"], report["displacement"]) == (0, 0)
    assert all(math.isnan(report[name]) for name in ("efficiency", "turn_cosine", "turn_angle"))


def test_a_turn_beside_a_step_of_length_zero_is_not_counted():
    report = walk(PathLength(), torch.tensor([[0.0], [1.0], [1.0], [2.0], [1.0]]))
    assert report["turn_cosine"] == -1


def test_one_step_has_no_turn():
    assert "turn_cosine" not in walk(PathLength(), torch.tensor([[0.0], [1.0]]))


def test_bfloat16_steps_are_measured_in_float32():
    positions = torch.tensor([[256.0, 1.0], [258.0, 1.0078125], [256.0, 1.0]], dtype=torch.bfloat16)
    report = walk(PathLength(), positions)
    assert report["path_length"] == pytest.approx(2 * math.hypot(2, 0.0078125), rel=1e-7)


def test_after_a_report_without_steps_there_is_nothing_to_report():
    hook, model = PathLength(), nn.Linear(2, 2)
    assert hook.compute(epoch_end(model)) == {}
    hook.compute(epoch_end(model, hook_point=HookPoint.POST_STEP))
    assert hook.compute(epoch_end(model))
    assert hook.compute(epoch_end(model)) == {}


def test_the_steps_are_reported_only_when_asked_for():
    silent, speaking = (train(Case(), [PathLength(per_step=asked)]) for asked in (False, True))
    assert {row[1] for row in silent.sink.rows("path_length/")} == {HookPoint.POST_EPOCH}
    lengths = [row[3] for row in speaking.sink.rows("path_length/step_length")]
    (path,) = [row[3] for row in speaking.sink.rows("path_length/path_length")]
    assert len(lengths) == 3
    assert math.fsum(lengths) == pytest.approx(path, rel=1e-6)
    assert [row[2] for row in speaking.sink.rows("path_length/step_cosine")] == [2, 3]


def test_reset_begins_a_new_path():
    hook = PathLength()
    first = walk(hook, torch.tensor([[0.0], [1.0], [3.0]]))
    hook.reset()
    assert walk(hook, torch.tensor([[0.0], [1.0], [3.0]])) == first


def test_a_path_taken_from_a_checkpoint_goes_on_whether_start_comes_after_or_before():
    hook, model = PathLength(), nn.Linear(2, 2)
    hook.start(type("Run", (), {"model": model}))
    model.weight.data += 1
    hook.compute(epoch_end(model, hook_point=HookPoint.POST_STEP))
    fresh = PathLength()
    fresh.load_state_dict(through_a_file(hook.state_dict()))
    fresh.start(type("Run", (), {"model": model}))
    assert float(fresh.compute(epoch_end(model))["displacement"]) == 2


def test_the_sums_leave_out_the_length_that_was_counted_before():
    lengths, products = torch.tensor([3.0, 1.0, 2.0]).double(), torch.tensor([3.0, 0.0]).double()
    assert sums_over(lengths, products, first=0)[0] == 6
    assert sums_over(lengths, products, first=1).tolist() == pytest.approx([3, 1, math.pi / 2, 2])
    assert turns(lengths, products).tolist() == [1, 0]
