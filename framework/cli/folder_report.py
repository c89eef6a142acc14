"""The content of ``loopscope report`` for a folder of many runs."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..doctor import Diagnosis
from ..errors import UsageError
from ..many_runs import IndexedRuns
from ..report import BinnedCurve, FolderRuns, Scan, ShownRun, elided, page_of_folder
from ..runs import READ, record_of, require
from .finding_groups import finding_groups, settings_of


def folder_content(folders: Sequence[Path], labels: Sequence[str], index: IndexedRuns, most: int) -> FolderRuns:
    """Return the content of the runs in some folders.

    Args:
        folders: the folders of the runs.
        labels: the names that distinguish them.
        index: the runs with their indices.
        most: the largest size in bytes of a record that is read.
    """
    runs, scans, settings = list[ShownRun](), list[Scan | None](), list[Mapping[str, Any]]()
    for path, label, name in zip(folders, elided(labels), labels, strict=True):
        run = index.run(path, READ)
        shown = ShownRun(label, run, name, problems=[run.problem] if run.problem else [])
        scan = None
        if run.record is not None:
            try:
                _, record = record_of(path, run.record.strategy)
                size = record.stat().st_size
                require(size <= most, f"{record} is not read: it has {size:,} bytes, and the limit is {most:,}.")
                scan = index.scan(path, run.record.strategy, _every, is_default=False)
                epoch, step = scan.length
                shown.last = (epoch, step) if epoch is not None and step is not None else None
                require(not scan.problem, scan.problem)
                shown.diagnosis = index.diagnosis(path)
            except (UsageError, OSError) as error:
                shown.problems.append(str(error))
        runs.append(shown)
        scans.append(scan)
        settings.append({} if run.record is None else settings_of(run.record))

    diagnosed = [shown for shown in runs if shown.diagnosis is not None]
    diagnoses = [shown.diagnosis or Diagnosis() for shown in diagnosed]
    records = [shown.run.record for shown in diagnosed if shown.run.record is not None]
    return FolderRuns(runs, scans, settings, finding_groups(diagnoses, records))


def folder_page(
    content: FolderRuns, title: str, index: IndexedRuns, folder: Path, sentence_of: Callable[[ShownRun], str]
) -> bytes:
    """Return the page of some runs; the index of a folder has the descriptions of their metrics."""

    def curves_of(place: int, names: Sequence[str]) -> Mapping[str, BinnedCurve]:
        scan = content.scans[place]
        return {} if scan is None or scan.problem else index.curves(content.runs[place].run.path, names)

    def explain(names: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        return index.explained(folder, names)

    return page_of_folder(content, [sentence_of(shown) for shown in content.runs], title, curves_of, explain)


def _every(name: str) -> bool:
    return True
