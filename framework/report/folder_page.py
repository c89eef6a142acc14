"""The page of a folder of many runs: findings by group, settings, and curves as bands over seeds."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from string import Template
from typing import Any

from ..doctor import Finding
from ..errors import counted, listed
from ..seed_groups import groups_of
from .folder_curves import Band, BinnedCurve
from .folder_settings import settings_picture
from .page import LARGEST_PAGE, LONGEST_SENTENCE, MARK, TEMPLATES, WAITING, environment_table, packed, plain_values
from .record_scan import Scan
from .relevance import LOSSES, MetricOrder, direction_of, finding_groups, last_part, ordered, recorded_name
from .run_reader import ShownRun
from .sections import badge, finding_list, severity_of, verdict_of
from .tables import RunStyle, grid, table, text

MOST_RUNS = 50
"""Runs of a page with the curves of each run; the page of more runs has those of groups."""
BEST_GROUPS, WORST_GROUPS = 12, 4
"""Groups with curves."""
MOST_METRICS = 24
MOST_NUMBERS, MOST_PROBLEMS, MOST_MEMBERS, MOST_ROWS = 4, 100, 8, 200
NOTE = (
    f"This is the page of more than {MOST_RUNS} runs. Curves are those of groups that differ only in their seeds: the "
    "median over the runs, and their lowest and highest values, in bins of up to 200 for each curve. For the curves, "
    f"alerts and rewinds of single runs, give loopscope report at most {MOST_RUNS} of them."
)
Explain = Callable[[Sequence[str]], Mapping[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class FolderRuns:
    """The content of the runs of a page, in the same order.

    Args:
        runs: the runs with their diagnoses and problems, without curves.
        scans: the summary of their metrics; ``None`` for an unreadable record.
        settings: their settings, by name.
        findings: the findings over all runs, with the settings with which they come.
    """

    runs: Sequence[ShownRun]
    scans: Sequence[Scan | None]
    settings: Sequence[Mapping[str, Any]]
    findings: Sequence[Mapping[str, Any]]

    def results(self, name: str) -> list[float]:
        """Return the last value of a metric in each run, of the training loss that of the summary; NaN without one."""
        results = []
        for shown, scan in zip(self.runs, self.scans, strict=True):
            final = shown.run.summary.get("training_loss") if name in LOSSES else None
            metric = scan.metrics.get(name) if scan else None
            value = final if final is not None else metric.last if metric and metric.last is not None else math.nan
            results.append(float(value))
        return results


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ only in their seeds: their places, and the style of their band."""

    label: str
    members: Sequence[int]
    style: RunStyle


def page_of_folder(
    content: FolderRuns,
    sentences: Sequence[str],
    title: str,
    curves_of: Callable[[int, Sequence[str]], Mapping[str, BinnedCurve]],
    explain: Explain,
) -> bytes:
    """Return the page, with as many metrics, of the most relevant first, as fit into ``LARGEST_PAGE``.

    Args:
        content: the runs.
        sentences: a sentence per run about its state.
        title: the heading.
        curves_of: returns the curves of a run, by its place, in these metrics.
        explain: returns the descriptions of metrics by their names.
    """
    from plotly.offline import get_plotlyjs

    runs = content.runs
    order = _order(content)
    deciding = _deciding(order)
    direction = -1 if last_part(deciding) == "reward" else direction_of(deciding)
    results = content.results(deciding)
    groups = _groups(runs, results, direction)
    drawn = groups if len(groups) <= BEST_GROUPS + WORST_GROUPS else [*groups[:BEST_GROUPS], *groups[-WORST_GROUPS:]]
    names = order.names[:MOST_METRICS]
    metrics = _metrics(names, drawn, curves_of, explain(names))
    findings = finding_groups(runs)
    marks = [_mark(group.number, group.finding, names) for group in findings]
    kind, verdict = verdict_of(runs)
    parts = {name: (TEMPLATES / f"page.{name}").read_text("utf-8") for name in ("html", "css", "js")}
    parts |= {"mark": MARK, "title": text(title), "library": packed(get_plotlyjs()), "kind": kind}
    parts |= {"verdict": badge(kind, verdict), "legend": _legend(drawn, len(groups)), "marks": "", "phases": ""}
    where = {group.number: _where(group.finding.id, [at for at, _ in group.members], content) for group in findings}
    charted = [mark["number"] for mark in marks if mark["metrics"]]
    note = f'<p class="note">{text(NOTE, LONGEST_SENTENCE)}</p>'
    parts |= {"cards": finding_list(findings, where, charted) + note, "rewinds": "", "seeds": ""}
    labels = [shown.label for shown in runs]
    parts["results"] = _group_table(groups, content, order, deciding)
    parts["alerts"] = settings_picture(labels, content.settings, deciding, results, direction) if deciding else ""
    records = [shown.run.record for shown in runs if shown.run.record]
    parts["tables"] = _run_table(content, sentences, deciding, results) + environment_table(records)
    problems = [f"{shown.label}: {problem}" for shown in runs for problem in shown.problems]
    lines = "".join(f"<li>{text(line, LONGEST_SENTENCE)}</li>" for line in problems[:MOST_PROBLEMS])
    left = len(problems) - MOST_PROBLEMS
    more = f"<p>{left:,} more.</p>" if left > 0 else ""
    parts["problems"] = f'<section><h2>Not shown</h2><ul id="problems">{lines}</ul>{more}</section>' * bool(problems)
    described = [{"label": group.label, "treatments": "", "alerts": [], **vars(group.style)} for group in drawn]
    data: dict[str, Any] = {"runs": described, "findings": marks, "main": order.main, "means": []}
    return _filled(parts, data, order, metrics, drawn)


