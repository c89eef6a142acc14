"""``loopscope doctor --test``: effects as JSON, and a run that resumes as without it."""

import json
from pathlib import Path

import pytest
import torch
from loopscope import training_hooks
from loopscope.cli import main
from loopscope.hooks import ALERTS
from torch import nn

from tests.framework.runs.small_experiment import SmallSteps, contents, registered

FILLED = training_hooks
SPARE = "spare_layer"
ALERT = {"epoch": 0, "step": 5, "hook": "loss_spikes", "metric": "loss_deviation", "value": 9.0, "limit": 6.0}


class SpareLayer(SmallSteps):
    """The same with weights that nothing uses."""

    name = SPARE

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model[0].spare = nn.Parameter(torch.ones(40))
        return model


@pytest.fixture(autouse=True)
def small():
    with registered(SmallSteps), registered(SpareLayer):
        yield


def spiked(folder: Path) -> Path:
    """Train a run, and add an alert of a spike to its record."""
    words = ["run", "small_steps", "--save-checkpoints", "--hook-jsonl", "--hooks", "norms", "--no-console-output"]
    assert main([*words, "--output-dir", str(folder)]) == 0
    run = folder / "small_steps/plain"
    alert = ALERT | {"sentence": "Step 5: the loss spiked.", "rows": None, "is_over": False}
    (run / ALERTS).write_text(json.dumps(alert) + "\n")
    return run


@pytest.mark.longer
def test_tests_are_part_of_the_json(tmp_path, capsys):
    run = spiked(tmp_path)
    capsys.readouterr()
    assert main(["doctor", str(run), "--test", "--json"]) == 0
    findings = {item["id"]: item for item in json.loads(capsys.readouterr().out)["findings"]}
    tests = findings["loss-spike"]["tests"]
    assert {item["branches"] for item in tests} == {4}
    assert [item["change"] for item in tests][-2:] == ["half the learning rate", "a tenth of the learning rate"]


@pytest.mark.slow
@pytest.mark.process
def test_run_resumes_bit_for_bit_after_tests(tmp_path):
    """Without its last files the run is tested and resumed; rows, weights and checkpoints are the same."""
    run = spiked(tmp_path)
    expected = contents(run)
    for name in ("summary.json", "plain_final.pt"):
        (run / name).unlink()
    assert main(["doctor", str(run), "--test"]) == 0
    assert main(["resume", str(run)]) == 0
    names = [name for name in expected if name.endswith((".jsonl", ".pt", ".safetensors")) and name != ALERTS]
    result = contents(run)
    assert [name for name in names if result[name] != expected[name]] == []


@pytest.mark.longer
def test_broken_law_makes_finding_certain(tmp_path, capsys):
    words = ["run", SPARE, "--save-checkpoints", "--hook-jsonl", "--hooks", "training_checks", "--no-console-output"]
    assert main([*words, "--epochs", "8", "--output-dir", str(tmp_path)]) == 0
    capsys.readouterr()
    assert main(["doctor", str(tmp_path / SPARE / "plain"), "--test", "--json"]) == 0
    findings = {item["id"]: item for item in json.loads(capsys.readouterr().out)["findings"]}
    finding = findings["parameters-without-gradient"]
    assert (finding["law"], finding["confidence"]) == ("every_parameter_learns", 0.99)
    assert finding["law_result"].startswith("broken at step 5: 0.spare")


def test_options_of_tests_require_tests(tmp_path, capsys):
    assert main(["doctor", str(tmp_path), "--branches", "5"]) == 2
    assert "--branches and --steps are options of the tests; add --test." in capsys.readouterr().err
