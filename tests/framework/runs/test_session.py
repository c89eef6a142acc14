"""Sessions: strategies in turn, hooks shared between them, and refusals before the first step."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from loopscope import training_hooks
from loopscope.errors import HookError, RunNotice, UsageError
from loopscope.hooks import HookPoint, HookRegistry, MetricInfo, TrainingHook
from loopscope.hooks.selection import bulk_hooks
from loopscope.runs import check_device
from loopscope.runs.task_building import build_run, chosen_strategies
from loopscope.sinks import read_jsonl

from tests.framework.runs.small_experiment import (
    Small,
    SmallConfig,
    SmallSteps,
    contents,
    read_json,
    registered,
    session,
)
from tests.support.processes import own_process

assert training_hooks.__all__
lives: list[tuple[str, Any]] = []


class Diary(TrainingHook):
    """Records the calls of its methods."""

    name = "diary"
    hook_points = {HookPoint.POST_EPOCH}

    def __init__(self, *, width: int = 1, label: str = "") -> None:
        self.width = width
        self.fires = 0
        lives.append(("made", width))

    def start(self, run: Any) -> None:
        lives.append(("start", run.strategy))

    def compute(self, ctx: Any) -> dict[str, float]:
        self.fires += 1
        return {"fires": self.fires}

    def end(self, status: str) -> None:
        lives.append(("end", status))

    def reset(self) -> None:
        self.fires = 0
        lives.append(("reset", self.width))

    def describe_metrics(self) -> list[Any]:
        return []


class PerStrategy(Small):
    """An experiment whose strategies have the diary as a hook."""

    name = "per_strategy"
    strategies = ("plain", "other-order", "clipped")

    def strategy_hooks(self, strategy: str) -> Mapping[str, Mapping[str, Any]]:
        return {"plain": {"diary": {"width": 2, "label": "own"}}, "clipped": {"grad_clip": {}}}.get(strategy, {})


@pytest.fixture(autouse=True)
def diary():
    lives.clear()
    with registered(Diary):
        yield


# Hooks and strategies


class Watched(Small):
    """An experiment that chooses the hooks of its minimal group, which is its default."""

    name = "watched"
    minimal_hooks = ("training_metrics", "norms")
    default_group = "minimal"


@pytest.mark.parametrize(
    ("group", "sinks", "active"),
    [
        (None, True, {"training_metrics", "norms"}),
        ("none", True, {"training_metrics"}),
        ("none", False, set()),
        (None, False, {"training_metrics", "norms"}),
    ],
)
def test_experiment_chooses_its_default_hooks(tmp_path: Path, group, sinks: bool, active: set[str]) -> None:
    with registered(Watched):
        session(tmp_path, Watched, sinks=sinks, strategies=["plain"], epochs=1, with_hooks=group).run()
    config = read_json(tmp_path / "watched/plain/experiment_config.json")
    assert config["hooks"].keys() == active


@pytest.mark.longer
@pytest.mark.filterwarnings("ignore:.*vanishing gradient")  # of the bias before batch normalisation: it is zero
def test_unsuitable_hook_of_group_is_left_out(tmp_path: Path) -> None:
    """The summary gives the reason."""
    with pytest.warns(UserWarning, match="Left out: Hook 'fourier'.*no nn.Embedding"):
        (summary,) = session(tmp_path, strategies=["plain"], with_hooks="observers").run()
    left_out = summary["hooks_left_out"]
    assert "no nn.Embedding" in left_out["fourier"]
    header = (tmp_path / "small" / "plain" / "plain.csv").read_text().splitlines()[0]
    assert "norms/" in header
    assert "fourier/" not in header


class Fragile(TrainingHook):
    """Raises at its n-th SNAPSHOT."""

    name = "fragile"
    hook_points = {HookPoint.SNAPSHOT}

    def __init__(self, *, at: int = 1) -> None:
        self.left = at

    def compute(self, ctx: Any) -> dict[str, float]:
        self.left -= 1
        if not self.left:
            raise ValueError("cannot read this model" + "!" * 500)
        return {"left": float(self.left)}

    def describe_metrics(self) -> list[MetricInfo]:
        return [MetricInfo("left", "n", "n", "n")]


@pytest.mark.longer
@pytest.mark.filterwarnings("ignore:.*vanishing gradient")
@pytest.mark.parametrize(("at", "step"), [(1, 3), (2, 6)])
def test_failing_hook_of_group_is_left_out(tmp_path: Path, at: int, step: int) -> None:
    """It is left out at its first snapshot and at a later one, and the reason has at most 300 characters."""
    options = {"fragile": {"at": at}}
    said = f"Left out: Hook 'fragile' raised at SNAPSHOT of step {step}:"
    with registered(Fragile), pytest.warns(RunNotice, match=said):
        (summary,) = session(tmp_path, strategies=["plain"], with_hooks="observers", hook_options=options).run()
    assert summary["status"] == "completed"
    told = summary["hooks_left_out"]["fragile"]
    assert told.startswith(f"Hook 'fragile' raised at SNAPSHOT of step {step}: ValueError: cannot read this model!")
    assert len(told) <= 300


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.guarantee("errors-are-contained")
@pytest.mark.filterwarnings("ignore:.*vanishing gradient")
@pytest.mark.parametrize(
    "chosen",
    [
        {"hooks": ["fragile"]},
        {"with_hooks": "observers", "hooks": ["fragile"]},
        {"with_hooks": "observers", "hooks": ["fragile"], "hook_options": {"fragile": {"at": 2}}},
    ],
)
def test_named_hook_ends_run_on_error(tmp_path: Path, chosen: dict) -> None:
    """The hook was enabled by name, alone or in addition to a group."""
    with registered(Fragile), pytest.raises(HookError, match="'fragile' raised at SNAPSHOT"):
        session(tmp_path, strategies=["plain"], **chosen).run()


def test_named_unsuitable_hook_is_refused(tmp_path: Path) -> None:
    """Nothing is written."""
    with pytest.raises(UsageError, match=r"no nn.Embedding"):
        session(tmp_path, strategies=["plain"], with_hooks="minimal", hooks=["norms", "fourier"]).run()
    assert not contents(tmp_path)


@pytest.mark.longer
def test_shared_hook_is_reset_between_strategies(tmp_path: Path) -> None:
    session(tmp_path, strategies=["plain", "other-order"], hooks=["diary"]).run()
    assert lives == [
        *[("made", 1), ("start", "plain"), ("end", "completed")],
        *[("reset", 1), ("start", "other-order"), ("end", "completed")],
    ]
    records = read_jsonl(tmp_path / "small/other-order/other-order.jsonl")
    assert [record.metrics["diary/fires"] for record in records] == [1, 2]


@pytest.mark.longer
def test_strategy_with_other_options_gets_its_own_hook(tmp_path: Path) -> None:
    strategies = ["plain", "other-order"]
    session(tmp_path, PerStrategy, strategies=strategies, hooks=["diary"]).run()
    assert [value for event, value in lives if event == "made"] == [2, 1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*vanishing gradient")
@pytest.mark.parametrize("group", ["observers", pytest.param("full", marks=pytest.mark.slow)])
@own_process
def test_hooks_report_the_same_in_second_strategy(group: str, tmp_path: Path) -> None:
    """The record of the second strategy equals that of a session with this strategy alone."""
    options: dict[str, Any] = {"with_hooks": group, "epochs": 45, "reference": tmp_path / "first"}
    session(tmp_path / "first", strategies=["plain", "other-order"]).run()
    *_, summary = session(tmp_path / "both", strategies=["plain", "other-order"], **options).run()
    session(tmp_path / "alone", strategies=["other-order"], **options).run()
    both, alone = ((tmp_path / name / "small/other-order/other-order.jsonl").read_text() for name in ("both", "alone"))
    assert both == alone
    measuring = {*bulk_hooks("all" if group == "full" else group)} - {"diary", *summary["hooks_left_out"]}
    assert len(measuring) > 10
    assert all(f'"{hook}/' in alone for hook in measuring)


def test_user_options_override_strategy_options_individually(tmp_path: Path) -> None:
    options = {"diary": {"width": 3}}
    session(tmp_path, PerStrategy, strategies=["plain"], hook_options=options).run()
    config = read_json(tmp_path / "per_strategy/plain/experiment_config.json")
    assert config["hooks"]["diary"] == {"width": 3, "label": "own"}


@pytest.mark.longer
def test_options_of_a_single_strategy_hook_are_accepted(tmp_path: Path) -> None:
    """The hook is enabled in only one of the strategies."""
    session(tmp_path, PerStrategy, strategies=["plain", "other-order"], hook_options={"diary": {"width": 3}}).run()
    assert lives[0] == ("made", 3)


@pytest.mark.longer
def test_committing_hook_is_a_treatment_of_its_strategy(tmp_path: Path) -> None:
    """Summary and config of the other strategy list no treatment."""
    summaries = session(tmp_path, strategies=["plain", "clipped"]).run()
    assert [summary["treatments"] for summary in summaries] == [{}, {"grad_clip": ("gradients",)}]
    config = read_json(tmp_path / "small/clipped/experiment_config.json")
    assert config["treatments"] == {"grad_clip": ["gradients"]}
    assert config["hooks"]["grad_clip"]["max_norm"] == 0.5


def test_strategies_start_from_the_same_weights() -> None:
    """Earlier random draws have no effect."""
    runner = Small(SmallConfig())
    first = [value.clone() for value in build_run(runner, "plain")[0].model.parameters()]
    torch.rand(3)
    second = build_run(runner, "other-order")[0].model.parameters()
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_second_strategy_equals_its_run_alone(tmp_path: Path) -> None:
    session(tmp_path / "both", strategies=["plain", "other-order"], sinks=False).run()
    session(tmp_path / "alone", strategies=["other-order"], sinks=False).run()
    weights = "small/other-order/other-order_final.pt"
    assert (tmp_path / "both" / weights).read_bytes() == (tmp_path / "alone" / weights).read_bytes()


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ([], ["plain", "other-order", "clipped"]),
        (["all"], ["plain", "other-order", "clipped"]),
        (["clipped", "all"], ["clipped", "plain", "other-order"]),
        (["other_order", "plain", "other-order"], ["other-order", "plain"]),
    ],
)
def test_strategies_run_once_in_requested_order(wanted: list[str], expected: list[str]) -> None:
    """The value all adds the remaining strategies, and underscores equal hyphens."""
    assert chosen_strategies(Small(SmallConfig()), wanted) == expected


# Refusals


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategies": ["plane"]}, "Did you mean 'plain'"),
        ({"hooks": ["norm"]}, "Did you mean 'norms'"),
        ({"with_hooks": "nothing"}, "Unknown group 'nothing'"),
        ({"hook_options": {"norms": {}}}, "Hook 'norms' has options, but is not enabled"),
        ({"hooks": ["diary"], "hook_options": {"diary": {"with": 1}}}, "Did you mean 'width'"),
        ({"guardian_device": "gpu"}, "Device 'gpu' cannot be used here"),
    ],
)
def test_invalid_options_are_refused_before_writing(options: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        session(tmp_path, **options).run()
    assert contents(tmp_path) == {}


def test_hook_raising_at_start_leaves_nothing(tmp_path: Path) -> None:
    """Hooks that started before it are ended with the status failed."""

    class Faulty(Diary):
        name = "faulty"

        def start(self, run: Any) -> None:
            raise ZeroDivisionError("as told")

    with registered(Faulty), pytest.raises(HookError, match="'faulty' raised at start of step 0: ZeroDivisionError"):
        session(tmp_path, strategies=["plain"], hooks=["diary", "faulty"]).run()
    assert contents(tmp_path) == {}
    assert lives[2:] == [("start", "plain"), ("end", "failed")]


def test_hook_can_write_into_its_folder_at_start(tmp_path: Path) -> None:
    class Writer(Diary):
        name = "writer"

        def start(self, run: Any) -> None:
            (run.output_dir / "notes.txt").write_text("begun")

    with registered(Writer):
        session(tmp_path, strategies=["plain"], hooks=["writer"]).run()
    assert (tmp_path / "small/plain/notes.txt").read_text() == "begun"


def test_refused_run_keeps_files_written_by_hooks(tmp_path: Path) -> None:
    """All other files of the run are removed."""

    class Writer(Diary):
        name = "writer"

        def start(self, run: Any) -> None:
            (run.output_dir / "notes.txt").write_text("begun")
            raise UsageError("No.")

    with registered(Writer), pytest.raises(UsageError):
        session(tmp_path, strategies=["plain"], hooks=["writer"]).run()
    assert [name for name, content in contents(tmp_path).items() if content != b"a folder"] == ["small/plain/notes.txt"]


@pytest.mark.parametrize("name", ["gpu", "meta", "cpu:x", "cuda:99"])
def test_unusable_device_is_refused(name: str) -> None:
    """The error lists the usable devices."""
    with pytest.raises(UsageError, match=rf"Device '{name}' cannot be used here\. Known: .*cpu"):
        check_device(name)


def test_default_device_is_the_accelerator_or_cpu() -> None:
    assert check_device(None).type == (
        torch.zeros(1, device="cuda").device.type if torch.cuda.is_available() else "cpu"
    )
    assert check_device("cpu") == torch.device("cpu")


def test_missing_accelerator_is_not_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default Linux wheel of torch reports CUDA on a machine without a GPU."""

    def built_for_cuda(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", built_for_cuda)
    assert check_device(None) == torch.device("cpu")
    with pytest.raises(UsageError, match=r"Known: cpu\."):
        check_device("cuda:99")


@pytest.mark.longer
def test_both_loops_run_in_a_session(tmp_path: Path) -> None:
    (epoch,) = session(tmp_path, strategies=["plain"]).run()
    (step,) = session(tmp_path, SmallSteps, eval_every=2).run()
    assert epoch["steps"] == step["steps"] == 6
    assert "diary" in HookRegistry.names()


class Talking(Small):
    """An experiment that describes its data, samples its model, and compares metrics, one of an inactive hook."""

    name = "talking"
    compared_metrics = ("norms/total_weight_norm", "parameter_delta/total_relative_delta")

    def describe_data(self) -> dict[str, Any]:
        return {"source": "noise"}

    def sample(self, model: torch.nn.Module) -> str:
        torch.rand(3)
        return f"trains: {model.training}, follows gradients: {torch.is_grad_enabled()}"


def test_experiment_describes_data_and_samples_its_model(tmp_path: Path) -> None:
    """The sample is taken in evaluation mode without gradients."""
    with registered(Talking):
        (summary,) = session(tmp_path, Talking, strategies=["plain"], epochs=1, hooks=["norms"]).run()
    config = read_json(tmp_path / "talking/plain/experiment_config.json")
    assert config["data"] == {"source": "noise"}
    assert summary["sample"] == "trains: False, follows gradients: False"
    assert summary["metrics"].keys() == {"norms/total_weight_norm"}
