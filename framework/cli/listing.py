"""The commands ``loopscope ls`` and ``loopscope show``: the runs in a folder, and one run with its metrics."""

import shlex
import textwrap
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from ..console import (
    duration_text,
    final_numbers,
    in_columns,
    number_text,
    place_text,
    printable,
    result_line,
    shortened,
    value_text,
)
from ..doctor import StepTimes, finding_lines, memory_text
from ..errors import UsageError, counted
from ..many_runs import IndexedRuns, indexed_runs
from ..report import EVALUATED_BY, FoundRun, inspect_run
from ..runs import ATTACHED_RUNS, SETTINGS, ExperimentConfig, RunRecord, require, run_folders
from .job_listing import ListedJobs, watch_lines
from .output import Output, with_output_options
from .parser import NAMES, CommandParser, given_run, line_width
from .run_content import diagnosis_of, recorded_options, run_content, shown_content

WIDE = 100  # columns of a terminal that shows full dates, and the longest line of text
LARGEST_FAMILY = 3  # a family with more metrics than this is shown in one line
MOST_LINES = 40  # lines of show, unless --all is given
MOST_FINDINGS = 3
DEFAULT_FOLDERS = (str(ExperimentConfig.output_dir), ATTACHED_RUNS)
"""Folders of the runs of experiments, and of attached runs without ``out=``, in the current folder."""
CUT = ("metrics", "missing", "hooks_left_out", "hooks", "options", "findings", "runs")
"""Fields of show's JSON that may be cut."""


def ls_parser() -> CommandParser:
    """Build the parser of ``loopscope ls``."""
    parser = CommandParser("ls [FOLDER]", "List the runs in FOLDER and its subfolders, one per line.")
    folders = " and ".join(DEFAULT_FOLDERS)
    parser.add_argument("FOLDER", nargs="*", default=[], help=f"the folder to search (default: {folders})")
    parser.add("watch", bool, "repeat the list until no run is in progress and no job waits", default=False)
    return with_output_options(parser, json_text="write one JSON object, the newest run first")


def ls(words: Sequence[str]) -> None:
    """List the runs in a folder; raises :class:`UsageError` if it has none."""
    given = ls_parser().complete(words)
    folders = given["FOLDER"]
    require(len(folders) <= 1, f"loopscope ls takes one folder, but got {len(folders)}: {', '.join(folders)}.")
    require(not (given["watch"] and given["json"]), "--watch shows text; remove --json, or call ls without --watch.")
    width = line_width()

    def look() -> tuple[list[FoundRun], ListedJobs]:
        jobs = ListedJobs.of(map(Path, folders or DEFAULT_FOLDERS))
        find = partial(runs_in, index, Path(folders[0])) if folders else partial(runs_by_default, index)
        runs = find(or_none=bool(jobs.jobs))
        waiting = jobs.not_begun(runs)
        return sorted([*runs, *waiting], key=attrgetter("path.parts")) if waiting else runs, jobs

    def lines_of(runs: Sequence[FoundRun], jobs: ListedJobs) -> list[str]:
        return list(in_columns([_row(run, width, jobs.text(run)) for run in runs], width, flexible=("run", "final")))

    with indexed_runs() as index:
        if given["watch"]:
            watch_lines(look, lines_of)
            return
        runs, jobs = look()
        newest_first = sorted(runs, key=lambda run: -run.began)
        shown = [{**run_content(run), **jobs.content(run)} for run in newest_first] if given["json"] else []
        content = {"count": len(runs), "runs": shown}
        Output.of("ls", words, given).write(content, {"runs": "first"}, partial(lines_of, runs, jobs))


def runs_in(
    index: IndexedRuns, folder: Path, read: Collection[str] = SETTINGS, *, or_none: bool = False
) -> list[FoundRun]:
    """Return the runs in a folder and its subfolders; raises :class:`UsageError` for none, unless ``or_none``."""
    runs = index.find(folder, read) if folder.is_dir() else []
    problem = "has no runs" if folder.is_dir() else "is not a folder" if folder.exists() else "does not exist"
    require(or_none or bool(runs), f"{folder} {problem}; loopscope ls FOLDER lists the runs in FOLDER.")
    return runs


