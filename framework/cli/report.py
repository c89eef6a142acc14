"""The command ``loopscope report``: an HTML page that compares runs and works offline."""

import os
from collections.abc import Sequence
from importlib import import_module
from operator import methodcaller
from pathlib import Path

from ..console import place_text, result_line
from ..durable_files import write_atomically
from ..errors import counted
from ..many_runs import indexed_runs
from ..optional_packages import require_package
from ..report import MARK, MOST_RUNS, ShownRun, elided, page_of, read_shown, run_labels
from ..runs import ATTACHED, require
from .folder_report import folder_content, folder_page
from .parser import CommandParser, write_lines
from .plot import is_free

UNENDED = {"running": "still running", "killed": "killed, or ended without a summary", "damaged": "damaged"}


def report_parser() -> CommandParser:
    """Build the parser of ``loopscope report``."""
    parser = CommandParser("report RUN... [-o PAGE]", "Write an HTML page with curves and tables of runs.")
    parser.add_argument("RUN", nargs="*", help="the folder of a run, or a folder with runs at any depth")
    page = "the file to write (default: report.html)"
    parser.add_argument("-o", "--out", metavar="PAGE", default="report.html", help=page)
    parser.add_argument("--overwrite", action="store_true", help="overwrite an existing file at --out")
    parser.add("most_mib", int, "skip records larger than this many MiB", default=256)
    return parser


def report(words: Sequence[str]) -> None:
    """Write the requested page; raises :class:`UsageError` before anything is written."""
    given = report_parser().complete(words)
    require(bool(given["RUN"]), "loopscope report needs RUN, the folder of a run: loopscope report RUN... -o page.html")
    require(given["most_mib"] >= 1, f"--most-mib is {given['most_mib']}; it must be a whole number, 1 or more.")
    path = Path(given["out"])
    require(path.suffix.lower() == ".html", f"--out is {str(path)!r}; it must end in .html.")
    may_write = is_free(path, MARK) or given["overwrite"]
    require(may_write, f"{path} exists and is not a loopscope report; use --overwrite, or another --out.")
    require_package("plotly", "loopscope report")
    with indexed_runs() as index:
        found = [(Path(run), folder) for run in given["RUN"] for folder in index.folders(Path(run), "report")]
        folders = {folder.resolve(): folder for _, folder in found}
        labels, most = run_labels([*folders]), given["most_mib"] * 2**20
        title = title_of(labels, [*folders])
        if len(folders) > MOST_RUNS:
            content = folder_content([*folders.values()], labels, index, most)
            runs, page = content.runs, folder_page(content, title, index, found[0][0], sentence_of)
        else:
            import_module("loopscope.training_hooks")  # whose hooks describe their metrics
            shorter = elided(labels)
            runs = [read_shown(folder, label, most) for folder, label in zip(folders.values(), shorter, strict=True)]
            for shown, name in zip(runs, labels, strict=True):
                shown.name = name
            page = page_of(runs, [sentence_of(shown) for shown in runs], title)
    write_atomically(path, methodcaller("write", page))
    write_lines(*(problem for shown in runs for problem in shown.problems))
    write_lines(f"Wrote {path} ({len(page) / 1e6:.1f} MB); open it in a browser.")


def title_of(labels: Sequence[str], folders: Sequence[Path]) -> str:
    """Return the label of a single run, or the folder of several and their number."""
    if len(labels) == 1:
        return labels[0]
    return f"{os.path.basename(os.path.commonpath(folders)) or 'Runs'}: {counted(len(labels), 'run')}"


def sentence_of(shown: ShownRun) -> str:
    """Return a sentence with the experiment of a run, its result, its treatments and its failed hooks."""
    run, last = shown.run, shown.last
    title = f"{run.record.experiment}/{run.record.strategy}: " if run.record else f"{run.path}: "
    if run.record and run.record.experiment == ATTACHED:
        title = ""
    if run.summary:
        result = result_line(run.summary).plain.partition(": ")[2]
        result += f"; error: {run.summary['error']}" if run.summary["error"] else ""
    else:
        result = UNENDED[run.state] + (f", recorded up to {place_text(*last)}" if last else "")
    failed = ", ".join(str(error["hook"]) for error in run.summary.get("hook_errors", ()))
    treatments = f"treatments: {shown.treatments}" if shown.treatments else ""
    parts = (result, treatments, f"failed hooks: {failed}" if failed else "")
    return f"{title}{'; '.join(filter(None, parts))}."
