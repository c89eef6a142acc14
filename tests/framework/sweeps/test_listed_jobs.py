"""``loopscope ls`` with jobs: runs that have not begun, identifiers and states, and ``--watch``."""

import json
import socket
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from loopscope import experiments, sinks, training_hooks
from loopscope.cli import job_listing, main
from loopscope.sweeps import JobRecord

from tests.docs.markdown import ROOT
from tests.framework.runs.small_experiment import Small, registered

assert experiments.__all__
assert sinks.__all__
assert training_hooks.__all__


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with two completed runs, and two that have not begun; the queue empties after a look."""
    with registered(Small):
        words = ["--strategy", "plain", "--seeds", "0-0", "1", "--epochs", "1", "--no-console-output"]
        assert main(["run", "small", *words, "--output-dir", str(tmp_path)]) == 0
    for task in (1, 2, 3):
        path = tmp_path / f"small/plain/seed-{task}"
        path.mkdir(exist_ok=True)
        JobRecord(f"7_{task}", "slurm", socket.gethostname(), str(tmp_path / "logs")).write(path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    queue = [{"7_2": "PENDING"}, {}]
    monkeypatch.setattr("loopscope.sweeps.job_records._queue", lambda: queue.pop(0) if len(queue) > 1 else queue[0])
    return Path("small")


def test_runs_that_have_not_begun_are_listed(folder: Path, capsys) -> None:
    assert main(["ls", str(folder)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:3] == ["run", "state", "job"]
    assert lines[1][:2] == ["small/plain/seed-0", "completed"]
    assert lines[2][:3] == ["small/plain/seed-1", "completed", "7_1"]
    assert lines[3] == ["small/plain/seed-2", "job", "pending", "7_2"]
    assert lines[4][:6] == ["small/plain/seed-3", "job", "ended", "7_3", "no", "run"]
    assert lines[4][-1].endswith("logs/7_3_0_log.err")


def test_jobs_are_in_the_json(folder: Path, capsys) -> None:
    assert main(["ls", str(folder), "--json", "--all"]) == 0
    content = json.loads(capsys.readouterr().out)
    schema = json.loads((ROOT / "docs/schemas/commands.json").read_text(encoding="utf-8"))
    Draft202012Validator({**schema, "anyOf": [{"$ref": "#/$defs/ls"}]}).validate(content)
    jobs = {run["run"]: run.get("job") for run in content["runs"]}
    assert jobs["small/plain/seed-0"] is None
    assert jobs["small/plain/seed-2"] == {"id": "7_2", "state": "pending"}


def test_watching_ends_with_the_last_job(folder: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(job_listing, "INTERVAL", 0.0)
    assert main(["ls", str(folder), "--watch"]) == 0
    lines = [line.split()[1:3] for line in capsys.readouterr().out.splitlines() if "seed-2" in line]
    assert lines == [["job", "pending"], ["job", "ended"]]


def test_watching_writes_no_json(folder: Path, capsys) -> None:
    assert main(["ls", str(folder), "--watch", "--json"]) == 2
    assert "--watch shows text; remove --json" in capsys.readouterr().err
