"""``loopscope diff``: the first step and tensor at which two runs diverge, bit for bit."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loopscope import sinks, training_hooks
from loopscope.checkpoints import checkpoint_folders, differing_entries, open_checkpoint
from loopscope.checkpoints.format import write_checkpoint
from loopscope.cli import main

from tests.framework.checkpoints.killed_sessions import change_file
from tests.framework.runs.small_experiment import Small, registered, session

FILLED = (sinks, training_hooks)
Content = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def entries():
    with registered(Small):
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    session(folder, strategies=["plain"], hooks=["norms"], epochs=3, save_checkpoints=1).run()
    return folder / "small/plain"


@pytest.fixture
def pair(finished: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Return the folders of two equal runs."""
    for name in "ab":
        shutil.copytree(finished, tmp_path / name)
    return tmp_path / "a", tmp_path / "b"


def diff(capfd: Any, *runs: Path) -> tuple[int, str]:
    status = main(["diff", *map(str, runs)])
    output, errors = capfd.readouterr()
    return status, output + errors


def flip_weight(content: Content) -> None:
    content["state"]["parameters"]["0.weight"].view(torch.int32)[3, 2] ^= 1


def flip_optimizer(content: Content) -> None:
    content["state"]["optimizer"]["state"]["0.bias"]["exp_avg_sq"].view(torch.int32)[0] ^= 1


def draw(content: Content) -> None:
    content["state"]["generators"]["torch"][100] ^= 1


def count(content: Content) -> None:
    content["state"]["loop"]["skipped_steps"] += 1


PLANTED: dict[Callable[[Content], None], str] = {
    flip_weight: "parameters/0.weight",
    flip_optimizer: "optimizer/state/0.bias/exp_avg_sq",
    draw: "generators/torch",
    count: "loop/skipped_steps",
}


def plant(run: Path, step: int, change: Callable[[Content], None]) -> None:
    folder = run / f"checkpoints/step_{step:09d}"
    found = open_checkpoint(folder)
    content = found.content()
    change(content)
    write_checkpoint(folder, content, found.manifest)


def test_equal_runs_are_the_same(pair, capfd) -> None:
    status, said = diff(capfd, *pair)
    assert (status, said.splitlines()[-1]) == (0, "The runs are identical.")
    assert all(part in said for part in ("Metrics in JSONL: identical.", "Final weights: identical.", "Checkpoints of"))


@pytest.mark.parametrize("change", PLANTED)
def test_planted_difference_is_found_at_first_step(change, pair, capfd) -> None:
    """The command exits with status 1 and names the first step, its epoch and the first differing part."""
    steps = [open_checkpoint(path).step for path in checkpoint_folders(pair[1] / "checkpoints")]
    for step in steps[: len(steps) - 1]:
        plant(pair[1], step, change)
    first = steps[-2] if len(steps) > 1 else steps[0]
    if len(steps) == 1:
        plant(pair[1], first, change)
    status, said = diff(capfd, *pair)
    assert status == 1
    assert f"The runs differ at step {first} (epoch {first // 3}), first in {PLANTED[change]}." in said


@pytest.mark.longer
def test_one_changed_bit_or_type_is_detected(finished: Path) -> None:
    newest = open_checkpoint(next(checkpoint_folders(finished / "checkpoints")))
    for change, name in PLANTED.items():
        content = newest.content()
        change(content)
        assert differing_entries(newest.content(), content) == [name]
    content = newest.content()
    del content["state"]["parameters"]["0.weight"]
    content["state"]["loop"]["step"] = float(content["state"]["loop"]["step"])
    assert differing_entries(newest.content(), content) == ["parameters/0.weight", "loop/step"]
    assert differing_entries(newest.content(), newest.content()) == []


def test_values_are_compared_bit_for_bit() -> None:
    """NaN equals NaN, while minus zero, another shape or another type counts as a difference."""

    def content(value: Any) -> Content:
        return {"state": {"a": torch.tensor([1.0]), "b": value}}

    nan = torch.tensor([float("nan")])
    assert differing_entries(content(nan), content(nan.clone())) == []
    assert differing_entries(content(float("nan")), content(float("nan"))) == []
    assert differing_entries(content(0.0), content(-0.0)) == ["b"]
    assert differing_entries(content(torch.tensor(0.0)), content(torch.tensor(-0.0))) == ["b"]
    assert differing_entries(content(torch.ones(2, 3)), content(torch.ones(3, 2))) == ["b"]
    assert differing_entries(content(True), content(1)) == ["b"]