def runs_by_default(index: IndexedRuns, *, or_none: bool = False) -> list[FoundRun]:
    """Return the runs in the default folders of experiments and attached runs.

    Raises:
        UsageError: if there are none, unless ``or_none``.
    """
    runs = [run for name in DEFAULT_FOLDERS if Path(name).is_dir() for run in index.find(Path(name))]
    folders = " and ".join(DEFAULT_FOLDERS)
    require(
        or_none or bool(runs), f"There are no runs in {folders}; loopscope ls FOLDER lists the runs in another folder."
    )
    return runs


def _row(run: FoundRun, width: int, job: str = "") -> dict[str, str]:
    """Return the texts of a run, by column."""
    length, began = run.length, time.localtime(run.began)
    date = "%Y-%m-%d %H:%M" if width >= WIDE else "%H:%M" if began[:3] == time.localtime()[:3] else "%m-%d"
    seconds = run.summary["seconds"]["training"] if run.summary else max(0.0, time.time() - run.began)
    numbers = {**final_numbers(run.summary), **run.summary["metrics"]} if run.summary else {}
    val_first = sorted(numbers.items(), key=lambda item: not item[0].startswith("val_"))
    row = {
        "run": str(run.path),
        "state": shortened(run.state, len("interrupted")),
        "job": job,
        "ep/steps": (f"{length[0]:,}/{length[1]:,}" if length[0] else f"{length[1]:,}") if length else "",
        "time": duration_text(seconds) if run.summary or run.state == "running" else "",
        "began": time.strftime(date, began) if run.began else "",
        "treatments": ", ".join(run.record.treatments) if run.record else "",
        "final": run.problem.replace(f"{run.path}/", "")
        or _listed({name.rpartition("/")[2]: value for name, value in val_first}),
    }
    return {name: printable(text) for name, text in row.items()}


def _listed(numbers: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {number_text(value)}" for name, value in numbers.items())


def show_parser() -> CommandParser:
    """Build the parser of ``loopscope show``."""
    parser = CommandParser(
        "show RUN [--metrics PATTERN...]", "Show the findings, the options, the result and the metrics of a run."
    )
    about = (
        "the folder of a run, OUTPUT_DIR/EXPERIMENT/STRATEGY, or of an experiment for a short form of its strategies"
    )
    parser.add_argument("RUN", nargs="*", help=about)
    metrics = "show only these metrics, one per line: full names or quoted patterns"
    parser.add("metrics", NAMES, metrics, default=[], metavar="PATTERN")
    parser.add("points", int, "with --json and --metrics: show N values of each, at equal distances", default=12)
    return with_output_options(parser)


def show(words: Sequence[str]) -> None:
    """Show a run with its metrics, or a short form of all runs of an experiment."""
    given = show_parser().complete(words)
    folder = given_run(given, "show")
    require(given["points"] >= 1, f"--points is {given['points']}; it must be at least 1.")
    patterns = given["metrics"]
    runs = [inspect_run(path) for path in run_folders(folder, "show")]
    for run in runs:
        require(run.record is not None or run.path != folder, run.problem)
    output = Output.of("show", words, given)
    if output.is_json:
        content = shown_content(runs, patterns, given["points"], is_single=runs[0].path == folder)
        output.write(content, {name: "first" for name in CUT if name in content}, list)
        return
    lines = [line for run in runs for line in _lines_of(run, patterns, short=run.path != folder)]
    if not given["all"] and len(lines) > MOST_LINES:
        left = len(lines) - MOST_LINES + 1
        lines = [*lines[: MOST_LINES - 1], f"  ... {left:,} more lines: {output.more}"]
    output.write_lines([shortened(line, line_width(), keep_end=False) for line in lines])


def _lines_of(run: FoundRun, patterns: Sequence[str], *, short: bool) -> Iterator[str]:
    """Yield the lines of a run: its result, what is wrong, its fields, and its metrics."""
    width = min(line_width(), WIDE)
    ended = result_line(run.summary).plain.partition(": ")[2] if run.summary else run.state
    yield from textwrap.wrap(f"{run.path}: {ended}", width, subsequent_indent="    ")
    if not patterns:
        yield from _finding_lines(run, width, short=short)
    for label, text in () if patterns else _fields(run, short=short):
        indent = f"  {label:12} "
        yield from textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=" " * len(indent))
    if patterns or not short:
        yield from _metrics(run, patterns)


