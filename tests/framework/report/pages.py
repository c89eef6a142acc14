"""Pages of ``loopscope report`` for tests: written by the command, and read back without a browser."""

import base64
import gzip
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from loopscope.cli import main
from loopscope.durable_files import write_json
from loopscope.hooks import ALERTS
from loopscope.runs import CONFIG, SUMMARY

from tests.framework.report.plotted import record


class ReadPage(HTMLParser):
    """A parsed page: tags with attributes, text outside of scripts, and the packed data."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.size = path.stat().st_size
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.feed(path.read_text("utf-8"))
        assert self.open == []
        ids = [attributes.get("id") for tag, attributes in self.tags if tag == "script"]
        packed = dict(zip(ids, self.scripts, strict=True))["data"]
        self.data: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed)))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open += [] if tag in ("meta", "input") else [tag]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.open and self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def curve(self, metric: str, run: int = 0) -> dict[int, float]:
        content = next(item for item in self.data["metrics"] if item["name"] == metric)
        curve = next(curve for curve in content["curves"] if curve["run"] == run)
        return dict(zip(curve["steps"], map(float, curve["values"]), strict=True))


def reported(*words: Path | str) -> ReadPage:
    """Write the page of runs next to the first run, and read it."""
    path = Path(words[0]).parent / "page.html"
    assert main(["report", *map(str, words), "-o", str(path), "--overwrite"]) == 0
    return ReadPage(path)


def ended_run(root: Path, strategy: str, seed: int, emits: list[tuple[int, dict[str, Any]]]) -> Path:
    """Record a completed run with a seed, and return its folder."""
    folder = record(root / f"seed-{seed}", emits, strategy=strategy)
    write_json(folder / CONFIG, {"experiment": "exp", "strategy": strategy, "config": {"seed": seed}})
    summary = {"strategy": strategy, "status": "completed", "error": None, "epochs": 1, "steps": 9, "output_dir": ""}
    summary |= {
        "training_loss": None,
        "initial": {},
        "metrics": {},
        "final": {"loss": float(seed ** (2 if strategy == "b" else 1))},
        "treatments": {},
    }
    write_json(folder / SUMMARY, {**summary, "target_reached": None, "hook_errors": [], "seconds": {"training": 1.0}})
    return folder


def seeded_runs(root: Path) -> list[Path]:
    """Record two strategies with three seeds, with curves, spectra, phases and an alert."""
    folders = []
    for offset, strategy in ((0.0, "a"), (10.0, "b")):
        for seed in range(3):
            steps = range(1, 10 - seed)  # the seeds end at different steps
            emits = [
                (at, {"m/loss": offset + at * (seed + 1), "m/spectrum": [at, seed + 0.5], "m/phase": at // 5})
                for at in steps
            ]
            emits += [(9, {f"training_metrics/{name}": 0.5}) for name in ("loss", "lr", "val_acc", "train_acc")]
            folders.append(ended_run(root, strategy, seed, emits))
    alert = {"epoch": 0, "step": 4, "hook": "m", "metric": "loss", "sentence": "It <b>rises</b>."}
    (folders[0] / ALERTS).write_text(json.dumps(alert) + "\n")
    return folders
