"""The sections about alerts and phases: what they are, and a table of each."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..doctor import SEVERITIES
from ..errors import counted
from .diagnosis_section import badge
from .run_reader import ShownRun
from .run_styles import RunStyle
from .tables import grid, labelled, text

LONGEST_SENTENCE = 300
MOST_GROUPS, MOST_PHASES = 200, 100
ABOUT_ALERTS = (
    "A hook raises an alert at a step at which a value is beyond its limit. <strong>Critical</strong>: the training "
    "cannot succeed. <strong>Warning</strong>: it is probably worse than it could be. <strong>Info</strong>: healthy "
    "runs may have it, too. In a chart, ▼ marks the alerts about its metric."
)
ABOUT_PHASES = "A dotted vertical line in every chart marks a change of the phase."


def alert_section(runs: Sequence[ShownRun], styles: Sequence[RunStyle]) -> str:
    """Return the alerts of all runs, grouped by id, most severe and earliest first; empty without alerts."""
    rows = [(shown, style, group) for shown, style in zip(runs, styles, strict=True) for group in _groups(shown)]
    if not rows:
        return ""
    rows.sort(key=lambda row: (-SEVERITIES.index(row[2][0]["severity"]), row[2][0]["step"]))
    heading = ("severity", "alert", "run", "first step", "last step", "count", "first sentence")
    lines = [_alert_line(shown, style, group) for shown, style, group in rows[:MOST_GROUPS]]
    count = sum(len(group) for *_, group in rows)
    title = f"{counted(count, 'alert')} of {counted(len(rows), 'kind')}"
    return _section("alerts", title, f"<p>{ABOUT_ALERTS}</p>{grid('Alerts', heading, lines)}")


def _groups(shown: ShownRun) -> list[list[Mapping[str, Any]]]:
    """Return the alerts of a run by their id; recoveries are left out."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for alert in shown.alerts:
        if not alert["is_over"]:
            groups.setdefault(alert["id"], []).append(alert)
    return [*groups.values()]


def _alert_line(shown: ShownRun, style: RunStyle, group: Sequence[Mapping[str, Any]]) -> str:
    first, last = group[0], group[-1]
    severity = badge(first["severity"], first["severity"])
    run = labelled(shown, style)
    steps = f"<td>{first['step']:,}</td><td>{last['step']:,}</td><td>{len(group):,}</td>"
    sentence = text(first["sentence"], LONGEST_SENTENCE)
    return f"<tr><td>{severity}</td><td>{text(first['id'])}</td><td>{run}</td>{steps}<td>{sentence}</td></tr>"


def phase_section(runs: Sequence[ShownRun], styles: Sequence[RunStyle], infos: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the phases of all runs with their first steps, and what they mean; empty without phases.

    Args:
        runs: the runs of the page.
        styles: their styles.
        infos: descriptions of metrics by full name.
    """
    rows = []
    for shown, style in zip(runs, styles, strict=True):
        for name, phase, first in _phases(shown):
            value = f"<td>{phase:g}</td><td>{first:,}</td>"
            rows.append(f"<tr><td>{style.swatch}{text(shown.label)}</td><td>{text(name)}</td>{value}</tr>")
    if not rows:
        return ""
    names = dict.fromkeys(name for shown in runs for name in shown.points if is_phase(name))
    meanings = "".join(_meaning(name, infos[name]) for name in names if name in infos)
    table = grid("Phases", ("run", "metric", "phase", "first step"), rows[:MOST_PHASES])
    return _section("phases", "Phases", f"<p>{ABOUT_PHASES}</p>{meanings}{table}")


def is_phase(name: str) -> bool:
    """Return whether a metric counts phases of the training."""
    return name.endswith("/phase")


def _phases(shown: ShownRun) -> Iterator[tuple[str, float, int]]:
    """Yield metric, value and first step of each phase."""
    for name in filter(is_phase, shown.points):
        steps, values = shown.points[name]
        for index, value in enumerate(values):
            if index == 0 or value != values[index - 1]:
                yield name, value, int(steps[index])


def _meaning(name: str, info: Mapping[str, Any]) -> str:
    return f"<p><strong>{text(name)}</strong>: {text(info['formula'], LONGEST_SENTENCE)}. {text(info['reading'])}</p>"


def _section(id_: str, title: str, content: str) -> str:
    return f'<section id="{id_}"><h2>{text(title)}</h2>{content}</section>'
