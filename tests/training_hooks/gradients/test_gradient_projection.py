import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loopscope.errors import UnsuitableError
from loopscope.hooks import HookPoint, TrainingHook
from loopscope.training_hooks.gradients import GradientProjection
from loopscope.training_hooks.gradients.gradient_projection import descent_metrics, progress_metrics
from loopscope.training_hooks.measures import FlatLayout
from torch import Tensor, nn

from tests.support import Case, assert_same_bytes, build, train
from tests.training_hooks.reloading import reloading

PLACES = st.lists(st.floats(-4, 4, width=32), min_size=6, max_size=6)


def plane(size: int = 2) -> FlatLayout:
    return FlatLayout({"w": nn.Parameter(torch.zeros(size, dtype=torch.float64))})


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def walk(layout: FlatLayout, start: Tensor, current: Tensor, goal: Tensor) -> dict[str, float]:
    return numbers(progress_metrics(layout, current - start, goal - current, goal - start))


def numbers(metrics: dict[str, Tensor]) -> dict[str, float]:
    return {name: value.item() for name, value in metrics.items()}


def test_walk_is_split_along_and_across_the_route():
    """The route leads from the start to the reference in the plane."""
    metrics = walk(plane(), vector(1, 1), vector(3, 2), vector(5, 1))
    assert metrics == pytest.approx(
        {
            "distance": math.sqrt(5),
            "relative_distance": math.sqrt(5) / 4,
            "progress": 0.5,
            "orthogonal": 0.25,
            "displacement_cosine": 2 / math.sqrt(5),
            "parameter_progress/w": 0.5,
        }
    )


def test_descent_direction_points_to_the_reference():
    """The cosine and projection are those of the negative gradient."""
    metrics = numbers(descent_metrics(plane(), vector(-3, -4), vector(2, 0)))
    assert metrics == pytest.approx({"gradient_cosine": 0.6, "gradient_projection": 3.0})
    assert descent_metrics(plane(), vector(3, 4), vector(2, 0))["gradient_cosine"].item() == pytest.approx(-0.6)


@given(PLACES)
def test_remaining_distance_is_a_hypotenuse(places):
    """Its sides are the remaining progress and the orthogonal distance."""
    start, current, reference = vector(*places).view(3, 2)
    metrics = walk(plane(), start, current, reference)
    if torch.dist(start, reference) < 1e-3:
        return
    hypotenuse = math.hypot(1 - metrics["progress"], metrics["orthogonal"])
    assert metrics["relative_distance"] == pytest.approx(hypotenuse, rel=1e-6, abs=1e-6)


def test_each_parameter_has_its_own_progress():
    layout = FlatLayout({name: nn.Parameter(torch.zeros(2, dtype=torch.float64)) for name in "ab"})
    metrics = walk(layout, vector(0, 0, 0, 0), vector(1, 0, 0, 3), vector(2, 0, 0, 4))
    assert metrics["parameter_progress/a"] == pytest.approx(0.5)
    assert metrics["parameter_progress/b"] == pytest.approx(0.75)
    assert metrics["progress"] == pytest.approx((2 + 12) / 20)


class Path(TrainingHook):
    """Keeps the parameters and the mean gradient of every epoch."""

    name = "path"
    hook_points = frozenset({HookPoint.PRE_EPOCH, HookPoint.POST_EPOCH, HookPoint.SNAPSHOT})
    needs_grads = True

    def __init__(self) -> None:
        self.places: list[Tensor] = []
        self.gradients: list[Tensor] = []

    def compute(self, ctx):
        if ctx.hook_point is HookPoint.PRE_EPOCH and not self.places:
            self.places.append(flat({name: value.detach() for name, value in ctx.model.named_parameters()}))
        if ctx.hook_point is HookPoint.POST_EPOCH:
            self.places.append(flat({name: value.detach() for name, value in ctx.model.named_parameters()}))
            self.gradients.append(flat(ctx.accumulated_grads))
        return {}

    def describe_metrics(self):
        return []


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.flatten().double() for value in tensors.values()])


def some_reference(case: Case) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(8)
    return {
        name: value.detach() + torch.randn(value.shape, generator=generator)
        for name, value in build(case)[0].model.named_parameters()
    }


