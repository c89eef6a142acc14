"""The subspace of recent gradients against NumPy in float64, and on gradients with a planted subspace."""

import doctest
import math

import numpy as np
import pytest
import torch
from loopscope.engine import HookManager
from loopscope.errors import UnsuitableError, UsageError
from loopscope.hooks import EVERY_STEP, TrainingHook
from loopscope.training_hooks.gradients import SubspaceGradientInfo
from loopscope.training_hooks.gradients import subspace_gradient_info as module
from loopscope.training_hooks.gradients.subspace_gradient_info import dimension_of_share, held_out_share
from torch import nn

from tests.support import LOOPS, MODELS, Case, build, run_info, train
from tests.training_hooks.gradients.gradient_feed import feed, noise

SIZE = 500


def hook(**options) -> TrainingHook:
    return SubspaceGradientInfo(**{"every": 1, **options})


def ratio(rows: np.ndarray) -> float:
    energies = np.linalg.svd(rows, compute_uv=False) ** 2
    return energies.sum() ** 2 / (energies**2).sum()


def expected(rows: torch.Tensor, window: int, top: int) -> dict[str, float]:
    """Compute every metric after the last of these gradients by decompositions in float64."""
    g = rows.double().numpy()
    recent, past, present = g[-window:], g[-window - 1 : -1], g[-1]
    energies = np.linalg.svd(recent, compute_uv=False) ** 2
    metrics = {
        "gradients": len(recent),
        "participation_ratio": ratio(recent),
        "dimension_90": 1 + (energies.cumsum() < 0.9 * energies.sum()).sum(),
    }
    if len(recent) > 2:
        metrics["participation_ratio_centred"] = ratio(recent - recent.mean(axis=0))
    if len(past) >= top:
        inside = np.linalg.svd(past, full_matrices=False)[2][:top] @ present
        metrics |= {"subspace_share": inside @ inside / (present @ present)}
        metrics |= {"subspace_dimension": top, "null_share": top / len(present)}
    return metrics


def in_a_subspace(steps: int, rank: int, size: int = SIZE, seed: int = 0) -> torch.Tensor:
    """Draw gradients that are isotropic within one subspace."""
    return noise(steps, rank, seed=seed) @ torch.linalg.qr(noise(size, rank, seed=1000)).Q.T


def test_reports_match_numpy():
    """Every report equals a NumPy calculation in float64 on the gradients so far."""
    rows = noise(30, SIZE) * torch.linspace(3, 0.5, SIZE) + noise(SIZE, seed=7)
    reports = feed(hook(window=12, top=5), rows)
    assert list(reports) == list(range(2, 31))
    for step, report in reports.items():
        assert report == pytest.approx(expected(rows[:step], 12, 5), rel=1e-4)


@pytest.mark.longer
def test_planted_subspace_is_recovered():
    """Gradients in a subspace of four dimensions have a share of 1 and four dimensions."""
    rows = in_a_subspace(60, 4)
    report = feed(hook(window=59, top=10), rows)[60]
    assert report["subspace_share"] == pytest.approx(1, abs=1e-4)
    assert report["subspace_dimension"] == 4
    assert report["null_share"] == pytest.approx(4 / SIZE)
    assert report["participation_ratio"] == pytest.approx(4, rel=0.1)
    assert report["dimension_90"] == 4