def _finding_lines(run: FoundRun, width: int, *, short: bool) -> Iterator[str]:
    """Yield the verdict of the diagnosis, and the most important findings; nothing for a run that cannot be read."""
    diagnosis = diagnosis_of(run)
    if diagnosis is None:
        return
    problems = diagnosis.at_least("warning")
    if short or not problems:
        remarks = len(diagnosis) - len(problems)
        hint = f" {counted(remarks, 'remark')}: loopscope doctor {shlex.quote(str(run.path))}" if remarks else ""
        text = diagnosis.verdict + (hint if not problems else "")
        indent = f"  {'diagnosis':12} "
        yield from textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=" " * len(indent))
        return
    for finding in problems[:MOST_FINDINGS]:
        yield from (f"  {line}" for line in finding_lines(finding, width - 2))
    if left := len(diagnosis) - len(problems[:MOST_FINDINGS]):
        yield f"  {left:,} more: loopscope doctor {shlex.quote(str(run.path))}"


def _fields(run: FoundRun, *, short: bool) -> Iterator[tuple[str, str]]:
    """Yield the fields of a run with their labels; the short form has only problems and treatments."""
    record, summary = run.record, run.summary
    failed = [f"{error['hook']}: {error.get('error')}" for error in summary.get("hook_errors", ())]
    sinks = [f"{error['sink']} at step {error['step']:,}: {error['error']}" for error in summary.get("sink_errors", ())]
    fields = {"problem": run.problem, "error": summary.get("error"), "failed hooks": "; ".join(failed)}
    fields["failed sinks"] = "; ".join(sinks)
    if record is not None:
        fields["treatments"] = record.treatments_text if record.treatments else ""
    if record is not None and not short:
        fields["began"] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.began))
        fields["options"] = ", ".join(_option_texts(record)) or "the defaults"
        left_out = [*summary.get("hooks_left_out", ())]
        fields["hooks"] = ", ".join(name for name in record.hooks if name not in left_out) or "none"
        fields["left out"] = ", ".join(left_out)
        fields["so far"] = place_text(*run.length) if run.length and not summary else ""
        fields["a step"] = str(StepTimes.of(summary.get("step_time")) or "")
        fields["peak memory"] = memory_text(summary.get("peak_memory"))
        fields |= {part: _listed(summary[part]) for part in ("initial", "final") if summary}
    yield from ((label, text) for label, text in fields.items() if text)


def _option_texts(record: RunRecord) -> Iterator[str]:
    for name, value in recorded_options(record).items():
        yield f"{name} {' '.join(map(str, value)) if isinstance(value, list) else value}"


def _metrics(run: FoundRun, patterns: Sequence[str]) -> Iterator[str]:
    """Yield a line per metric, by hook: number of points, first and last value; large families in one line."""
    values: dict[str, list[Any]] = {}
    try:
        families = {name: "/".join(name.split("/")[:2]) for name in run.matching(patterns)}
        sizes = Counter(() if patterns else families.values())
        large = {family: f"in {count:,} metrics" for family, count in sizes.items() if count > LARGEST_FAMILY}
        rows = {name: family if family in large else name for name, family in families.items()}
        for *_, name, value in run.points:
            if name in rows:
                values.setdefault(rows[name], []).append(value)
    except UsageError as error:
        require(not patterns, str(error))
        yield f"  metrics      {error}"
        return
    yield f"  metrics      {len(families):,}; number of points, first and last value of each:"
    hooks = list(dict.fromkeys([EVALUATED_BY, *(name.partition("/")[0] for name in values)]))
    longest = max(map(len, values), default=0) + len("/**")
    for name in sorted(values, key=lambda name: hooks.index(name.partition("/")[0])):
        ends = large.get(name, " → ".join(map(value_text, (values[name][0], values[name][-1]))))
        yield f"    {f'{name}/**' if name in large else name:{longest}} {len(values[name]):>7,}  {ends}"
