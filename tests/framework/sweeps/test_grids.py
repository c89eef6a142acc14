"""``loopscope watch --grid``: points and their folders, refusals, and what is not run twice."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from loopscope.cli import main, watch_grid
from loopscope.errors import UsageError
from loopscope.runs import CONFIG, SUMMARY
from loopscope.sweeps import JobRecord, point_name, points_of

from tests.framework.runs.small_experiment import contents

COMMAND = ["python", "train.py"]


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the words of the started commands, which leave completed records; the command of seed 1 fails."""
    calls = list[list[str]]()

    def run(words: list[str], **options: object) -> SimpleNamespace:
        folder, command = Path(words[words.index("--out") + 1]), words[words.index("--") + 1 :]
        calls.append(words)
        failed = command[-1] == "1" and "--overwrite" not in words
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SUMMARY).write_text('{"status": "failed"}' if failed else '{"status": "completed"}')
        record = '{"experiment": "attached", "strategy": "a", "config": {}, "provenance": {"watch": {"command": %s}}}'
        (folder / CONFIG).write_text(record % str(command).replace("'", '"'))
        return SimpleNamespace(returncode=int(failed))

    monkeypatch.setattr(watch_grid, "subprocess", SimpleNamespace(**vars(subprocess) | {"run": run}))
    monkeypatch.chdir(tmp_path)
    return calls


def test_points_are_the_product_of_the_values() -> None:
    points = points_of(["lr=1e-3,3e-4", "seed=0-2"])
    assert len(points) == 6
    assert point_name(points[5]) == "lr=3e-4,seed=2"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["lr"], "--grid takes NAME=VALUE,VALUE or a range as in seed=0-4, but got 'lr'."),
        (["lr="], "--grid takes NAME=VALUE,VALUE or a range as in seed=0-4, but got 'lr='."),
        (["--lr=1"], "--grid takes NAME=VALUE,VALUE or a range as in seed=0-4, but got '--lr=1'."),
        (["lr=1", "lr=2"], "--grid has lr twice; give all its values in one word: lr=VALUE,VALUE."),
        (["lr=1,2,1"], "--grid lr=1,2,1 has a value twice; remove one of them."),
        (
            ["data=a/b,a_b"],
            "--grid data=a/b,a_b has values that differ only in / and _, whose records would share a folder; rename "
            "one of them.",
        ),
        (["a=0-999", "b=0-99"], "--grid has 100,000 points; it must have at most 10,000."),
    ],
)
def test_bad_grids_are_refused(words: list[str], sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        points_of(words)
    assert str(error.value) == sentence


def test_each_point_appends_its_words(started: list[list[str]], capsys) -> None:
    """Options of watch go to each point; the command that has failed is named, and started again when asked again."""
    words = ["watch", "--log-every", "7", "--out", "sweep", "--grid", "lr=1e-3", "seed=0-1", "--", *COMMAND]
    assert main(words) == 1
    assert [call[:4] for call in started] == [[sys.executable, "-m", "loopscope", "watch"]] * 2
    assert all(call[4:6] == ["--log-every", "7"] for call in started)
    assert [call[-6:] for call in started] == [[*COMMAND, "--lr", "1e-3", "--seed", seed] for seed in "01"]
    printed = capsys.readouterr()
    assert printed.out.splitlines() == ["lr=1e-3,seed=0: completed", "lr=1e-3,seed=1: failed"]
    assert "1 of 2 points did not complete, such as lr=1e-3,seed=1; the same command starts them again" in printed.err
    assert main(words) == 0
    assert len(started) == 3
    assert "--overwrite" in started[2]
    assert main(words) == 0
    assert len(started) == 3


def test_records_of_other_commands_are_kept(started: list[list[str]], capsys) -> None:
    assert main(["watch", "--grid", "seed=0", "--", *COMMAND]) == 0
    assert main(["watch", "--grid", "seed=0", "--", "python", "other.py"]) == 2
    assert (
        "has the record of another command: python train.py --seed 0. Choose another --out" in capsys.readouterr().err
    )
    assert len(started) == 1


@pytest.mark.parametrize(("words", "flag"), [(["--jobs", "2"], "--jobs"), (["--on", "local"], "--on")])
def test_options_of_grids_need_a_grid(words: list[str], flag: str, capsys, tmp_path: Path) -> None:
    assert main(["watch", *words, "--", *COMMAND]) == 2
    assert capsys.readouterr().err == f"loopscope: {flag} is an option of --grid; add --grid NAME=VALUE,VALUE.\n"
    assert contents(tmp_path) == {}


def test_points_in_a_job_are_left_to_it(started: list[list[str]], capsys, tmp_path: Path) -> None:
    """A point whose job still runs is not started a second time, and --overwrite is refused."""
    folder = tmp_path / "loopscope-runs/grid/seed=0"
    folder.mkdir(parents=True)
    JobRecord(str(os.getpid()), "local", socket.gethostname(), sys.orig_argv[-1]).write(folder)
    assert main(["watch", "--grid", "seed=0,2", "--", *COMMAND]) == 1
    assert [call[-1] for call in started] == ["2"]
    capsys.readouterr()
    assert main(["watch", "--overwrite", "--grid", "seed=0", "--", *COMMAND]) == 2
    assert "--overwrite would replace runs whose jobs have not ended" in capsys.readouterr().err