@pytest.mark.longer
def test_runs_differing_only_in_hooks_are_equal(pair, tmp_path: Path, capfd) -> None:
    """The diff lists the hooks of both runs and reports that the runs are the same."""
    hooks = ["consecutive", "batch_dynamics", "training_diagnostics"]
    session(tmp_path / "c", strategies=["plain"], hooks=hooks, epochs=3, save_checkpoints=1, sinks=False).run()
    status, said = diff(capfd, pair[0], tmp_path / "c/small/plain")
    assert (status, said.splitlines()[-1]) == (0, "The runs are identical.")
    assert "hooks: norms: {'names': '', 'top': 10, 'bottom': 10, 'write_all': False} / None" in said
    assert "hooks: batch_dynamics: None / {" in said


def test_differing_metric_is_named_with_its_step(pair, capfd) -> None:
    """A difference of 1e-9 in one metric makes the command exit with status 1."""
    lines = (pair[1] / "plain.jsonl").read_text().splitlines()
    row = json.loads(lines[1])
    row["norms/total_weight_norm"] += 1e-9
    lines[1] = json.dumps(row, separators=(",", ":"))
    (pair[1] / "plain.jsonl").write_text("\n".join(lines) + "\n")
    status, said = diff(capfd, *pair)
    assert status == 1
    assert f"The runs differ by step {row['step']}, in the metric norms/total_weight_norm." in said


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda data: data[: data.rindex(b"\n", 0, -1) + 1], "in the number of metrics, line"),
        (lambda data: data[:30], "in the metrics, line 1"),
        (lambda data: b"\xff" + data, "in the metrics, line 1"),
    ],
)
def test_short_or_damaged_log_is_a_difference(change, told: str, pair, capfd) -> None:
    """The message names the line where the metrics log ends early or is unreadable."""
    change_file(pair[1] / "plain.jsonl", change)
    status, said = diff(capfd, *pair)
    assert (status, told in said) == (1, True), said


def test_files_of_one_run_are_named(pair, capfd) -> None:
    """Final weights that only one run still has are not compared, and the conclusion is limited to the rest."""
    next(pair[1].glob("*.pt")).unlink()
    status, said = diff(capfd, *pair)
    assert status == 0
    assert f"Only {pair[0]} has final weights: not compared." in said
    assert said.rstrip().endswith("What both runs have is identical.")


def test_final_weights_that_differ_are_named(pair, capfd) -> None:
    weights = torch.load(pair[1] / "plain_final.pt", weights_only=True)
    weights["4.bias"].view(torch.int32)[1] ^= 1
    torch.save(weights, pair[1] / "plain_final.pt")
    status, said = diff(capfd, *pair)
    assert (status, "The runs differ by the final weights, first in 4.bias." in said) == (1, True)


def test_runs_without_common_content_are_refused(pair, capfd) -> None:
    shutil.rmtree(pair[1] / "checkpoints")
    for name in ("plain.jsonl", "plain_final.pt", "digests.jsonl"):
        (pair[1] / name).unlink()
    status, said = diff(capfd, *pair)
    assert status == 2
    assert "share no checkpoint or digest of the same step, no JSONL and no final weights" in said


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (None, "b is not the folder of a run: it has no experiment_config.json"),
        ("", "b/experiment_config.json cannot be read: it is not JSON"),
        ('{"strategy": ', "b/experiment_config.json cannot be read: it is not JSON"),
        ("[1]", "b/experiment_config.json cannot be read: it is JSON, but not an object."),
        ("{}", "b/experiment_config.json cannot be used: it has no field 'experiment'."),
    ],
)
def test_folder_without_run_is_refused(config: str | None, sentence: str, pair, capfd) -> None:
    path = pair[1] / "experiment_config.json"
    path.unlink() if config is None else path.write_text(config)
    status, said = diff(capfd, *pair)
    assert (status, said.count("\n"), sentence in said) == (2, 1, True), said


def test_damaged_weights_and_checkpoints_are_named(pair, capfd) -> None:
    change_file(pair[1] / "plain_final.pt", lambda data: data[:100])
    status, said = diff(capfd, *pair)
    assert (status, "plain_final.pt cannot be read as weights" in said) == (2, True)
    for path in checkpoint_folders(pair[1] / "checkpoints"):
        change_file(path / "state.pt", lambda data: data[:100])
    status, said = diff(capfd, *pair)
    assert (status, "it is damaged" in said) == (2, True)


@pytest.mark.parametrize("words", [[], ["one"], ["one", "two", "three"]])
def test_two_runs_are_needed(words: list[str], capfd) -> None:
    status, said = diff(capfd, *map(Path, words))
    assert (status, f"takes the folders of two runs, but got {len(words)}" in said) == (2, True)
