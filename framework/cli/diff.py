"""The command ``loopscope diff``: the first difference between two runs."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ..checkpoints import (
    Divergence,
    checkpoints_by_moment,
    differing_entries,
    leaf_values,
    open_checkpoint,
    read_content,
    read_digests,
)
from ..durable_files import read_tensors
from ..errors import UsageError
from ..report import differing_parts
from ..runs import ALL, RunFolder, RunRecord, differences, require, warn_of_changes
from .output import Output, ReportedError, with_output_options
from .parser import CommandParser


def diff_parser() -> CommandParser:
    """Build the parser of ``loopscope diff``."""
    parser = CommandParser(
        "diff RUN RUN",
        "Compare two runs bit for bit: their common checkpoints, the metrics in their JSONL files, and their final "
        "weights. Report the step and the tensor of the first difference, and exit with status 1 if there is one.",
    )
    parser.add_argument("RUN", nargs="*", help="the folder of one strategy, OUTPUT/EXPERIMENT/STRATEGY")
    return with_output_options(parser)


def diff(words: Sequence[str]) -> None:
    """Compare two runs.

    Raises:
        ReportedError: if the runs differ.
        UsageError: if the runs have nothing to compare.
    """
    given = diff_parser().complete(words)
    runs = given["RUN"]
    remedy = "; loopscope verify RUN checks one run." if len(runs) == 1 else "."
    require(len(runs) == 2, f"loopscope diff takes the folders of two runs, but got {len(runs)}{remedy}")
    records = [RunRecord.read(Path(run)) for run in runs]
    for run in runs:
        warn_of_changes(Path(run), ALL)
    a, b = (RunFolder(Path(run), record.strategy) for run, record in zip(runs, records, strict=True))
    checked = [_checkpoints(a, b), _digests(a, b), _metrics(a, b), _weights(a, b)]
    compared = [text for text, _ in checked if text]
    problem = "cannot be compared: they share no checkpoint or digest of the same step, no JSONL and no final weights."
    require(bool(compared), f"{a.path} and {b.path} {problem}")
    difference = next((place for _, place in checked if place), None)
    left_out = _in_one_run(a, b)
    content = {
        "runs": runs,
        "identical": difference is None,
        "difference": difference,
        "compared": [*compared, *left_out],
        "settings": [
            {"part": row["part"], "name": row["name"], **row["values"]}
            for row in differing_parts(dict(zip("ab", records, strict=True)))
        ],
    }
    lines = partial(_lines, content, complete=not left_out)
    Output.of("diff", words, given).write(content, {"settings": "first"}, lines)
    if difference is not None:
        raise ReportedError(f"The runs differ {difference}.")


def _lines(content: Mapping[str, Any], *, complete: bool) -> list[str]:
    settings = [f"{row['part']}: {row['name']}: {row['a']} / {row['b']}" for row in content["settings"]]
    conclusion = "The runs are identical." if complete else "What both runs have is identical."
    return [*settings, *content["compared"], *([conclusion] if content["identical"] else [])]


def _checkpoints(a: RunFolder, b: RunFolder) -> tuple[str, str]:
    left, right = checkpoints_by_moment(a.checkpoints), checkpoints_by_moment(b.checkpoints)
    common = [moment for moment in left if moment in right]
    for epoch, step in common:
        contents = [read_content(open_checkpoint(checkpoints[epoch, step])) for checkpoints in (left, right)]
        if names := differing_entries(*contents):
            return f"Checkpoints: {', '.join(names[:5])} differ at step {step:,}.", str(Divergence(epoch, step, names))
    steps = ", ".join(f"{step:,}" for _, step in common)
    return (f"Checkpoints of steps {steps}: identical." if common else ""), ""


def _digests(a: RunFolder, b: RunFolder) -> tuple[str, str]:
    left, right = read_digests(a.path), read_digests(b.path)
    common = [moment for moment in left if moment in right]
    for epoch, step in common:
        if names := left[epoch, step].differing_entries(right[epoch, step]):
            return f"Digests: {', '.join(names[:5])} differ at step {step:,}.", str(Divergence(epoch, step, names))
    return (f"Digests of {len(common)} steps: identical." if common else ""), ""


def _metrics(a: RunFolder, b: RunFolder) -> tuple[str, str]:
    paths = [run.path / f"{run.strategy}.jsonl" for run in (a, b)]
    if not all(path.is_file() for path in paths):
        return "", ""
    left, right = [path.open(encoding="utf-8", errors="replace") for path in paths]
    with left, right:
        for number, (line_a, line_b) in enumerate(zip_longest(left, right), start=1):
            if line_a != line_b:
                return _first_metric(number, line_a, line_b)
    return "Metrics in JSONL: identical.", ""


def _first_metric(number: int, line_a: str | None, line_b: str | None) -> tuple[str, str]:
    if line_a is None or line_b is None:
        return f"Metrics in JSONL: one file ends before line {number}.", f"in the number of metrics, line {number}"
    try:
        rows = [dict(json.loads(line).items()) for line in (line_a, line_b)]
        a, b = ({name: json.dumps(item) for name, item in row.items()} for row in rows)
    except (ValueError, AttributeError, RecursionError):  # not JSON, not an object, or nested too deep
        return f"Metrics in JSONL: line {number} is truncated or damaged.", f"in the metrics, line {number}"
    name = next((item.name for item in differences(a, b)), "the order of metrics")
    step = _first_step(rows[0].get(name), rows[1].get(name), rows[0].get("step"))
    return f"Metrics in JSONL: {name} differs at step {step} (line {number}).", f"by step {step}, in the metric {name}"


def _first_step(a: Any, b: Any, default: Any) -> Any:
    """Return the first step at which two series of steps differ; ``default`` if one of them is no series."""
    if not all(isinstance(item, dict) and {"steps", "values"} <= item.keys() for item in (a, b)):
        return default
    points = [zip(item["steps"], map(json.dumps, item["values"]), strict=False) for item in (a, b)]
    for point_a, point_b in zip_longest(*points):
        if point_a != point_b:
            return min(point[0] for point in (point_a, point_b) if point is not None)
    return default


def _weights(a: RunFolder, b: RunFolder) -> tuple[str, str]:
    if not (a.weights.is_file() and b.weights.is_file()):
        return "", ""
    if names := differing_entries(*({"state": _loaded(run.weights)} for run in (a, b))):
        return f"Final weights: {', '.join(names[:5])} differ.", f"by the final weights, first in {names[0]}"
    return "Final weights: identical.", ""


def _in_one_run(a: RunFolder, b: RunFolder) -> list[str]:
    """Return a sentence if only one run has final weights, so that they were not compared."""
    owners = [run.path for run in (a, b) if run.weights.is_file()]
    return [f"Only {owners[0]} has final weights: not compared."] if len(owners) == 1 else []


def _loaded(path: Path) -> dict[str, Any]:
    """Read the weights by name; raises :class:`UsageError` if the file contains anything else."""
    try:
        return dict(leaf_values(read_tensors(path)))
    except Exception as error:
        raise UsageError(f"{path} cannot be read as weights: it is damaged, or loopscope did not write it.") from error