def test_outside_gradient_has_zero_share():
    """A gradient orthogonal to the earlier ones has no share in their subspace."""
    rows = in_a_subspace(21, 4)
    outside = noise(SIZE, seed=5)
    outside -= torch.linalg.pinv(rows[:20], rtol=1e-3) @ (rows[:20] @ outside)
    report = feed(hook(top=4), [*rows[:20], outside])[21]
    assert report["subspace_share"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("share", [0.2, 0.7])
def test_planted_share_is_recovered(share):
    """A gradient partly inside the subspace has the planted share."""
    rows = in_a_subspace(20, 4)
    outside = noise(SIZE, seed=5)
    outside -= torch.linalg.pinv(rows, rtol=1e-3) @ (rows @ outside)
    inside = in_a_subspace(1, 4, seed=9)[0]
    mixed = math.sqrt(share) * inside / inside.norm() + math.sqrt(1 - share) * outside / outside.norm()
    assert feed(hook(top=4), [*rows, mixed])[21]["subspace_share"] == pytest.approx(share, abs=1e-5)


@pytest.mark.longer
def test_isotropic_gradients_have_null_share():
    """The mean share is the null share, and the dimension is close to the window size."""
    reports = feed(hook(window=20, top=10), noise(420, SIZE))
    shares = torch.tensor([report["subspace_share"] for step, report in reports.items() if step > 20])
    null = reports[21]["null_share"]
    assert null == 10 / SIZE
    spread = math.sqrt(2 * null * (1 - null) / (SIZE + 2))  # of a Beta(k/2, (n − k)/2) variable
    assert abs(shares.mean().item() - null) < 4 * spread / math.sqrt(len(shares))
    assert reports[420]["participation_ratio"] == pytest.approx(20 / (1 + 20 / SIZE), rel=0.03)
    assert reports[420]["dimension_90"] >= 17


def test_the_share_is_held_out():
    earlier, present = noise(20, SIZE), noise(SIZE, seed=3)
    gram = torch.cat([earlier, present[None]]).double()
    share, _ = held_out_share(gram @ gram.T, 10, 1e-7)
    with_itself = torch.cat([earlier[1:], present[None], present[None]]).double()
    included_share, _ = held_out_share(with_itself @ with_itself.T, 20, 1e-7)
    assert share.item() < 0.1
    assert included_share.item() == pytest.approx(1)


def test_centered_ratio_ignores_strong_mean():
    """A large common mean hides the noise from every metric except the centered participation ratio."""
    report = feed(hook(), 100 * noise(SIZE, seed=2) + noise(21, SIZE))[21]
    assert report["participation_ratio"] == pytest.approx(1, abs=0.01)
    assert report["participation_ratio_centred"] == pytest.approx(19 / (1 + 19 / SIZE), rel=0.05)
    assert report["dimension_90"] == 1


def test_dimension_of_share_includes_reaching_value():
    """The dimension counts the value that reaches the requested share."""
    values = torch.tensor([5.0, 3.0, 1.0, 1.0])
    dimensions = [dimension_of_share(values, share).item() for share in (0.5, 0.51, 0.8, 0.85, 0.95, 1.0)]
    assert dimensions == [1, 2, 2, 3, 4, 4]


def test_projected_gradients_keep_their_subspace():
    """The null share is that of the sketch, and the planted dimension is recovered."""
    rows = in_a_subspace(21, 4, size=20_000)
    report = feed(hook(top=10, projection=4096), [*rows[:20], noise(20_000)])[21]
    assert report["null_share"] == 4 / 4096
    assert report["subspace_dimension"] == 4
    assert report["subspace_share"] < 4 * report["null_share"]
    inside = feed(hook(top=10, projection=4096), rows)[21]
    assert inside["subspace_share"] == pytest.approx(1, abs=1e-4)


def test_gradient_is_taken_every_hundred_steps():
    rows = noise(301, SIZE)
    reports = feed(SubspaceGradientInfo(), rows)
    assert list(reports) == [101, 201, 301]
    assert reports[301] == pytest.approx(expected(rows[[0, 100, 200, 300]], 20, 10), rel=1e-4)


@pytest.mark.longer
def test_a_resumed_hook_reports_the_same_numbers():
    rows = noise(40, SIZE)
    first, second = hook(), hook()
    reports = feed(first, rows[:25])
    second.load_state_dict(first.state_dict())
    assert reports | feed(second, rows[25:], first=26) == feed(hook(), rows)


def test_reset_forgets_the_gradients():
    one = hook()
    feed(one, noise(5, SIZE))
    one.reset()
    assert one.state_dict()["rows"] is None
    assert feed(one, noise(1, SIZE)) == {}


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("model", MODELS)
def test_run_reports_gradients_of_its_steps(model, loop):
    """The metrics of a real run are within their bounds."""
    rows = train(Case(model, loop=loop), [hook()], steps=24, audit=False).sink.rows("subspace_gradient_info/")
    last = {name.partition("/")[2]: value for name, _, step, value in rows if step == 24}
    assert last["gradients"] == 20
    assert last["null_share"] < last["subspace_share"] <= 1 + 1e-6
    assert 1 <= last["participation_ratio"] <= 20


def test_non_finite_or_zero_gradients_give_nan():
    """The hook raises no error."""
    rows = noise(12, SIZE)
    rows[-2, 0] = math.nan
    report = feed(hook(), rows)[12]
    names = ("subspace_share", "null_share", "participation_ratio", "participation_ratio_centred", "dimension_90")
    assert all(math.isnan(report[name]) for name in names)
    nothing = feed(hook(), torch.zeros(12, SIZE))[12]
    assert all(math.isnan(nothing[name]) for name in names if name != "null_share")
    assert nothing["subspace_dimension"] == nothing["null_share"] == 0


def test_every_reported_name_is_described():
    infos = hook().describe_metrics()
    assert set(feed(hook(), noise(12, SIZE))[12]) == {info.name for info in infos}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top": 0}, "top is 0 and window is 20"),
        ({"top": 21}, "top is 21 and window is 20"),
        ({"top": 1, "window": 1}, "top is 1 and window is 1"),
        ({"every": 0}, "every_n_steps is 0"),
        ({"projection": 100}, "subspace_gradient_info.projection is 100"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        hook(**options)


def started(one: TrainingHook, steps: int, model: nn.Module | None = None) -> None:
    task, state = build(Case(loop="step"), steps=steps)
    task.model = model or task.model
    one.start(run_info(task, HookManager([one], task, state, loop="step"), "step"))


def test_run_with_too_few_gradients_is_refused():
    """The run must provide at least two gradients."""
    started(SubspaceGradientInfo(), 101)
    with pytest.raises(UnsuitableError, match=r"'subspace_gradient_info' .* fewer than two of the 100 steps"):
        started(SubspaceGradientInfo(), 100)
    dense = SubspaceGradientInfo()
    dense.step_schedule = EVERY_STEP
    started(dense, 2)


def test_unsuitable_model_size_is_refused():
    """The model must be larger than the subspace and fit the memory limit."""
    with pytest.raises(UnsuitableError, match=r"more than 10 trainable elements, .* this model has 10"):
        started(hook(), 100, nn.Linear(10, 1, bias=False))
    started(hook(), 100, nn.Linear(11, 1, bias=False))
    with pytest.raises(UnsuitableError, match="keeps 21 gradients, which take 21 MiB"):
        started(hook(memory=20), 100, nn.Linear(2**18, 1, bias=False))


def test_examples_are_right():
    outcome = doctest.testmod(module)
    assert outcome.attempted
    assert not outcome.failed
