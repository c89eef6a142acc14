"""``loopscope doctor FOLDER``: in how many runs a finding occurs, and with which settings it comes."""

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from loopscope.cli import doctor, main
from loopscope.doctor import Diagnosis, Finding
from loopscope.many_runs import IndexedRuns
from loopscope.runs import CONFIG, RunRecord

from tests.docs.markdown import ROOT


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the records of a watched script at two learning rates; the higher one gives NaN in all but one run."""
    for lr in ("1e-3", "3e-3"):
        for seed in range(10):
            folder = tmp_path / f"lr={lr},seed={seed}"
            folder.mkdir()
            command = ["python", "train.py", "--lr", lr, "--seed", str(seed)]
            content = {"experiment": "attached", "strategy": folder.name, "config": {"command": " ".join(command)}}
            content |= {"training": {"learning_rate": float(lr)}, "provenance": {"watch": {"command": command}}}
            (folder / CONFIG).write_text(json.dumps(content))

    def diagnosed(folder: Path, runs: IndexedRuns) -> tuple[Diagnosis, RunRecord]:
        finding = Finding("nonfinite", "critical", 7, "The loss is NaN.", "Lower the learning rate.")
        is_affected = "lr=3e-3" in folder.name and not folder.name.endswith("seed=4")
        return Diagnosis([finding, finding] if is_affected else []), RunRecord.read(folder)

    monkeypatch.setattr(doctor, "_diagnosed", diagnosed)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def test_findings_come_with_their_settings(sweep: Path, capsys) -> None:
    assert main(["doctor", str(sweep), "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Findings over 20 runs; p is that of Fisher's exact test after Holm's correction:"
    assert lines[1] == "  critical: nonfinite in 9 of 20 runs"
    assert lines[2].startswith("    9 of 10 runs with lr = 0.003, 0 of 10 others (p = 0.001; learning_rate divides")


def test_settings_may_divide_the_runs_alone(sweep: Path, capsys) -> None:
    """No other setting divides the runs as the learning rate does."""
    for path in sweep.glob(f"*/{CONFIG}"):
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, "training": {}}))
    assert main(["doctor", str(sweep), "--all"]) == 0
    third = capsys.readouterr().out.splitlines()[2]
    assert third.startswith("    9 of 10 runs with lr = 0.003, 0 of 10 others (p = 0.001)")


def test_groups_fit_the_schema(sweep: Path, capsys) -> None:
    assert main(["doctor", str(sweep), "--json", "--all"]) == 0
    content = json.loads(capsys.readouterr().out)
    schema = json.loads((ROOT / "docs/schemas/commands.json").read_text(encoding="utf-8"))
    Draft202012Validator({**schema, "anyOf": [{"$ref": "#/$defs/doctor"}]}).validate(content)
    (group,) = content["groups"]
    assert (group["id"], group["runs"], group["of"]) == ("nonfinite", 9, 20)
    (setting,) = group["settings"]
    assert (setting["condition"], setting["same_as"]) == ("lr = 0.003", ["learning_rate"])


def test_one_run_has_no_groups(sweep: Path, capsys) -> None:
    assert main(["doctor", str(sweep / "lr=3e-3,seed=0"), "--json"]) == 0
    assert "groups" not in json.loads(capsys.readouterr().out)
