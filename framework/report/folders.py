"""The runs in a folder: what each was, how it ended or that it still goes on, or why its files cannot be read."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, get_type_hints

from ..checkpoints import is_locked
from ..durable_files import is_there, read_json
from ..errors import UsageError
from ..hooks import SinkRegistry
from ..runs import CONFIG, SUMMARY, Completed, RecordSink, RunRecord, checked

BLANK: Mapping[str, Any] = {
    **{"epochs": 0, "steps": 0, "seconds": {"training": 0.0}, "training_loss": None, "target_reached": None},
    **{"error": None, "initial": {}, "final": {}, "metrics": {}, "treatments": {}, "hook_errors": [], "output_dir": ""},
}
"""What stands for the fields that summaries of earlier versions lack."""


class Told(TypedDict):
    """What is read of a summary beside what is shown of one that is completed."""

    status: str
    steps: int
    error: str | None
    training_loss: float | None
    initial: Mapping[str, Any]


TOLD = {**get_type_hints(Completed), **get_type_hints(Told), "final": Mapping[str, Any]}


@dataclass(frozen=True)
class FoundRun:
    """The folder of a run, as far as it can be read."""

    path: Path
    state: str
    """completed, failed or interrupted; running: a process holds its lock; killed: it left neither lock nor summary;
    damaged."""
    record: RunRecord | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)
    """How it ended, with numbers alone in ``initial`` and ``final``; empty before its end."""
    problems: Sequence[str] = ()
    """What is wrong with its files, in sentences."""

    @property
    def began(self) -> float:
        """When the record of it was written, in seconds since the epoch."""
        return _changed(self.path / CONFIG)

    @property
    def seconds(self) -> float:
        """How long it trained; before its end how long it has gone on, by what it last wrote."""
        if self.summary:
            return float(self.summary["seconds"]["training"])
        last = time.time() if self.state == "running" else max(map(_changed, self.records().values()), default=0.0)
        return max(0.0, last - self.began)

    @property
    def progress(self) -> tuple[int, int | None]:
        """Epochs and steps that are done; before its end those of the last thing that it recorded, where that says."""
        if self.summary:
            return self.summary["epochs"], self.summary["steps"]
        try:
            return next((found for sink, path in self.records().items() if (found := sink.newest(path))), (0, None))
        except OSError:
            return 0, None

    def records(self) -> dict[type[RecordSink], Path]:
        """Return the files of its metrics by the sinks that wrote them, the best first."""
        files = {} if self.record is None else record_files(self.path, self.record.strategy)
        return {sink: path for sink, path in files.items() if path.is_file()}


def record_files(folder: Path, strategy: str) -> dict[type[RecordSink], Path]:
    """Return where each sink writes its record, the best first."""
    readable = [sink for sink in SinkRegistry if issubclass(sink, RecordSink)]
    best_first = sorted(readable, key=lambda sink: not sink.lossless)
    return {sink: folder / sink.leaves(strategy)[0] for sink in best_first}


def look_at(folder: Path) -> FoundRun:
    """Read what lies in the folder of a run; nothing that lies there raises."""
    problems: list[str] = []

    def read(what: Callable[[], Any]) -> Any:
        try:
            return what()
        except UsageError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{folder} cannot be read: {error.strerror}.")
        return None

    record = read(lambda: RunRecord.read(folder))
    if is_locked(folder):
        return FoundRun(folder, "running", record, problems=problems)
    summary = read(lambda: _summary(folder)) or {}
    return FoundRun(folder, "damaged" if problems else summary.get("status", "killed"), record, summary, problems)


def _summary(folder: Path) -> dict[str, Any]:
    path = folder / SUMMARY
    if not is_there(path):
        return {}
    content = {"strategy": folder.name, **BLANK, **read_json(path)}
    summary = checked(content, TOLD, path)
    return summary | {name: _numbers(summary[name]) for name in ("initial", "final")}


def _numbers(evaluation: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in evaluation.items() if isinstance(value, (int, float))}


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def find_runs(folder: Path) -> list[FoundRun]:
    """Return all runs under a folder, however deep, by path; what cannot be read is among them with its problem.

    Links are followed, but every folder is looked at once: under its own path if that lies in the folder.
    """
    found: list[FoundRun] = []
    seen: set[tuple[int, int]] = set()
    waiting, links = [folder], list[Path]()
    while waiting or links:
        here = waiting.pop() if waiting else links.pop(0)
        try:
            stat = here.stat()
            if (stat.st_dev, stat.st_ino) in seen:
                continue
            seen.add((stat.st_dev, stat.st_ino))
            with os.scandir(here) as entries:
                inside = sorted((Path(entry.path), entry.is_symlink(), _is_folder(entry)) for entry in entries)
        except OSError as error:
            found.append(FoundRun(here, "damaged", problems=[f"{here} cannot be read: {error.strerror}."]))
            continue
        if here / CONFIG in (path for path, *_ in inside):
            found.append(look_at(here))
        for path, is_link, is_folder in inside:
            (links if is_link else waiting).extend([path] if is_folder else [])
    return sorted(found, key=lambda run: run.path.parts)


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link in a circle of its own
        return False