def reported_rows(run) -> list[dict[str, float]]:
    """Return the metrics of the hook, one dict for each visit."""
    rows: dict[int, dict[str, float]] = {}
    for name, _, step, value in run.sink.rows("gradient_projection/"):
        rows.setdefault(step, {})[name.removeprefix("gradient_projection/")] = value
    return [rows[step] for step in sorted(rows)]


def cosine(a: Tensor, b: Tensor) -> float:
    return torch.cosine_similarity(a, b, dim=0).item()


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("case", [Case("transformer"), Case("tied", "sgd_momentum")], ids=str)
def test_run_reports_projections_of_its_path(case):
    path, reference = Path(), some_reference(case)
    run = train(case, [GradientProjection(), path], steps=9, reference_weights=reference)
    goal, start = flat(reference), path.places[0]
    assert len(reported_rows(run)) == 3
    for row, current, gradient in zip(reported_rows(run), path.places[1:], path.gradients, strict=True):
        remaining, route = goal - current, goal - start
        assert row["gradient_cosine"] == pytest.approx(cosine(-gradient, remaining), abs=1e-6)
        assert row["gradient_projection"] == pytest.approx((-gradient @ remaining / remaining.norm()).item(), rel=1e-4)
        assert row["distance"] == pytest.approx(remaining.norm().item(), rel=1e-5)
        assert row["relative_distance"] == pytest.approx((remaining.norm() / route.norm()).item(), rel=1e-5)
        progress = (current - start) @ route / (route @ route)
        assert row["progress"] == pytest.approx(progress.item(), rel=1e-3, abs=1e-6)
        assert row["displacement_cosine"] == pytest.approx(cosine(current - start, route), abs=1e-5)
        orthogonal = (current - start - progress * route).norm() / route.norm()
        assert row["orthogonal"] == pytest.approx(orthogonal.item(), rel=1e-4)


@pytest.mark.longer
def test_run_reaches_its_final_weights_as_reference():
    """The distance is zero and the progress is one at the end."""
    case = Case("tied", "sgd_momentum")
    end = {name: value.detach().clone() for name, value in train(case, steps=12).task.model.named_parameters()}
    rows = reported_rows(train(case, [GradientProjection()], steps=12, reference_weights=end))
    assert rows[-1]["progress"] == pytest.approx(1.0)
    assert rows[-1]["orthogonal"] == pytest.approx(0.0, abs=1e-6)
    assert rows[-1]["distance"] == 0.0
    assert math.isnan(rows[-1]["gradient_cosine"])
    assert rows[0]["gradient_cosine"] > 0


@pytest.mark.longer
@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_run_is_unchanged_and_reported_in_both_loops(loop):
    case = Case("batchnorm_mlp", "adamw_fused", loop)
    run = train(case, [GradientProjection()], steps=6, reference_weights=some_reference(case))
    assert_same_bytes(run, case, 6)
    points = {row[1] for row in run.sink.rows("gradient_projection/progress")}
    assert points == {HookPoint.POST_EPOCH if loop == "epoch" else HookPoint.SNAPSHOT}
    infos = GradientProjection().describe_metrics()
    assert all(any(info.describes(name) for info in infos) for row in reported_rows(run) for name in row)


@pytest.mark.longer
def test_hook_reloaded_at_every_call_reports_the_same():
    """The state is saved to a file and loaded before each call."""
    case = Case("tied")
    options = {"steps": 9, "reference_weights": some_reference(case), "audit": False}
    assert reported_rows(train(case, [reloading(GradientProjection)], **options)) == reported_rows(
        train(case, [GradientProjection()], **options)
    )


def test_reset_hook_repeats_its_first_report():
    hook, case = GradientProjection(), Case("tied")
    first = reported_rows(train(case, [hook], steps=3, reference_weights=some_reference(case)))
    hook.reset()
    assert hook.state_dict() == GradientProjection().state_dict()
    assert reported_rows(train(case, [hook], steps=3, reference_weights=some_reference(case))) == first


def test_missing_reference_is_refused():
    with pytest.raises(UnsuitableError, match="'gradient_projection' needs a reference solution"):
        train(Case("tied"), [GradientProjection()])
