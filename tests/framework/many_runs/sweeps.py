"""Folders of recorded runs of every kind, for tests of the index."""

import json
import shutil
from pathlib import Path

from loopscope.runs import CONFIG, SUMMARY

from tests.framework.report.faulty_runs import faulty_run, healthy_run
from tests.framework.report.pages import ended_run, seeded_runs


def sweep_of(root: Path) -> Path:
    """Record completed runs of two groups, killed ones, and one with findings; two experiments, no damage."""
    seeded_runs(root / "seeds")
    healthy_run(root / "killed")
    faulty_run(root / "faulty")
    twin = ended_run(root / "twins", "a", 7, [(1, {"training_metrics/loss": float("nan"), "text": "a"})])
    shutil.copytree(twin, twin.with_name("copy"))
    return root


def damage(root: Path) -> None:
    """Damage the files of three runs."""
    folders = sorted(path.parent for path in root.rglob(CONFIG))
    (folders[0] / CONFIG).write_text("{")
    (folders[1] / SUMMARY).write_text(json.dumps({"status": 3}))
    with next(folders[2].glob("*.jsonl")).open("a") as file:
        file.write("{]\n")
