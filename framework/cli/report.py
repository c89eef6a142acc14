"""``loopscope report RUN...``: writes a page with runs side by side, which a browser opens without a network."""

import os
from collections.abc import Sequence
from pathlib import Path

from ..console import result_line
from ..durable_files import is_there, write_whole
from ..errors import require_package
from ..report import MARK, ShownRun, page_of, shown_runs
from ..runs import require, run_folders
from .parser import CommandParser, write_line

PAGE = "report.html"
MIB = 2**20
UNENDED = {"running": "still running", "killed": "was killed, or ended without a summary", "damaged": "is damaged"}


def report(words: Sequence[str]) -> None:
    """Write the page that the words ask for; raises :class:`UsageError` before anything is written."""
    parser = CommandParser("report RUN... [-o PAGE]", "Write a page with curves and tables of runs, for a browser.")
    parser.add_argument("RUN", nargs="*", help="the folder of a run, or of an experiment: all its strategies")
    parser.add_argument("-o", "--out", metavar="PAGE", default=PAGE, help=f"where to write, by default {PAGE}")
    parser.add_argument("--overwrite", action="store_true", help="write over whatever lies at --out")
    parser.add("most_mib", int, "records with more MiB are not read", default=256)
    given = parser.defaults | parser.parse(words)
    require(bool(given["RUN"]), "loopscope report needs RUN, the folder of a run: loopscope report RUN... -o page.html")
    require(given["most_mib"] >= 1, f"--most-mib is {given['most_mib']}; it must be a whole number, 1 or more.")
    path = Path(given["out"])
    _check_place(path, overwrite=given["overwrite"])
    require_package("plotly", "loopscope report", "report")
    folders = [folder for run in given["RUN"] for folder in run_folders(Path(run), "report")]
    runs = shown_runs(list({folder.resolve(): folder for folder in folders}.values()), given["most_mib"] * MIB)
    experiments = dict.fromkeys(shown.run.record.experiment for shown in runs if shown.run.record)
    title = f"{', '.join(experiments) or 'Runs'}: {', '.join(shown.label for shown in runs)}"
    page = page_of(runs, [sentence_of(shown) for shown in runs], title)
    write_whole(path, lambda file: file.write(page))
    for problem in (problem for shown in runs for problem in shown.problems):
        write_line(problem)
    write_line(f"{path} is written: {len(page) / 1e6:.1f} MB, to be opened in a browser.")


def sentence_of(shown: ShownRun) -> str:
    """Say what a run was, how it ended, and what it was treated with."""
    run, last = shown.run, shown.recording.last
    what = f"{run.record.experiment}/{run.record.strategy}" if run.record else str(run.path)
    if run.summary:
        how = result_line(run.summary).plain.removeprefix(f"{run.summary['strategy']}: ")
        how += f"; error: {run.summary['error']}" if run.summary["error"] else ""
    else:
        how = UNENDED[run.state] + (f", recorded up to epoch {last[0]:,}, step {last[1]:,}" if last else "")
    failed = ", ".join(str(each["hook"]) for each in run.summary.get("hook_errors", ()))
    parts = (how, f"treatments: {shown.treatments or 'none'}", f"failed hooks: {failed}" if failed else "")
    return f"{shown.label} ({what}): {'; '.join(filter(None, parts))}."


def _check_place(path: Path, *, overwrite: bool) -> None:
    """Raise :class:`UsageError` for a place where no page can be written, or where something else lies."""
    require(path.suffix.lower() in (".html", ".htm"), f"--out is {str(path)!r}; it must end in .html.")
    require(not path.is_dir(), f"{path} is a folder; --out takes the name of a file.")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    writable = above.is_dir() and os.access(above, os.W_OK | os.X_OK)
    require(writable, f"{path} cannot be written: {above} is not a writable folder.")
    if is_there(path) and not overwrite:
        ours = path.is_file() and os.access(path, os.R_OK) and MARK.encode() in path.read_bytes()[:200]
        require(ours, f"{path} is no report; --overwrite writes over it, --out names another place.")
