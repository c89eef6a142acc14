"""Records of attached runs: settings of the training, its seed, and the provenance of the code."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from loopscope import attach
from loopscope.cli import main
from loopscope.integrations.loop_settings import name_without_seed, seed_of
from loopscope.many_runs import find_runs
from loopscope.report import compare_runs
from torch import nn

SCRIPT = """
import torch, loopscope
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with loopscope.attach(model, optimizer, hooks=["norms"], out="run", display="none") as scope:
    for x in scope.batches([torch.ones(3, 2)]):
        scope.backward(model(x).sum())
        optimizer.step()
"""


def trained(folder: Path, *, seed: int = 0, lr: float = 0.1, **options) -> dict:
    """Train one step and return the record."""
    torch.manual_seed(seed)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with attach(model, optimizer, scheduler=scheduler, hooks=["norms"], out=folder, display="none", **options) as scope:
        for x in scope.batches([torch.ones(3, 2)]):
            scope.backward(model(x).square().mean())
            optimizer.step()
            scheduler.step()
        scope.epoch_end(val_loss=float(torch.rand(1)))
    return json.loads((folder / "experiment_config.json").read_text())


def test_record_knows_settings_of_the_training(tmp_path):
    record = trained(tmp_path / "run", seed=5)["training"]
    expected = {
        "model": "Linear",
        "optimizer": "AdamW",
        "learning_rate": 0.1,
        "weight_decay": 0.5,
        "scheduler": "StepLR",
    }
    expected |= {"batch_size": 3, "accumulation": 1, "seed": 5, "dtype": "float32", "device": "cpu", "name": "run"}
    assert record.items() >= expected.items()


def test_odd_options_of_an_optimizer_are_recorded(tmp_path):
    """A learning rate may be a tensor; tensors of several elements are left out."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
    optimizer.param_groups[0] |= {"mask": torch.ones(3), "extra": None}
    with attach(model, optimizer, hooks=["norms"], out=tmp_path, display="none") as scope:
        for x in scope.batches([torch.ones(3, 2)]):
            scope.backward(model(x).sum())
            optimizer.step()
    training = json.loads((tmp_path / "experiment_config.json").read_text())["training"]
    assert (training["learning_rate"], training["extra"]) == (pytest.approx(0.1), None)
    assert "mask" not in training


def test_seed_is_the_first_that_is_known():
    torch.manual_seed(7)
    assert (seed_of({"seed": 3}, 4), seed_of({}, 4), seed_of({}, 0)) == (3, 4, 7)
    torch.seed()
    assert seed_of({}, 0) == 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [("lr0.1-seed3", "lr0.1"), ("base/seed-3", "base"), ("lr3-s3", "lr3"), ("steps3", "steps3"), ("s30", "s30")],
)
def test_names_lose_their_seed(name, expected):
    assert name_without_seed(Path("runs", name), 3) == expected


@pytest.mark.longer
def test_seeds_of_attached_runs_form_groups(tmp_path):
    """Runs that differ only in their seeds are one group, and differing settings are listed."""
    for lr in (0.1, 0.2):
        for seed in (1, 2):
            trained(tmp_path / f"lr{lr}-seed{seed}", seed=seed, lr=lr)
    comparison = compare_runs(find_runs(tmp_path))
    assert {row["group"] for row in comparison["runs"]} == {"lr0.1", "lr0.2"}
    assert {row["name"] for row in comparison["differences"]} == {"seed", "learning_rate"}
    assert [test["seeds"] for test in comparison["tests"]] == ["2 of 2", "2 of 2"]


@pytest.mark.slow
@pytest.mark.process
def test_record_knows_commit_and_uncommitted_changes(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=b"]
    for words in (["init", "-q"], ["add", "train.py"], ["commit", "-q", "-m", "Add a script"]):
        subprocess.run([*git, *words], check=True)
    script.write_text(SCRIPT + "\n")
    subprocess.run([sys.executable, str(script)], check=True, cwd=tmp_path, env={**os.environ})
    provenance = json.loads((tmp_path / "run/experiment_config.json").read_text())["provenance"]
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert (provenance["git_commit"], provenance["git_dirty"]) == (head, True)
    assert provenance["script"] == str(script)


@pytest.mark.longer
def test_show_names_end_and_active_hooks(tmp_path, capsys):
    """A custom loop has no limit at which it stops, and a hook that was left out did not run."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    folder = tmp_path / "run"
    with (
        warnings.catch_warnings(action="ignore"),
        attach(model, optimizer, with_hooks="full", out=folder, display="none") as scope,
    ):
        for batch in scope.batches(torch.ones(3, 2, 4)):
            scope.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    assert main(["show", str(folder)]) == 0
    shown = " ".join(capsys.readouterr().out.split())  # the width of the terminal decides about the lines
    active, _, left_out = shown.partition(" left out ")
    assert ": ended after 1 epoch, 3 steps" in active
    assert "hessian" not in active
    assert "hessian" in left_out.partition(" metrics ")[0]


@pytest.mark.filterwarnings("always::loopscope.errors.RunNotice")
@pytest.mark.parametrize(
    ("result", "recorded", "problem"),
    [
        ({"val_loss": torch.tensor(0.5), "val_acc": 1}, {"val_loss": 0.5, "val_acc": 1}, None),
        ((torch.tensor(0.5), 0.9), {}, "numbers without names"),
        (0.5, {}, "numbers without names"),
        ({"val_loss": 0.5, "kind": "test"}, {}, "values that are not numbers"),
        ((torch.ones(2), "text", None, True), {}, None),
    ],
    ids=["named", "pair", "number", "named with text", "no numbers"],
)
def test_unnamed_numbers_are_reported_once(result, recorded, problem, tmp_path, capsys):
    """An evaluation at every step returns the result; the summary has the named numbers."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, optimizer, hooks=["norms"], out=tmp_path / "run", display="normal") as scope:
        for x in scope.batches(torch.ones(2, 3, 2)):
            scope.backward(model(x).square().mean())
            optimizer.step()
            assert scope.evaluate(lambda: result) is result
    printed = capsys.readouterr()
    text = " ".join((printed.out + printed.err).split())
    assert text.count("An evaluation returned") == (problem is not None)
    assert problem is None or f"An evaluation returned {problem}" in text
    assert json.loads((tmp_path / "run/summary.json").read_text())["final"] == recorded