def _filled(
    parts: dict[str, str],
    data: dict[str, Any],
    order: MetricOrder,
    metrics: list[dict[str, Any]],
    drawn: Sequence[RunGroup],
) -> bytes:
    count = len(order.names)
    while True:
        names = [metric["name"] for metric in metrics]
        data |= {"metrics": metrics, "leftOut": count - len(metrics)}
        data |= {"lead": [name for name in order.lead if name in names]}
        data |= {"first": [name for name in order.first if name in names]}
        opened = len(data["first"]) - len(data["lead"])
        parts |= {"keyplaces": WAITING * len(data["lead"]), "places": WAITING * opened}
        filled = parts | {"data": packed(json.dumps(data, allow_nan=False))}
        page = Template(parts["html"]).substitute(filled).encode("utf-8", "replace")
        if len(page) <= LARGEST_PAGE or not metrics:
            return page
        metrics = metrics[: len(metrics) // 2]


def _order(content: FolderRuns) -> MetricOrder:
    """Return the metrics with numbers by their relevance."""
    sizes: dict[str, int] = {}
    for scan in content.scans:
        for name, metric in scan.metrics.items() if scan else ():
            sizes[name] = max(sizes.get(name, 0), metric.points)
    findings = [group.finding for group in finding_groups(content.runs)]
    return ordered(sizes, findings)


def _deciding(order: MetricOrder) -> str:
    """Return the metric by which runs are compared: a reward, or the validation, or else the training loss."""
    rewards = [name for name in order.main if last_part(name) == "reward"]
    return next(iter([*rewards, *reversed(order.main)]), "")


def _groups(runs: Sequence[ShownRun], results: Sequence[float], direction: int) -> list[RunGroup]:
    """Return the groups of runs that differ only in their seeds, those with the best median result first."""
    names = groups_of({str(index): shown.run.record for index, shown in enumerate(runs) if shown.run.record})
    members: dict[str, list[int]] = {}
    for index, name in names.items():
        members.setdefault(name, []).append(int(index))

    def level(name: str) -> float:
        values = [results[index] for index in members[name]]
        worst = [direction * value if math.isfinite(value) else math.inf for value in values]
        return median(worst)

    ranked = sorted(members, key=level)
    return [RunGroup(name, members[name], RunStyle.numbered(place)) for place, name in enumerate(ranked)]


def _metrics(
    names: Sequence[str],
    groups: Sequence[RunGroup],
    curves_of: Callable[[int, Sequence[str]], Mapping[str, BinnedCurve]],
    infos: Mapping[str, Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Return the bands of each metric as plain values."""
    metrics: dict[str, dict[str, Any]] = {
        name: {**infos.get(name, {}), "name": name, "curves": [], "means": [], "maps": []} for name in names
    }
    for place, group in enumerate(groups):  # one group at a time is in memory
        curves = [curves_of(index, names) for index in group.members]
        for name in names:
            present = [run[name] for run in curves if name in run and len(run[name].steps)]
            if present:
                band = Band.over(present)
                parts = {"values": band.values, "low": band.low, "high": band.high}
                plain = {part: plain_values(numbers.tolist(), is_whole=False) for part, numbers in parts.items()}
                about = {"run": place, "steps": band.steps, "points": len(band.steps), "of": len(present)}
                metrics[name]["curves"].append(
                    {**about, **(plain if len(present) > 1 else {"values": plain["values"]})}
                )
    return [metric for metric in metrics.values() if metric["curves"]]


def _mark(number: int, finding: Finding, names: Sequence[str]) -> dict[str, Any]:
    """Return a finding for the charts, without its step, which is another in each run."""
    known = dict.fromkeys(names, 0)
    pairs = [(recorded_name(item.metric, known), item.limit) for item in finding.evidence]
    metrics = [
        {"name": name, "limit": limit if limit is not None and math.isfinite(limit) else None}
        for name, limit in pairs
        if name
    ]
    return {"number": number, "run": 0, "severity": finding.severity, "step": 0, "metrics": metrics}


def _where(name: str, members: Sequence[int], content: FolderRuns) -> str:
    """Return in how many runs a finding occurs, the settings with which it comes, and some of the runs."""
    lines = [f"In {len(members):,} of {len(content.runs):,} runs."]
    for group in content.findings:
        for item in group["settings"] if group["id"] == name else ():
            (runs, having), (others, rest) = item["runs"], item["others"]
            lines.append(
                f"{having:,} of {runs:,} runs with {item['condition']}, {rest:,} of {others:,} others "
                f"(p = {item['holm']:.1g})"
            )
    labels = listed([content.runs[index].label for index in members], MOST_MEMBERS)
    shown = "".join(f'<p class="association">{text(line, LONGEST_SENTENCE)}</p>' for line in lines)
    return f'{shown}<details><summary>Runs</summary><p class="members">{text(labels, LONGEST_SENTENCE)}</p></details>'


def _legend(groups: Sequence[RunGroup], count: int) -> str:
    boxes = "".join(
        f'<label><input type="checkbox" checked disabled>{group.style.swatch}'
        f"<span>{text(group.label)} ({counted(len(group.members), 'run')})</span></label>"
        for group in groups
    )
    left = count - len(groups)
    kept = f"the {BEST_GROUPS} best and the {WORST_GROUPS} worst have one"
    return boxes + (f"<span>{counted(left, 'group')} without a curve; {kept}</span>" if left else "")


def _group_table(groups: Sequence[RunGroup], content: FolderRuns, order: MetricOrder, deciding: str) -> str:
    """Return a row per group: its runs, and the median, lowest and highest last values of a few metrics."""
    names = list(dict.fromkeys([*filter(None, [deciding]), *order.main, *order.lead]))[:MOST_NUMBERS]
    headings = [
        name if last_part(name) in map(last_part, names[:at]) else last_part(name) for at, name in enumerate(names)
    ]
    results = {name: content.results(name) for name in names}
    rows = []
    for group in groups[:MOST_ROWS]:
        ended = sum(content.runs[index].run.state == "completed" for index in group.members)
        cells = [f'<th scope="row" title="{text(group.label)}">{group.style.swatch}{text(group.label)}</th>']
        cells.append(f"<td>{len(group.members):,}<small>{ended:,} completed</small></td>")
        cells += [_number_cell([results[name][index] for index in group.members]) for name in names]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    left = len(groups) - len(rows)
    more = f'<p class="note">{left:,} more groups.</p>' if left > 0 else ""
    note = f'<p class="note">Median over the runs of a group, lowest and highest; best {text(deciding)} first.</p>'
    return grid("Results", ["group", "runs", *headings], rows) + note + more if rows else ""


def _number_cell(values: Sequence[float]) -> str:
    finite = [value for value in values if math.isfinite(value)]
    without = len(values) - len(finite)
    if not finite:
        return '<td><strong class="bad">not finite</strong></td>'
    spread = f"{min(finite):.4g} to {max(finite):.4g}" if len(finite) > 1 else ""
    notes = [*filter(None, [spread, f"{without:,} without a finite value" if without else ""])]
    small = "".join(f"<small>{text(note)}</small>" for note in notes)
    return f'<td><strong class="last">{median(finite):.4g}</strong>{small}</td>'


def _run_table(content: FolderRuns, sentences: Sequence[str], deciding: str, results: Sequence[float]) -> str:
    rows = []
    for shown, result, sentence in zip(content.runs, results, sentences, strict=True):
        severity = severity_of(shown.diagnosis)
        found = sum(finding.severity != "info" for finding in shown.diagnosis or ())
        rows.append((shown.label, f"{result:.4g}", f"{found} ({severity})" if found else severity, sentence))
    return table("Runs", ("run", last_part(deciding), "problems", "state"), rows, folded=True)
