"""The final loss of a run: what a user calls so, and the same in every place."""

import json
import math
from pathlib import Path

import loopscope
import pytest
import torch
from loopscope import sinks, training_hooks
from loopscope.cli import main
from loopscope.doctor import History
from loopscope.hooks import Series
from torch import nn

FILLED = (sinks, training_hooks)


def trained(folder: Path, loop: str, steps: int, epochs: int = 1) -> tuple[dict, list[float]]:
    """Train with a loss that falls all the time, and return the summary and the losses of all steps."""
    model, losses = nn.Linear(4, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"out": folder, "display": "none", "with_hooks": "health", "loop": loop}
    with loopscope.attach(model, optimizer, **options) as scope:
        for _ in range(epochs):
            for batch in scope.batches([torch.ones(2, 4)] * steps):
                loss = (model(batch) - 5.0).square().mean()
                losses.append(loss.item())
                scope.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    return json.loads((folder / "summary.json").read_text()), losses


@pytest.mark.some_rows(2)
@pytest.mark.parametrize("loop", ["step", "epoch"])
@pytest.mark.parametrize(("steps", "over", "count"), [(60, "last 6 steps", 6), (7, "last step", 1)])
def test_final_loss_is_that_of_the_last_steps(loop, steps, over, count, tmp_path, capsys) -> None:
    """Summary, show and ls agree, in loops of steps and of a single epoch."""
    summary, losses = trained(tmp_path / "run", loop, steps)
    mean = math.fsum(losses[-count:]) / count
    assert summary["training_loss"] == pytest.approx(mean)
    assert summary["last_loss"] == pytest.approx(losses[-1])
    assert summary["training_loss_over"] == over
    for words in (["show", str(tmp_path / "run")], ["ls", str(tmp_path)]):
        assert main(words) == 0
        assert f"loss {mean:.4g}" in " ".join(capsys.readouterr().out.split())


def test_final_loss_of_epochs_is_the_last_mean(tmp_path: Path) -> None:
    summary, losses = trained(tmp_path / "run", "epoch", 8, epochs=2)
    assert summary["training_loss"] == pytest.approx(math.fsum(losses[8:]) / 8)
    assert summary["training_loss_over"] == "epoch"


def test_step_loops_talk_of_steps(tmp_path: Path, capsys) -> None:
    trained(tmp_path / "run", "step", 20)
    assert main(["show", str(tmp_path / "run"), "--all"]) == 0
    assert main(["ls", str(tmp_path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "ended after 20 steps" in shown
    assert "0 epochs" not in shown
    assert "0/20" not in shown


def test_final_loss_of_sampled_steps_is_named() -> None:
    """Only some steps have a loss, the last is not finite, or none has one."""
    history = History()
    history.add(100, {"training_checks/loss": Series([10, 95, 98], [9.0, 2.0, 1.0])})
    expected = {"training_loss": 1.5, "training_loss_over": "2 of the last 10 steps", "last_loss": None}
    assert history.recent_losses.final_loss(100, 4.0, 1) == expected
    history.add(100, {"training_checks/loss": Series([100], [math.inf])})
    assert history.recent_losses.final_loss(100, 4.0, 0)["training_loss"] == math.inf
    assert History().recent_losses.final_loss(5, 4.0, 1)["training_loss_over"] == "epoch"


def test_loss_is_plotted_by_default(tmp_path: Path, capsys) -> None:
    """The losses of all steps are drawn in place of one mean per epoch."""
    trained(tmp_path / "run", "epoch", 8)
    assert main(["plot", str(tmp_path / "run"), "--out", str(tmp_path / "loss.svg")]) == 0
    assert "training_checks/loss" in (tmp_path / "loss.svg").read_text()
