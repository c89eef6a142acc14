"""Runs that end within an epoch: their last losses and learning rate are shown and recorded."""

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import loopscope
import pytest
import torch
from loopscope.doctor import RecentLosses
from torch import nn

SCRIPT = """
import os, signal, torch, loopscope
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scope = loopscope.attach(model, optimizer, out="run")
for step, batch in enumerate(scope.batches([torch.ones(2, 4)] * 40)):
    scope.backward((model(batch) - 5.0).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    if step == 12:
        {ending}
"""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    ("ending", "status", "error"),
    [
        ("os.kill(os.getpid(), signal.SIGINT)", "interrupted", "KeyboardInterrupt"),
        ("raise RuntimeError('a bug of the script')", "failed", "RuntimeError: a bug of the script"),
    ],
)
def test_script_without_scope_close_records_its_error(ending, status, error, tmp_path: Path) -> None:
    """The display names the steps, the status and the loss, and no metrics of hooks."""
    script = SCRIPT.format(ending=ending)
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode in (1, -signal.SIGINT), done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["last_lr"]) == (status, 0.01)
    assert summary["error"].startswith(error)
    assert f"13 steps ({status}), loss {summary['training_loss']:.4g}, no problem found" in done.stdout
    assert "weight_updates/" not in done.stdout
    assert "parameter_norms/" not in done.stdout


def interrupted(folder: Path, capsys, steps: list[int], **options) -> tuple[dict, list[float], str]:
    """Train epochs of these steps, raise within the next step, and return the summary, all losses and the output."""
    model, losses = nn.Linear(4, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train() -> None:
        with loopscope.attach(model, optimizer, out=folder, **options) as scope:
            for count in steps:
                for index, batch in enumerate(scope.batches([torch.ones(2, 4)] * 60)):
                    if index == count:
                        raise KeyboardInterrupt
                    loss = (model(batch) - 5.0).square().mean()
                    losses.append(loss.item())
                    scope.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()

    with pytest.raises(KeyboardInterrupt):
        train()
    return json.loads((folder / "summary.json").read_text()), losses, capsys.readouterr().out


@pytest.mark.parametrize("steps", [[50], [60, 50]])
def test_interrupted_epoch_ends_with_its_newest_losses(steps, tmp_path: Path, capsys) -> None:
    """The loss is not the mean of the epoch before, and no line repeats that mean."""
    summary, losses, shown = interrupted(tmp_path / "run", capsys, steps)
    count = sum(steps) // 10
    assert summary["training_loss"] == pytest.approx(math.fsum(losses[-count:]) / count)
    assert summary["training_loss_over"] == f"last {count} steps"
    assert summary["last_loss"] == pytest.approx(losses[-1])
    assert "old)" not in shown


def test_interrupted_epoch_without_hooks_has_a_loss(tmp_path: Path, capsys) -> None:
    """Single steps are not recorded, so the loss is the mean of the part of the epoch."""
    summary, losses, _ = interrupted(tmp_path / "run", capsys, [13], hooks=[])
    assert summary["training_loss"] == pytest.approx(math.fsum(losses) / 13)
    assert summary["training_loss_over"] == "part of the epoch"


def test_learning_rate_of_no_step_is_missing(tmp_path: Path) -> None:
    assert RecentLosses().final_loss(0, None, 1)["training_loss"] is None
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with loopscope.attach(model, optimizer, out=tmp_path / "run", display="none") as scope:
        for batch in scope.batches([torch.ones(2, 4)]):
            scope.backward(model(batch).mean())
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["last_lr"] is None
