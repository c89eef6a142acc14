"""``loopscope report RUN...``: writes a page with runs side by side, which a browser opens without a network."""

from collections.abc import Sequence
from pathlib import Path

from ..console import result_line
from ..durable_files import write_whole
from ..errors import listed, require_package
from ..report import MARK, ShownRun, page_of, read_shown, run_labels
from ..runs import require, run_folders
from .parser import CommandParser, write_line
from .plot import is_free

UNENDED = {"running": "still running", "killed": "was killed, or ended without a summary", "damaged": "is damaged"}


def report(words: Sequence[str]) -> None:
    """Write the page that the words ask for; raises :class:`UsageError` before anything is written."""
    parser = CommandParser("report RUN... [-o PAGE]", "Write a page with curves and tables of runs, for a browser.")
    parser.add_argument("RUN", nargs="*", help="the folder of a run, or of an experiment: all its strategies")
    parser.add_argument("-o", "--out", metavar="PAGE", default="report.html", help="where to write")
    parser.add_argument("--overwrite", action="store_true", help="write over whatever lies at --out")
    parser.add("most_mib", int, "records with more MiB are not read", default=256)
    given = parser.defaults | parser.parse(words)
    require(bool(given["RUN"]), "loopscope report needs RUN, the folder of a run: loopscope report RUN... -o page.html")
    require(given["most_mib"] >= 1, f"--most-mib is {given['most_mib']}; it must be a whole number, 1 or more.")
    path = Path(given["out"])
    require(path.suffix.lower() == ".html", f"--out is {str(path)!r}; it must end in .html.")
    may_write = is_free(path, MARK) or given["overwrite"]
    require(may_write, f"{path} is no report; --overwrite writes over it, --out names another place.")
    require_package("plotly", "loopscope report", "report")
    folders = {at.resolve(): at for run in given["RUN"] for at in run_folders(Path(run), "report")}
    labels, most = run_labels([*folders]), given["most_mib"] * 2**20
    runs = [read_shown(folder, label, most) for folder, label in zip(folders.values(), labels, strict=True)]
    page = page_of(runs, [sentence_of(shown) for shown in runs], listed(labels, 3))
    write_whole(path, lambda file: file.write(page))
    for sentence in [problem for shown in runs for problem in shown.problems]:
        write_line(sentence)
    write_line(f"A page of {len(page) / 1e6:.1f} MB, for a browser: {path}")


def sentence_of(shown: ShownRun) -> str:
    """Say what a run was, how it ended, and what it was treated with."""
    run, last = shown.run, shown.last
    what = f"{run.record.experiment}/{run.record.strategy}" if run.record else str(run.path)
    if run.summary:
        how = result_line(run.summary).plain.partition(": ")[2]
        how += f"; error: {run.summary['error']}" if run.summary["error"] else ""
    else:
        how = UNENDED[run.state] + (f", recorded up to epoch {last[0]:,}, step {last[1]:,}" if last else "")
    failed = ", ".join(str(each["hook"]) for each in run.summary.get("hook_errors", ()))
    parts = (how, f"treatments: {shown.treatments or 'none'}", f"failed hooks: {failed}" if failed else "")
    return f"{shown.label} ({what}): {'; '.join(filter(None, parts))}."
