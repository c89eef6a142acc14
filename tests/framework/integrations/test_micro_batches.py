"""Hooks under gradient accumulation: a step consists of the loop's own micro-batches, and the last may have fewer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from loopscope.data import MicroBatches, SeparateBatches, micro_batches, part_of, rows
from loopscope.training import TrainingTask
from loopscope.training_hooks.laboratory.rows import row_contents

from tests.framework.integrations.hf_trainers import InOrder, Rows, attached, trainer
from tests.support import RecordingSink
from tests.support.cases import some_of

pytestmark = [
    pytest.mark.trainer,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]
STEP = MicroBatches([{"x": torch.arange(3)}, {"x": torch.arange(3, 5)}])


@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_parts_of_a_step_are_its_micro_batches(pieces: int) -> None:
    """They are separate objects, for any number of pieces; a single micro-batch is split."""
    parts = micro_batches(STEP, pieces)
    assert [part["x"].tolist() for part in parts] == [[0, 1, 2], [3, 4]]
    assert all(part is not own for part, own in zip(parts, STEP, strict=True))
    assert len(micro_batches(MicroBatches(STEP[:1]), pieces)) == min(pieces, 3)


@pytest.mark.parametrize("window", [[0, 4], [3], [1, 2], slice(1, 4), torch.tensor([2, 3])])
def test_rows_are_counted_over_micro_batches(window: Any) -> None:
    chosen = part_of(STEP, window)
    wanted = torch.arange(5)[window]
    assert torch.cat([part["x"] for part in chosen]).tolist() == wanted.tolist()
    assert (rows(chosen), len(row_contents(chosen))) == (len(wanted), len(wanted))


def test_separate_batches_have_the_mean_loss() -> None:
    """The losses of micro-batches add up, and those of separate batches are averaged over the rows."""
    model = torch.nn.Linear(1, 1)
    task = TrainingTask(model, torch.optim.SGD(model.parameters()), [], lambda model, batch: batch["x"].float().mean())
    assert [weight for _, weight in task.micro_batches(STEP)] == [1.0, 1.0]
    assert [weight for _, weight in task.micro_batches(SeparateBatches(STEP))] == [3 / 5, 2 / 5]


def measured(path: Path, hook: str, accumulate: int, **options: Any) -> dict[str, list[Any]]:
    """Train in order without dropout on steps of four rows; return the values of a hook, by metric."""
    sink, choices = RecordingSink(), {"hook_options": {hook: options}, "loader": loader()}
    arguments = {"gradient_accumulation_steps": accumulate, "max_grad_norm": 0, "num_train_epochs": 1}
    made = trainer(path, dropout=0.0, kind=InOrder, per_device_train_batch_size=4 // accumulate, **arguments)
    attached(made, [hook], sinks=[sink], **choices)
    made.train()
    values: dict[str, list[Any]] = {}
    for name, _, _, value in sink.rows(hook):
        values.setdefault(name.removeprefix(f"{hook}/"), []).append(value)
    return values


def loader() -> Any:
    return torch.utils.data.DataLoader(Rows(), 2)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_noise_scale_splits_steps_into_micro_batches(tmp_path: Path, accumulate: int) -> None:
    """The estimates are those of the same rows in one batch that the hook splits into as many parts."""
    every = {"every_n_steps": 1}
    split = measured(tmp_path / "a", "gradient_noise_scale", 1, parts=accumulate, **every)
    parts = measured(tmp_path / "b", "gradient_noise_scale", accumulate, **every)
    for name in ("signal_estimate", "noise_estimate", "batch_rows"):
        assert parts[name] == pytest.approx(split[name], rel=1e-2, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_what_if_repeats_steps_of_micro_batches(tmp_path: Path, accumulate: int) -> None:
    """Without dropout the repeated step has the loss of the run's own step, and each row is measured."""
    step = {"step": 2, "follow": 1, "fresh": 2}
    parts, whole = (measured(tmp_path / str(count), "what_if", count, **step) for count in (accumulate, 1))
    assert parts["loss"][0]["as_it_was"] == pytest.approx(whole["loss"][0]["as_it_was"], rel=1e-3)
    assert parts["rows"][0]["loss"] == pytest.approx(whole["rows"][0]["loss"], rel=1e-3)


@pytest.mark.slow_rows("hooks0-2", "hooks0-3")
@pytest.mark.parametrize("accumulate", some_of([2, 1, 3, 4]))
@pytest.mark.parametrize("hooks", [["step_history", "batch_rows", "hessian", "lr_probe"], "observers"])
def test_no_hook_fails_with_accumulation(tmp_path: Path, accumulate: int, hooks: Any) -> None:
    """The last step of each epoch has fewer micro-batches."""
    made = trainer(tmp_path, gradient_accumulation_steps=accumulate, num_train_epochs=1)
    chosen = {"with_hooks": hooks, "audit": False} if isinstance(hooks, str) else {}
    scope = attached(made, [] if chosen else hooks, loader=loader(), **chosen)
    made.train()
    summary = json.loads((tmp_path / "loopscope-runs/run_0/summary.json").read_text())
    assert (summary["status"], summary["hook_errors"]) == ("completed", [])
    assert not any("raised" in reason for reason in summary["hooks_left_out"].values())
    assert {*scope.hooks} >= {"gradient_noise_scale"} if chosen else {*hooks}
