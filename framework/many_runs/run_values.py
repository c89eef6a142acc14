"""State, diagnosis and summary of the metrics of runs, read from the index where it has them."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from ..doctor import Diagnosis, Finding, diagnose
from ..durable_files import plain_json
from ..report import (
    BinnedCurve,
    FoundRun,
    MetricCurve,
    MetricSummary,
    Scan,
    evaluations,
    explained,
    first_difference,
    inspect_run,
    read_curves,
    scan,
)
from ..runs import CONFIG, SETTINGS, RunRecord, is_file_name, read_history, run_folders
from .run_index import DECODING, Form, RunIndex, noticed_warnings
from .run_paths import found_runs, run_paths


@dataclass(frozen=True)
class IndexedRun(FoundRun):
    """A run whose length, if it has no summary, is indexed."""

    index: RunIndex | None = field(default=None, repr=False, compare=False)

    @property
    def length(self) -> tuple[int, int] | None:
        """Completed epochs and steps; before the end of the run, those of the last emit, if any."""
        if self.index is None or self.summary:
            return super().length
        return self.index.value(self.path, "length", Form(self._recorded_length, _plain_length, _length_of))

    def _recorded_length(self) -> tuple[int, int] | None:
        return super().length


class IndexedRuns:
    """The runs in some folders, each of which may have an index."""

    def __init__(self) -> None:
        self._indices: dict[Path, RunIndex] = {}
        self._index_of: dict[Path, RunIndex] = {}

    def find(self, folder: Path, read: Collection[str] = SETTINGS) -> list[FoundRun]:
        """Return all runs in a folder as :func:`.find_runs` does."""
        paths = [*run_paths(folder)]
        self._use(folder, [path for path, problem in paths if not problem])
        return found_runs(paths, partial(self.run, read=read))

    def folders(self, folder: Path, command: str) -> list[Path]:
        """Return the folders of the runs at a path: itself, or all in it and its subfolders.

        Raises:
            UsageError: if none exists; the message names the ``command`` that needs them.
        """
        if not folder.is_dir() or (folder / CONFIG).exists():
            return run_folders(folder, command)
        folders = run_folders(folder, command, [path for path, problem in run_paths(folder) if not problem])
        self._use(folder, folders)
        return folders

    def _use(self, folder: Path, runs: Collection[Path]) -> None:
        index = self._indices.setdefault(folder, RunIndex(folder))
        index.open(runs)
        self._index_of |= dict.fromkeys(runs, index)

    def close(self) -> None:
        """Write what is new in all indices."""
        for index in self._indices.values():
            index.close()

    def index_of(self, folder: Path) -> RunIndex:
        """Return the index with the run in a folder; one without a file for another run."""
        return self._index_of.get(folder) or RunIndex(folder)

    def run(self, folder: Path, read: Collection[str]) -> FoundRun:
        """Return the run in a folder as :func:`~loopscope.report.inspect_run` does."""
        index = self.index_of(folder)

        def inspected() -> FoundRun:
            return IndexedRun(**{**vars(inspect_run(folder, read)), "index": index})

        def decoded(content: Any) -> FoundRun:
            record, summary = _record_of(content["record"]), dict(content["summary"])
            return IndexedRun(folder, str(content["state"]), record, summary, index=index)

        return index.value(folder, f"run {' '.join(read)}", Form(inspected, _plain_run, decoded))

    def diagnosis(self, folder: Path) -> Diagnosis:
        """Return the findings about the record of a run.

        Raises:
            UsageError: if the folder has no run, or its record is damaged.
        """

        def diagnosed() -> Diagnosis:
            return diagnose(read_history(folder))

        form = Form(diagnosed, _plain_diagnosis, _diagnosis_of)
        return self.index_of(folder).value(folder, "diagnosis", form)

    def scan(self, folder: Path, strategy: str, wanted: Callable[[str], bool], *, is_default: bool) -> Scan:
        """Return a summary of the metrics of a run; ``is_default`` for those of the evaluation."""
        every = evaluations() if is_default else _everything
        form = Form(partial(scan, folder, strategy, every), _plain_scan, partial(_scan_of, folder, strategy))
        result = self.index_of(folder).value(folder, "evaluation" if is_default else "metrics", form)
        metrics = {name: metric for name, metric in result.metrics.items() if wanted(name)}
        return replace(result, metrics=metrics)

    def curves(self, folder: Path, names: Sequence[str]) -> dict[str, BinnedCurve]:
        """Return the curves of a run in some metrics; an empty one for a metric that it does not have.

        Raises:
            UsageError: if the folder has no run, or its record is damaged.
        """
        index, kinds = self.index_of(folder), {f"curve {name}": name for name in names}
        state = index.state_of(folder)
        curves: dict[str, BinnedCurve] = {}
        for kind, content in index.stored(folder, kinds, state).items():
            with suppress(*DECODING):
                curves[kinds[kind]] = BinnedCurve.of_bytes(content)
        missing = [name for name in names if name not in curves]
        if missing:
            with noticed_warnings() as noticed:
                read = read_curves(folder, set(missing).__contains__).curves
            empty = MetricCurve.of_points([], [])
            binned = {name: BinnedCurve.of(read.get(name, empty)) for name in missing}
            if state is not None and not noticed:
                index.store(folder, state, {f"curve {name}": curve.as_bytes() for name, curve in binned.items()})
            curves |= binned
        return curves

    def explained(self, folder: Path, names: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        """Return the descriptions of metrics in the runs of a folder; the hooks that have them need torch."""

        def described() -> Mapping[str, Mapping[str, Any]]:
            import_module("loopscope.training_hooks")
            return explained(names)

        index = self._indices.get(folder, RunIndex(folder))
        return index.value(folder, "descriptions", Form(described, dict, _descriptions_of), of=f" {list(names)}")

    def first_difference(self, first: Scan, other: Scan) -> dict[str, Any]:
        """Return the first step at which two records differ."""
        state = self.index_of(first.folder).state_of(first.folder)
        form = Form(partial(first_difference, first, other), _plain_difference, dict)
        of = None if state is None else f" {state} {first.emits}"
        return self.index_of(other.folder).value(other.folder, "first difference", form, of=of)


@contextmanager
def indexed_runs() -> Iterator[IndexedRuns]:
    """Give the runs of folders, and write what was computed of them into the indices at the end."""
    runs = IndexedRuns()
    try:
        yield runs
    finally:
        runs.close()


def _plain_run(run: FoundRun) -> dict[str, Any] | None:
    """Return a run without a problem, whose text would contain the folder as it was given."""
    if run.problem or run.record is None:
        return None
    return {"state": run.state, "record": vars(run.record), "summary": run.summary}


def _record_of(content: Mapping[str, Any]) -> RunRecord:
    """Return an indexed record, whose fields were checked when it was read from its file.

    Their complete check takes a millisecond for each run. An index from another source may still contain anything.
    """
    record = RunRecord(**content)
    kinds: dict[str, Any] = {"experiment": str, "strategy": str, "changed": (list, type(None))}
    if not all(isinstance(value, kinds.get(name, dict)) for name, value in content.items()):
        raise TypeError("a field has another type")
    if not all(map(is_file_name, (record.experiment, record.strategy))):
        raise ValueError("a name leads out of its folder")
    return record


def _plain_diagnosis(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return a diagnosis in the types of JSON, without rounding."""
    findings = [
        {**finding.as_dict(), "confidence": finding.confidence, "waits": finding.waits, "stage": finding.stage}
        for finding in diagnosis
    ]
    content = {"missing": diagnosis.missing, "unchecked": diagnosis.unchecked, "course": diagnosis.course}
    return dict(plain_json({"findings": findings, **content}))


