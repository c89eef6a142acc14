"""Steps of Lightning without a loss, and the step numbers in its loggers."""

import csv
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger
from loopscope.hooks import HookPoint

from tests.framework.integrations.test_lightning import Classifier, fit
from tests.support import ActingHook, SpyHook, at

pytestmark = [pytest.mark.trainer, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]


class Skipping(Classifier):
    """Returns no loss for some batches."""

    def __init__(self, skipped: set[int]) -> None:
        super().__init__()
        self.skipped = skipped

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return None if batch_idx in self.skipped else output


@pytest.mark.slow_rows("{4}-1")
@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("skipped", [{2}, {0}, {1, 3}, {4}, {0, 1, 2, 3, 4}], ids=str)
def test_step_without_loss_is_skipped_by_hooks(tmp_path: Path, skipped: set[int], accumulate: int) -> None:
    """The fit is that without hooks, and the group's hooks stay on."""
    options: dict[str, Any] = {"module": partial(Skipping, skipped), "accumulate_grad_batches": accumulate}
    lossy = at(ActingHook, HookPoint.PRE_STEP)(lambda run_ctx, model_ctx: {"loss": model_ctx.compute_batch_loss()})
    hooks = ["hessian", "batch_rows", lossy] if accumulate == 1 else ["norms", "batch_dynamics", lossy]
    found, scope, _ = fit(tmp_path, hooks, **options)
    assert found == fit(tmp_path / "bare", **options)[0]
    summary = json.loads((scope.folder / "summary.json").read_text())
    assert (summary["status"], summary["hook_errors"], summary["hooks_left_out"]) == ("completed", [], {})


@pytest.mark.slow
def test_groups_survive_steps_without_loss(tmp_path: Path) -> None:
    """Every hook that the group switches on, and that fits the module, is still on after the fit."""
    names = {}
    for name, skipped in (("all", set()), ("some", {0, 2})):
        choices = {"with_hooks": "full", "audit": True}
        _, scope, _ = fit(tmp_path / name, [SpyHook()], module=partial(Skipping, skipped), choices=choices)
        names[name] = scope.hooks
    assert names["some"] == names["all"]
    assert "hessian" in names["all"]


def logged(path: Path, **options: Any) -> list[dict[str, str]]:
    """Fit with a CSV logger at every step; return its rows."""
    logger = CSVLogger(path, "logs")
    spy = SpyHook(lambda ctx: {"loss": ctx.loss} if ctx.hook_point.name == "POST_STEP" else {})
    choices = {"sinks": ["jsonl", "trainer"], "out": None}
    settings = {"logger": logger, "log_every_n_steps": 1, "num_sanity_val_steps": 0}
    fit(path, [spy, "training_metrics"], choices=choices, **settings, **options)
    return [*csv.DictReader((Path(logger.log_dir) / "metrics.csv").open())]


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 1, "max_steps": 7, "max_epochs": -1}], ids=str)
def test_loggers_have_our_loss_at_lightning_steps(tmp_path: Path, options: dict[str, Any]) -> None:
    rows = logged(tmp_path, **options)
    theirs, ours = (
        {row["step"]: float(row[name]) for row in rows if row.get(name)} for name in ("loss_step", "spy/loss")
    )
    assert len(theirs) == options.get("max_steps", 10)
    assert {step: pytest.approx(value) for step, value in theirs.items()} == ours


@pytest.mark.parametrize("options", [{}, {"val_check_interval": 2}, {"accumulate_grad_batches": 2}], ids=str)
def test_loggers_have_our_evaluation_at_lightning_steps(tmp_path: Path, options: dict[str, Any]) -> None:
    rows = logged(tmp_path, validate=True, **options)
    names = ("val_loss", "training_metrics/evaluation/val_loss")
    theirs, ours = ({row["step"]: float(row[name]) for row in rows if row.get(name)} for name in names)
    assert len(theirs) >= 2
    assert {step: pytest.approx(value) for step, value in theirs.items()} == ours


def test_record_counts_steps_from_one(tmp_path: Path) -> None:
    logged(tmp_path)
    (record,) = (path for path in tmp_path.rglob("*.jsonl") if path.name not in ("alerts.jsonl", "digests.jsonl"))
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    steps = [step for row in rows for step in row.get("spy/loss", {"steps": []})["steps"]]
    assert steps == [*range(1, 11)]
