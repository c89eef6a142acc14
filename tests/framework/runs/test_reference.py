"""Reference solutions: their search, refusals, and notices about references that differ."""

from pathlib import Path

import pytest
import torch
from loopscope import training_hooks
from loopscope.errors import RunNotice, UsageError
from loopscope.hooks import HookPoint, RunInfo, TrainingHook
from loopscope.runs.reference import find_reference, load_reference
from torch import nn

from tests.framework.runs.small_experiment import Small, SmallConfig, read_json, registered, session

assert training_hooks.__all__
seen: list[tuple[str, dict[str, float]]] = []


class Distance(TrainingHook):
    """Measures the distance to an optional reference."""

    name = "distance"
    hook_points = frozenset({HookPoint.POST_EPOCH})
    uses_reference_weights = True

    def start(self, run: RunInfo) -> None:
        self.strategy = run.strategy
        self.reference_at_start = run.reference_weights

    def compute(self, ctx):
        if ctx.reference_weights is None:
            return {}
        assert self.reference_at_start is not None
        far = {name: (value - ctx.model.get_parameter(name)).norm() for name, value in ctx.reference_weights.items()}
        seen.append((self.strategy, {name: float(value) for name, value in far.items()}))
        return {"largest": max(far.values())}

    def describe_metrics(self):
        return []


class NeedsReference(Distance):
    """Measures the distance to a required reference."""

    name = "needs_reference"
    needs_reference_weights = True


@pytest.fixture(autouse=True)
def fresh():
    seen.clear()
    with registered(Distance, NeedsReference):
        yield


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """Run both plain strategies once and return the output directory."""
    folder = tmp_path / "earlier"
    session(folder, strategies=["plain", "other-order"]).run()
    return folder


def run_again(folder: Path, **options) -> list[dict]:
    return session(folder, **{"strategies": ["plain"], "hooks": ["distance"], **options}).run()


@pytest.mark.longer
def test_repeated_run_reaches_its_reference(earlier, tmp_path):
    """The distance to the earlier run is zero at the end."""
    run_again(tmp_path / "again", reference=earlier)
    assert [max(far.values()) == 0 for _, far in seen] == [False, True]


@pytest.mark.longer
def test_folder_has_a_reference_per_strategy(earlier, tmp_path):
    run_again(tmp_path / "again", reference=earlier, strategies=["plain", "other-order"])
    assert [strategy for strategy, far in seen if max(far.values()) == 0] == ["plain", "other-order"]


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("given", ["plain_final.pt", "."])
def test_file_or_run_folder_serves_every_strategy(earlier, tmp_path, given):
    """The config of the run records the path of the weights."""
    file = earlier / "small" / "plain" / "plain_final.pt"
    run_again(tmp_path / "again", reference=file.parent / given, strategies=["plain", "other-order"])
    assert [strategy for strategy, far in seen if max(far.values()) == 0] == ["plain"]
    config = read_json(tmp_path / "again/small/other-order/experiment_config.json")
    assert config["run"]["reference"] == str(file)


@pytest.mark.longer
def test_overwriting_run_measures_against_the_earlier_run(earlier):
    run_again(earlier, overwrite=True)
    assert max(seen[-1][1].values()) == 0


@pytest.mark.longer
def test_earlier_run_of_another_model_is_ignored(earlier):
    """A notice gives the shapes that differ, and the run has no reference."""

    class Wider(Small):
        def build_model(self):
            return nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 2))

    with pytest.warns(RunNotice, match=r"no reference solution: .* belongs to another model; .* 0.weight \(8x4 in"):
        session(earlier, Wider, strategies=["plain"], hooks=["distance"], overwrite=True).run()
    assert seen == []


@pytest.mark.guarantee("hooks-are-independent")
def test_optional_reference_hook_reports_nothing_without_one(tmp_path):
    """A hook receives a reference solution only if it requests one."""
    run_again(tmp_path)
    assert seen == []


def test_hook_without_its_reference_is_refused_by_name(tmp_path):
    """Nothing is written."""
    with pytest.raises(UsageError, match=r"'needs_reference' needs a reference solution.*reference='PATH'"):
        run_again(tmp_path, hooks=["needs_reference"])
    assert [*tmp_path.iterdir()] == []


@pytest.mark.longer
@pytest.mark.filterwarnings("ignore:.*vanishing gradient")  # of the bias before batch normalisation: it is zero
def test_group_omits_hook_that_lacks_its_reference(tmp_path):
    """The summary gives the reason in hooks_left_out."""
    (summary,) = run_again(tmp_path, hooks=["observers"])
    assert "reference" in summary["hooks_left_out"]["needs_reference"]


@pytest.mark.longer
def test_unused_reference_is_refused(earlier, tmp_path):
    """No enabled hook measures against a reference."""
    with pytest.raises(UsageError, match=r"no active hook measures against a reference.*distance"):
        run_again(tmp_path / "again", reference=earlier, hooks=["norms"])


@pytest.mark.longer
def test_differences_from_reference_run_are_named(earlier, tmp_path):
    with pytest.warns(UserWarning, match="lr 0.01 in the reference, 0.02 now"):
        run_again(tmp_path / "again", reference=earlier, lr=0.02)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("nowhere", "nowhere' does not exist"),
        (".", "has no final weights of strategy 'plain': neither it .* contains .*plain/plain_final.pt or small"),
    ],
)
def test_a_place_without_weights_is_refused(tmp_path, given, sentence):
    with pytest.raises(UsageError, match=sentence):
        find_reference(tmp_path / given, [tmp_path / "none"], "small", "plain", 0)


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("given", [".", "small", "small/plain"])
def test_each_seed_uses_the_reference_of_its_seed(tmp_path, given):
    """A missing seed is refused, and the error lists the existing ones."""
    session(tmp_path, strategies=["plain"], seeds=[3, 4]).run()
    run_again(tmp_path / "again", reference=tmp_path / given, seeds=[4, 3])
    assert [max(far.values()) == 0 for _, far in seen] == [False, True, False, True]
    for seed in (3, 4):
        config = read_json(tmp_path / f"again/small/plain/seed-{seed}/experiment_config.json")
        assert config["run"]["reference"] == str(tmp_path / f"small/plain/seed-{seed}/plain_final.pt")
    with pytest.raises(UsageError, match=r"nor seed-5 .* other seeds: .*plain/seed-3, .*plain/seed-4\."):
        run_again(tmp_path / "more", reference=tmp_path / given, seeds=[5])


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            {"weight": torch.zeros(2, 3)},
            r"shapes: weight \(2x3 in the reference, 4x3 in the model\), bias \(missing in the reference",
        ),
        ([1, 2], "belongs to another model"),
        (b"no archive", "is not a file of weights"),
    ],
)
def test_reference_file_of_another_kind_is_refused(tmp_path, content, sentence):
    """The file has other shapes, is not a state dict or is not an archive."""
    file = tmp_path / "weights.pt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(UsageError, match=sentence):
        load_reference(file, nn.Linear(3, 4))


def test_a_reference_takes_the_dtype_of_the_model(tmp_path):
    model = Small(SmallConfig()).build_model()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    weights = load_reference(tmp_path / "weights.pt", model.double()).weights
    assert {value.dtype for value in weights.values()} == {torch.float64}
    assert list(weights) == [name for name, _ in model.named_parameters()]
