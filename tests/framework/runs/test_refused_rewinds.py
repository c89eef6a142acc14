"""``loopscope rewind`` refuses impossible rewinds before training, and announces costs and limits of the others."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loopscope import sinks, training_hooks
from loopscope.checkpoints import run_lock
from loopscope.cli import main

from tests.framework.runs.small_experiment import contents, read_json

FILLED = (sinks, training_hooks)
WORDS = ("run", "small", "--epochs", "3", "--save-checkpoints", "--no-console-output", "--device", "cpu")
pytestmark = [
    pytest.mark.usefixtures("patient_small"),
    pytest.mark.filterwarnings("always::loopscope.errors.RunNotice"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    assert main([*WORDS, "--strategy", "plain", "--seed", "3", "4", "--output-dir", str(folder)]) == 0
    return folder / "small/plain"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of the folder of a run."""
    folder = tmp_path / "small/plain/seed-3"
    shutil.copytree(finished / "seed-3", folder)
    return folder


def change(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    content = read_json(path)
    edit(content)
    path.write_text(json.dumps(content))


def forget(run: Path, *names: str) -> None:
    for name in names:
        shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()


REFUSED = {
    "--step 10": "--step is 10, but the last step of the run in RUN is 9.",
    "--step 4 --until 12": "--until is 12, but the last step of the run in RUN is 9.",
    "--step 4 --until 3": "--until is 3, before --step 4.",
    "--step 0": "--step is 0; steps are counted from 1.",
    "--step 4 --hooks grad_clip": "RUN was trained with other committing hooks: none; now: grad_clip.",
    "--step 4 --hooks nrms": "Unknown hook 'nrms'.",
    "--step 4 --spike": "loopscope rewind needs one of --step N and --spike.",
}


@pytest.mark.some_rows(3)
@pytest.mark.parametrize("words", REFUSED)
def test_invalid_rewind_is_refused_before_training(words, run, capfd):
    """The command prints one line that explains the problem and changes no file."""
    before = contents(run)
    assert main(["rewind", str(run), *words.split()]) == 2
    said = capfd.readouterr().err
    assert REFUSED[words] in said.replace(str(run), "RUN")
    assert said.count("\n") == 1
    assert contents(run) == before


def test_folder_without_single_run_is_refused(run, finished, tmp_path, capfd):
    """The error states whether the folder is missing, contains no run or contains several."""
    for folder, sentence in (
        (tmp_path / "none", "none does not exist; rewind takes the folder of a run"),
        (run / "checkpoints", "checkpoints is not the folder of a run and contains none"),
        (finished, f"has 2 runs; rewind takes one of them: {finished}/seed-3, {finished}/seed-4."),
    ):
        assert main(["rewind", str(folder), "--step", "3"]) == 2
        assert sentence in capfd.readouterr().err


def test_a_run_that_is_still_trained_is_refused(run, capfd):
    with run_lock(run):
        assert main(["rewind", str(run), "--step", "3"]) == 2
    assert f"{run} is still being trained; wait until it has ended." in capfd.readouterr().err


def test_a_run_of_another_device_is_refused(run, capfd):
    change(run / "experiment_config.json", lambda record: record["options"].pop("device"))
    change(run / "experiment_config.json", lambda record: record["environment"].update(device="meta"))
    if not torch.cuda.is_available():
        change(run / "experiment_config.json", lambda record: record["environment"].update(device="cuda:0"))
    assert main(["rewind", str(run), "--step", "3"]) == 2
    said = capfd.readouterr().err
    assert "and other devices give other bits. Device " in said
    assert "cannot be used here. Known: " in said


@pytest.mark.longer
@pytest.mark.parametrize("begins", ["at a checkpoint", "at the start"])
def test_different_torch_build_is_reported(begins, run, capfd):
    """A rewind from the start names both versions, and one from a checkpoint uses the checkpoint's record."""
    change(run / "experiment_config.json", lambda record: record["versions"].update(torch="2.0.0+cu118"))
    if begins == "at the start":
        forget(run, "checkpoints")
        assert main(["rewind", str(run), "--step", "7"]) == 0
        told = f"may differ in the last bits: torch: 2.0.0+cu118 before, {torch.__version__} now."
        assert told in " ".join(capfd.readouterr().out.split())
    else:  # the checkpoint's record has the same version
        assert main(["rewind", str(run), "--step", "7"]) == 0
        assert "last bits" not in capfd.readouterr().out


@pytest.mark.longer
def test_cost_of_full_rewind_is_reported(run, capfd):
    """Without checkpoints and digests, the output also states that nothing can verify the result."""
    change(run / "summary.json", lambda summary: summary.update(seconds={"total": 600.0, "training": 540.0}))
    reason = "There is no checkpoint before step 5 to start from: the run is trained again from its start, 6 steps"
    duration = ", about 6.0 minutes at the speed of the first run."
    warning = " It has no checkpoint or digest up to there"
    for removed, sentence, shown in (
        ("checkpoints", reason + duration, True),
        ("digests.jsonl", reason + duration + warning, False),
        ("summary.json", reason + "." + warning, False),
    ):
        forget(run, removed)
        assert main(["rewind", str(run), "--step", "5"]) == 0
        out = " ".join(capfd.readouterr().out.split())
        assert sentence in out
        assert (warning in out) is not shown
        assert ("The run is identical, bit for bit, at steps 3, 6." in out) is shown
        assert ("could not be compared" in out) is not shown
        assert "Repeated the run from step 0" in out
    assert main(["rewind", str(run), "--step", "10"]) == 2  # even without a summary


@pytest.mark.longer
def test_rewind_reaches_failed_step_but_no_further(run, capfd):
    """The step in which a run failed can be trained again, and a later step is refused."""
    change(run / "summary.json", lambda summary: summary.update(status="failed", steps=7))
    assert main(["rewind", str(run), "--step", "8"]) == 0
    assert main(["rewind", str(run), "--step", "9"]) == 2
    assert "--step is 9, but the last step of the run in" in capfd.readouterr().err


def test_runs_without_checkpoints_compare_by_digests(run, finished, capfd):
    forget(run, "checkpoints")
    assert main(["diff", str(run), str(finished / "seed-3")]) == 0
    assert "Digests of 3 steps: identical." in capfd.readouterr().out
    assert main(["diff", str(run), str(finished / "seed-4")]) == 1
    assert "Digests: parameters/" in capfd.readouterr().out
