"""The command ``loopscope compare RUN...``: runs side by side, as tables, JSON or Markdown."""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..console import in_columns, number_text, printable, shortened, split_columns
from ..errors import listed, require
from ..many_runs import indexed_runs
from ..report import compare_runs, run_labels
from ..runs import READ
from .listing import WIDE, runs_in
from .output import Output, with_output_options
from .parser import NAMES, UNBOUNDED, CommandParser, line_width

MOST_METRICS, MOST_ROWS, LONGEST_VALUE = 12, 100, 60  # limits of a table; JSON has everything
Row = Mapping[str, Any]


def compare_parser() -> CommandParser:
    """Build the parser of ``loopscope compare``."""
    parser = CommandParser(
        "compare RUN... [--metrics PATTERN...] [--json | --markdown] [--all]",
        "Compare runs: final and best values, differing settings, and the first step at which records differ; for "
        "several seeds also mean, deviation and interval, and whether groups differ.",
    )
    parser.add_argument("RUN", nargs="*", help="the folder of a run, or a folder with runs at any depth")
    metrics = "full names of metrics, or quoted patterns (default: the evaluation metrics)"
    parser.add("metrics", NAMES, metrics, default=[], metavar="PATTERN")
    with_output_options(parser, json_text="write one JSON object, with --all with everything")
    parser.add_argument("--markdown", action="store_true", help="write Markdown tables, which are not cut")
    return parser


def compare(words: Sequence[str]) -> None:
    """Compare runs; raises :class:`UsageError` for fewer than two."""
    given = compare_parser().complete(words)
    require(bool(given["RUN"]), "loopscope compare needs RUN...: folders of runs, or folders that contain runs.")
    require(not (given["json"] and given["markdown"]), "--json and --markdown exclude each other.")
    with indexed_runs() as index:
        runs = {run.path.resolve(): run for folder in given["RUN"] for run in runs_in(index, Path(folder), READ)}
        scan_of = partial(index.scan, is_default=not given["metrics"])
        difference_of = index.first_difference
        comparison = compare_runs([*runs.values()], given["metrics"], scan_of=scan_of, difference_of=difference_of)
    if given["markdown"] and given["max_bytes"] is None:
        given["max_bytes"] = 0
    fields = ("first_differences", "differences", "tests", "spreads", "sentences", "runs")
    output = Output.of("compare", words, given)
    lines = partial(_lines, comparison, last=bool(given["metrics"]), is_markdown=given["markdown"])
    output.write(comparison, dict.fromkeys(fields, "first"), lines)


def _lines(comparison: dict[str, Any], *, last: bool, is_markdown: bool) -> Iterator[str]:
    lay_out, mark = (_markdown, "## ") if is_markdown else (_columns, "")
    for title, rows in _tables(comparison, last=last).items():
        texts = [{name: printable(_text(value)) for name, value in row.items()} for row in rows[:MOST_ROWS]]
        more = [f"{len(rows) - MOST_ROWS:,} more rows with --json --all."] if len(rows) > MOST_ROWS else []
        yield from [f"{mark}{title}", "", *lay_out(texts), *more, ""] if rows else ()
    width = min(line_width(), WIDE)
    for sentence in comparison["sentences"]:
        yield from [f"- {_escaped(sentence)}"] if is_markdown else textwrap.wrap(sentence, width)


def _tables(comparison: Mapping[str, Any], *, last: bool) -> dict[str, list[Row]]:
    """Return the rows of each table by its title; the first cell of a row identifies it."""
    names = list(dict.fromkeys(name for run in comparison["runs"] for name in run["metrics"]))
    labels = run_labels([Path(name) for name in names]) if names else []
    short = dict(zip(names, labels if len({*labels}) == len(names) else names, strict=True))
    if len(names) > MOST_METRICS:
        comparison["sentences"].append(f"{len(names) - MOST_METRICS:,} more metrics with --json --all.")

    def seeds_row(row: Row) -> Row:
        kind, _, name = row["number"].partition(" ")
        groups = row.get("group") or f"{row['a']} − {row['b']}"
        others = {name: value for name, value in row.items() if name not in ("number", "group", "a", "b")}
        return {"number": f"{groups}: {kind} {short.get(name, name)}", **others}

    other = next((f" from {entry['other']}" for entry in comparison["first_differences"]), "")
    differ = [(f"{entry['part']} {entry['name']}", _by_value(entry["values"])) for entry in comparison["differences"]]
    firsts: list[Row] = [{"run": entry["run"], "at": _where(entry)} for entry in comparison["first_differences"]]
    tests = list(map(seeds_row, comparison["tests"]))
    tested = sum(test["p"] is not None for test in tests)
    return {
        "Runs": [_run_row(run, names[:MOST_METRICS], short, last=last) for run in comparison["runs"]],
        "Over seeds": list(map(seeds_row, comparison["spreads"])),
        f"Do groups differ? {tested} tests; holm is p after Holm's correction": tests,
        "Differing settings": [{"": name, "runs": values} for name, values in differ],
        f"First differing step{other}": firsts,
    }


def _run_row(run: Row, names: Sequence[str], short: Mapping[str, str], *, last: bool) -> Row:
    row = {name: run[name] for name in ("run", "state", "epochs", "steps", "target_epoch", "treatments")}
    row |= {f"final {name}": value for name, value in run["final"].items()}
    for name in names:
        metric = run["metrics"].get(name, {"best": None, "last": None})
        best = f"{_text(metric['best'])} at {metric['best_step']:,}" if metric["best"] is not None else None
        row |= {f"last {short[name]}": metric["last"]} if last else {}
        row |= {f"best {short[name]}": best}
    return row


def _by_value(values: Mapping[str, Any]) -> str:
    runs: dict[str, list[str]] = {}
    for run, value in values.items():
        runs.setdefault("none" if value is None else shortened(str(value), LONGEST_VALUE), []).append(run)
    return "; ".join(f"{value} ({listed(labels)})" for value, labels in runs.items())


def _where(parting: Row) -> str:
    same = f"nowhere: {parting['points']:,} values of {parting['common']:,} metrics are equal"
    where = same if parting["points"] else "no metric has a value at the same step in both"
    where = where if parting["step"] is None else f"step {parting['step']:,}: {listed(parting['metrics'])}"
    return parting["problem"] or where


def _text(value: Any) -> str:
    if isinstance(value, (int, float)):
        return number_text(value)
    return "" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _columns(rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield tables with all columns that have a value in some row; the last of two columns is cut to fit."""
    for part in split_columns(_filled(rows), width := line_width()):
        heading, *lines = zip(*part, strict=True)
        table = [dict(zip(heading, line, strict=True)) for line in lines]
        shown = in_columns(table, UNBOUNDED if len(part) > 2 else width, (heading[0], heading[-1]))
        yield from (shortened(line, width, keep_end=False) for line in shown)


def _markdown(rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    heading, *lines = zip(*_filled(rows), strict=True)
    for cells in (heading, ["---"] * len(heading), *lines):
        yield f"| {' | '.join(map(_escaped, cells))} |"


def _filled(rows: Sequence[Mapping[str, str]]) -> list[list[str]]:
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if any(row.get(name) for row in rows)]
    return [[name, *(row.get(name, "") for row in rows)] for name in names]


def _escaped(text: str) -> str:
    """Escape a text so that Markdown shows it literally."""
    return re.sub(r"([\\`*\[\]<>|&!~])", r"\\\1", text)