def _diagnosis_of(content: Mapping[str, Any]) -> Diagnosis:
    findings = [replace(Finding.of(item), waits=item["waits"], stage=item["stage"]) for item in content["findings"]]
    missing, course = list(content["missing"]), dict(content["course"])
    return Diagnosis(findings, missing, unchecked=str(content["unchecked"]), course=course)


def _plain_scan(result: Scan) -> dict[str, Any] | None:
    if result.problem:
        return None
    metrics = {name: list(vars(metric).values()) for name, metric in result.metrics.items()}
    return {"emits": result.emits, "length": result.length, "names": result.names, "metrics": metrics}


def _scan_of(folder: Path, strategy: str, content: Mapping[str, Any]) -> Scan:
    metrics = {name: MetricSummary(*values) for name, values in content["metrics"].items()}
    epoch, step = content["length"]
    return Scan(folder, strategy, int(content["emits"]), (epoch, step), dict(content["names"]), metrics)


def _plain_difference(difference: dict[str, Any]) -> dict[str, Any] | None:
    return None if difference["problem"] else difference


def _plain_length(length: tuple[int, int] | None) -> tuple[int, int] | None:
    return length


def _length_of(content: Sequence[Any]) -> tuple[int, int] | None:
    epoch, step = content
    return int(epoch), int(step)


def _descriptions_of(content: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    if not all(isinstance(item, str | bool) for entry in content.values() for item in entry.values()):
        raise TypeError("a description is no text")
    return content


def _everything(name: str) -> bool:
    return True
