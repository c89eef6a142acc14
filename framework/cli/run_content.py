"""Runs as plain values, for the JSON of ``loopscope ls`` and ``loopscope show``."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from typing import Any, TypedDict

from ..console import final_numbers
from ..doctor import Diagnosis, diagnose
from ..durable_files import read_json
from ..errors import UsageError
from ..hooks import SEVERITIES
from ..report import FoundRun
from ..runs import ATTACHED, SUMMARY, RunRecord, checked_fields, read_alerts, read_history


class NotChecked(TypedDict):
    """What the diagnosis at the end of a run did not check."""

    reason: str
    sentences: Sequence[str]


def run_content(run: FoundRun) -> dict[str, Any]:
    """Return the state and the result of a run, without what is unknown."""
    record, summary, length = run.record, run.summary, run.length
    content = {
        "run": str(run.path),
        "experiment": record and record.experiment,
        "strategy": record and record.strategy,
        "seed": record and record.seed,
        "state": run.state,
        "problem": run.problem or None,
        "error": summary.get("error"),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(run.began)),
        "seconds": summary["seconds"]["training"] if summary else None,
        "epochs": length and length[0],
        "steps": length and length[1],
        "treatments": list(record.treatments) if record else None,
        "final": {**final_numbers(summary), **summary["metrics"]} if summary else None,
    }
    return {name: rounded(value) for name, value in content.items() if value is not None}


def rounded(value: Any) -> Any:
    """Return a value with six significant digits in place of floats; the record has all digits.

    >>> rounded({"loss": 0.123456789, "steps": 3})
    {'loss': 0.123457, 'steps': 3}
    """
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def shown_content(runs: Sequence[FoundRun], patterns: Sequence[str], points: int, *, is_single: bool) -> dict[str, Any]:
    """Return the content of ``loopscope show``: one run, or a short form of several."""
    if not is_single:
        return {"runs": [{**run_content(run), **_metrics(run, patterns, points)} for run in runs]}
    (run,) = runs
    content = run_content(run)
    if patterns:
        return {"run": content["run"], "state": run.state, **_metrics(run, patterns, points)}
    diagnosis = diagnosis_of(run)
    if diagnosis is not None:
        content |= {"verdict": diagnosis.verdict, "checked": not diagnosis.unchecked}
        content |= {"findings": [finding.as_dict() for finding in diagnosis], "missing": list(diagnosis.missing)}
    counts = dict.fromkeys(SEVERITIES, 0)
    for alert in read_alerts(run.path):
        counts[alert["severity"]] += not alert.get("is_over")
    content["alerts"] = counts
    if run.record is not None:
        content |= {"options": recorded_options(run.record), "hooks": list(run.record.hooks)}
    if run.summary:
        names = {"hook_errors": "hook", "sink_errors": "sink"}
        failed = {name: [error[kind] for error in run.summary.get(name, ())] for name, kind in names.items()}
        content |= {"hooks_left_out": [*run.summary.get("hooks_left_out", ())], **failed}
        content["initial"] = run.summary["initial"]
    with suppress(UsageError):
        content |= _metrics(run, [], points)
    return content


def _metrics(run: FoundRun, patterns: Sequence[str], points: int) -> dict[str, Any]:
    """Return the range of each metric, and some of its values if patterns select it."""
    if not patterns:
        return {"metrics": [_entry(name, values) for name, values in _values(run, run.names).items()]}
    series = _values(run, run.matching(patterns))
    return {"metrics": [_entry(name, values) | _thinned(values, points) for name, values in series.items()]}


def _values(run: FoundRun, names: Sequence[str]) -> dict[str, list[tuple[int, Any]]]:
    """Return the steps and values of metrics."""
    values: dict[str, list[tuple[int, Any]]] = {name: [] for name in names}
    for _, step, _, name, value in run.points:
        if name in values:
            values[name].append((step, value))
    return values


def _entry(name: str, values: Sequence[tuple[int, Any]]) -> dict[str, Any]:
    return {"name": name, "points": len(values), "first": rounded(values[0][1]), "last": rounded(values[-1][1])}


def _thinned(values: Sequence[tuple[int, Any]], points: int) -> dict[str, Any]:
    """Return the extremes, and at most ``points`` values at equal distances, the last one among them."""
    numbers = [value for _, value in values if isinstance(value, (int, float)) and value == value]
    extremes = {"lowest": rounded(min(numbers)), "highest": rounded(max(numbers))} if numbers else {}
    last, count = len(values) - 1, min(points, len(values))
    chosen = [values[last - round(index * last / max(count - 1, 1))] for index in reversed(range(count))]
    return {**extremes, "steps": [step for step, _ in chosen], "values": [rounded(value) for _, value in chosen]}


def diagnosis_of(run: FoundRun) -> Diagnosis | None:
    """Return the diagnosis in the summary of a run, or a new one; ``None`` for a run that cannot be read."""
    if run.record is None:
        return None
    problems = [run.problem] if run.problem else []
    with suppress(UsageError):
        if run.summary:
            content = read_json(run.path / SUMMARY)
            if "not_checked" in content:
                hints = {"findings": Sequence[Any], "not_checked": NotChecked}
                fields = checked_fields(content, hints, run.path / SUMMARY)
                reason, sentences = fields["not_checked"]["reason"], fields["not_checked"]["sentences"]
                return replace(Diagnosis.of(fields["findings"]), missing=[*problems, *sentences], unchecked=reason)
        diagnosis = diagnose(read_history(run.path))
        return replace(diagnosis, missing=[*problems, *diagnosis.missing])
    return None


def recorded_options(record: RunRecord) -> dict[str, Any]:
    """Return the options that differ from the defaults or the preset; all options if the experiment is unknown."""
    given = {**(record.options or record.config)}
    if isinstance(given.get("seed"), list):  # the seeds of all runs of the command
        given["seed"] = record.config.get("seed")
    if record.changed is not None:
        given = {name: given[name] for name in record.changed if name in given}
    elif record.experiment != ATTACHED:  # a record of an earlier version
        from ..hooks import ExperimentRegistry
        from .options import changed_options

        import_module("loopscope.experiments")  # and with it torch
        with suppress(UsageError):
            given = changed_options(ExperimentRegistry.get(record.experiment), given)
    return {name: value for name, value in given.items() if name != "strategy"}
