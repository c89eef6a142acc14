"""The experiment of docs/writing-an-experiment.md, unchanged, through the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
from loopscope.sinks import read_jsonl

from tests.docs.markdown import ROOT, Block, blocks
from tests.docs.running import run_block, run_command

PAGE = ROOT / "docs/writing-an-experiment.md"


def the_file() -> Block:
    (block,) = [block for block in blocks(PAGE) if block.file]
    return block


def sample_heading() -> list[str]:
    (sample,) = [block.text for block in blocks(PAGE) if block.language == "text"]
    return sample.splitlines()[0].split()


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Save the experiment of the page in a folder, and change to that folder."""
    monkeypatch.chdir(tmp_path)
    run_block(the_file(), {}, monkeypatch)
    return tmp_path


def summary(folder: Path, strategy: str) -> dict[str, Any]:
    return json.loads((folder / "output/spirals" / strategy / "summary.json").read_text())


def test_documented_experiment_is_short_without_loop_code() -> None:
    """The file on the page has at most 60 lines and never calls backward, step or zero_grad."""
    lines = the_file().text.splitlines()
    assert len(lines) <= 60
    assert not any(word in the_file().text for word in ("backward()", ".step()", "zero_grad", "epoch_loop"))


@pytest.mark.slow
def test_documented_commands_run_with_hooks(saved: Path, monkeypatch, capsys) -> None:
    """The random order reaches the target in fewer epochs than the outward order."""
    commands = [command for block in blocks(PAGE) for command in block.commands()]
    assert [run_command(command, monkeypatch) for command in commands] == [0, 0]
    printed = capsys.readouterr().out
    assert "--points" in printed
    assert sample_heading() in [line.split() for line in printed.splitlines()]
    random, outwards = summary(saved, "random"), summary(saved, "outwards")
    assert random["target_reached"]
    assert random["final"]["val_acc"] >= 0.97
    assert random["epochs"] < outwards["epochs"]
    records = list(read_jsonl(saved / "output/spirals/random/random.jsonl"))
    assert len(records) == random["epochs"]
    assert all(record.metrics["norms/total_grad_norm"] > 0 for record in records)


@pytest.mark.longer
def test_audited_interventions_leave_final_weights_unchanged(saved: Path, monkeypatch) -> None:
    """The weight files of the runs with and without two audited interventions are identical."""
    run = "python spirals.py run spirals --strategy outwards --epochs 2 --points 64 --no-console-output --output-dir"
    hooks = "--hooks counterfactual hessian --audit-hooks"
    assert run_command(f"{run} bare", monkeypatch) == 0
    assert run_command(f"{run} watched {hooks}", monkeypatch) == 0
    weights = [Path(folder, "spirals/outwards/outwards_final.pt").read_bytes() for folder in ("bare", "watched")]
    assert weights[0] == weights[1]


def test_invalid_option_gives_a_short_error(saved: Path, monkeypatch, capsys) -> None:
    assert run_command("python spirals.py run spirals --points 1", monkeypatch) == 2
    assert capsys.readouterr().err == "loopscope: points is 1; it must be at least 2.\n"
    assert not Path("output").exists()
