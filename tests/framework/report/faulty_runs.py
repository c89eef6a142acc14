"""Recorded runs with findings, for tests of the page: a fault before the first step, and a spike at step 5."""

import json
from pathlib import Path

from loopscope.doctor import all_detectors
from loopscope.durable_files import write_json
from loopscope.hooks import ALERTS
from loopscope.runs import CONFIG

from tests.framework.report.plotted import record

MISSING = {"count": 2, "names": ["a.weight", "a.bias"], "share": 0.25}
VALUES = [4.0, 3.0, 2.0, 1.5, 9.0, 1.4, 1.3, 1.2]
NEEDED = sorted({name for detector in all_detectors() for name in detector.needs})
"""The hooks behind the verdict."""
SPIKE = {
    "epoch": 0,
    "step": 5,
    "hook": "loss_spikes",
    "metric": "loss_deviation",
    "value": 7.5,
    "limit": 6.0,
    "rows": None,
    "is_over": False,
    "sentence": "The loss spiked at step 5.",
}


def healthy_run(root: Path, strategy: str = "healthy", rate: float = 0.1) -> Path:
    """Record a run with loss, validation, learning rate, gradient norm and further metrics."""
    emits = []
    for step, loss in enumerate(VALUES, 1):
        metrics = {"zeta/a": step, "alpha/b": 2 * step, "loss_spikes/loss_deviation": loss}
        metrics |= {"training_checks/loss": loss, "training_metrics/lr": rate, "training_checks/grad_norm": loss / 2}
        metrics |= {"training_metrics/evaluation/val_loss": loss + 0.5, "training_metrics/val_acc": 1 / loss}
        emits.append((step, metrics))
    folder = record(root, emits, strategy=strategy)
    write_json(
        folder / CONFIG,
        {"experiment": "exp", "strategy": strategy, "config": {"rate": rate}, "hooks": {name: {} for name in NEEDED}},
    )
    return folder


def faulty_run(root: Path, strategy: str = "faulty", **fields: str) -> Path:
    """Record a run with a spike and with parameters in no optimizer; ``fields`` are further ones of its alert."""
    folder = healthy_run(root, strategy, rate=0.2)
    config = json.loads((folder / CONFIG).read_text())
    write_json(folder / CONFIG, {**config, "facts": {"trainable": 8, "without_optimizer": MISSING}})
    (folder / ALERTS).write_text(json.dumps({**SPIKE, **fields}) + "\n")
    return folder
