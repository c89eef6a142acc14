"""The sections at the top of the page: the verdict about all runs, the findings of each, alerts and phases."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ..doctor import SEVERITIES, Diagnosis, Finding, evidence_text
from ..errors import counted, listed
from .relevance import FindingGroup, finding_groups
from .run_reader import ShownRun
from .tables import RunStyle, grid, labelled, text, titled

LONGEST_SENTENCE, LONGEST_STATE, LONGEST_IN_TABLE = 1000, 300, 300
MOST_OPEN = 3  # findings of the page with all details; the others are lines that open
MOST_NAMED = 4  # runs or findings in the verdict
MOST_MEMBERS = 8  # runs of a finding
KINDS = ("critical", "warning", "unknown", "none")  # of runs, in their order
SYMBOLS = {"critical": "✖", "warning": "▲", "info": "●", "none": "✔", "unknown": "?"}
MOST_GROUPS, MOST_PHASES = 200, 100
ABOUT_ALERTS = (
    "A hook raises an alert at a step at which a value is beyond its limit. <strong>Critical</strong>: the training "
    "cannot succeed. <strong>Warning</strong>: it is probably worse than it could be. <strong>Info</strong>: healthy "
    "runs may have it, too. In a chart, ▼ marks the alerts about its metric."
)
ABOUT_PHASES = "A dotted vertical line in every chart marks a change of the phase."


def verdict_of(runs: Sequence[ShownRun]) -> tuple[str, str]:
    """Return the most severe kind of finding of all runs (or ``none`` or ``unknown``), and the verdict in words."""
    if len(runs) == 1:
        (diagnosis,) = (shown.diagnosis for shown in runs)
        kind = severity_of(diagnosis)
        first = f": {_name(diagnosis.findings[0])}" if diagnosis and kind in ("critical", "warning") else ""
        return kind, diagnosis_words(diagnosis) + first
    groups = [group for group in finding_groups(runs) if group.finding.severity != "info"]
    unread = [shown.label for shown in runs if shown.diagnosis is None]
    diagnosed = [shown for shown in runs if shown.diagnosis is not None]
    unchecked = [shown.label for shown in diagnosed if severity_of(shown.diagnosis) == "unknown"]
    unknown = f" {counted(len(unread), 'run')} could not be diagnosed: {listed(unread, MOST_NAMED)}." if unread else ""
    unknown += f" {counted(len(unchecked), 'run')} not checked: {listed(unchecked, MOST_NAMED)}." if unchecked else ""
    if not groups:
        checked = len(runs) - len(unread) - len(unchecked)
        good = f"No problem was found in {counted(checked, 'run')}." if checked else ""
        return "unknown" if unknown else "none", (good + unknown).strip()
    affected = {index for group in groups for index, _ in group.members}
    named = [f"{_name(group.finding)} ({group.finding.severity}, {_where(group, runs)})" for group in groups]
    problems = "; ".join(named[:MOST_NAMED])
    more = f"; {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    return groups[0].finding.severity, f"Problems in {len(affected)} of {len(runs)} runs: {problems}{more}.{unknown}"


def _where(group: FindingGroup, runs: Sequence[ShownRun]) -> str:
    """Return the run of a finding, or their number."""
    return counted(len(group.members), "run") if len(group.members) > 1 else runs[group.members[0][0]].label


def severity_of(diagnosis: Diagnosis | None) -> str:
    """Return ``critical`` or ``warning``; else ``none`` if everything was checked, and ``unknown`` if it was not."""
    if diagnosis is None:
        return "unknown"
    if diagnosis.severity in ("critical", "warning"):
        return diagnosis.severity
    return "unknown" if diagnosis.unchecked else "none"


def _name(finding: Finding) -> str:
    """Return the id of a finding as words."""
    return finding.id.replace("-", " ")


def diagnosis_words(diagnosis: Diagnosis | None) -> str:
    """Return the numbers of findings in words."""
    if diagnosis is None:
        return "There is no diagnosis, since the run could not be read."
    counts = {name: sum(finding.severity == name for finding in diagnosis) for name in SEVERITIES}
    critical = counted(counts["critical"], "critical problem") if counts["critical"] else ""
    warning = counted(counts["warning"], "warning") if counts["warning"] else ""
    return " and ".join(filter(None, [critical, warning])) or diagnosis.verdict


def run_cards(
    runs: Sequence[ShownRun], sentences: Sequence[str], styles: Sequence[RunStyle], charted: Collection[int]
) -> str:
    """Return the findings, numbered and the most severe first, and the state of each run.

    Args:
        runs: the runs of the page.
        sentences: a sentence per run about its state.
        styles: the styles of the runs.
        charted: the numbers of findings with a chart.
    """
    groups = finding_groups(runs)
    where = {group.number: _members(group, runs, styles) if len(runs) > 1 else "" for group in groups}
    findings = finding_list(groups, where, charted)
    by_severity = sorted(range(len(runs)), key=lambda index: KINDS.index(severity_of(runs[index].diagnosis)))
    cards = "".join(_card(runs[index], sentences[index], styles[index], len(runs) == 1) for index in by_severity)
    cards = f'<div class="runs">{cards}</div>'
    return f"{cards if len(runs) == 1 else ''}{findings}{'' if len(runs) == 1 else cards}{_unchecked(runs)}"


def finding_list(groups: Sequence[FindingGroup], where: Mapping[int, str], charted: Collection[int]) -> str:
    """Return problems, the first ones with all details, and folded remarks.

    Args:
        groups: the findings.
        where: HTML about the runs with each finding, by its number.
        charted: the numbers of findings with a chart.
    """
    problems = [group for group in groups if group.finding.severity != "info"]
    findings = _list(problems, where, [group.number for group in problems[:MOST_OPEN]], charted)
    remarks = [group for group in groups if group.finding.severity == "info"]
    if remarks:
        content = _list(remarks, where, [group.number for group in remarks], charted)
        findings += _folded(counted(len(remarks), "remark"), content)
    return findings


def _members(group: FindingGroup, runs: Sequence[ShownRun], styles: Sequence[RunStyle]) -> str:
    """Return the runs with a finding."""
    names = [labelled(runs[index], styles[index]) for index, _ in group.members]
    more = f"<span>{len(names) - MOST_MEMBERS} more</span>" if len(names) > MOST_MEMBERS else ""
    return f'<p class="members">{"".join(names[:MOST_MEMBERS])}{more}</p>'


def _unchecked(runs: Sequence[ShownRun]) -> str:
    """Return what the diagnoses could not check, each sentence once with its runs; empty if nothing."""
    labels: dict[str, list[str]] = {}
    for shown in runs:
        for sentence in () if shown.diagnosis is None else shown.diagnosis.missing:
            labels.setdefault(sentence, []).append(shown.label)
    lines = []
    for sentence, affected in labels.items():
        where = "" if len(affected) == len(runs) else f"{listed(affected, MOST_NAMED)}: "
        lines.append(f'<p class="missing">{text(where + sentence, LONGEST_SENTENCE)}</p>')
    return _folded("What the diagnosis could not check", "".join(lines)) if lines else ""


def _card(shown: ShownRun, sentence: str, style: RunStyle, is_only: bool) -> str:
    kind = severity_of(shown.diagnosis)
    verdict = "" if is_only else f'<p class="result">{badge(kind, diagnosis_words(shown.diagnosis))}</p>'
    heading = f"<h3{titled(shown)}>{style.swatch}{text(shown.label)}</h3>"
    name = f"{shown.run.record.experiment}/{shown.run.record.strategy}: " if shown.run.record else ""
    state = sentence.removeprefix(name) if titled(shown) else sentence
    return f'<article class="run {kind}">{heading}{verdict}<p class="state">{text(state, LONGEST_STATE)}</p></article>'


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{text(title)}</summary>{content}</details>"


def _list(
    groups: Sequence[FindingGroup], where: Mapping[int, str], opened: Collection[int], charted: Collection[int]
) -> str:
    """Return findings as a list; some have all details, the others are lines that open."""
    items = "".join(
        _finding(group, where[group.number], is_open=group.number in opened, has_chart=group.number in charted)
        for group in groups
    )
    return f'<ol class="findings">{items}</ol>' if items else ""


def _finding(group: FindingGroup, where: str, *, is_open: bool, has_chart: bool) -> str:
    """Return a finding: severity, name, first step and confidence; its runs, why, next, and the measured values."""
    number, finding = group.number, group.finding
    name = _name(finding)
    about = f"{finding.when} · {finding.confidence:.0%} certain" if is_open else finding.when
    head = (
        f'<span class="number">{number}</span><h4>{text(name[:1].upper() + name[1:])}</h4>'
        f'{badge(finding.severity, finding.severity)}<span class="about">{about}</span>'
    )
    button = f'<button type="button" class="jump" data-finding="{number}" disabled>Show chart</button>'
    body = "".join(_lines(finding, button if has_chart else ""))
    content = f'<div class="head">{head}</div>{where}{body}'
    if not is_open:
        certain = f'<p class="about">{finding.confidence:.0%} certain</p>'
        content = f'<details><summary class="head">{head}</summary>{certain}{where}{body}</details>'
    return f'<li class="finding {finding.severity}" id="finding-{number}" value="{number}">{content}</li>'


def _lines(finding: Finding, button: str) -> Iterator[str]:
    yield f'<p class="why">{text(finding.why, LONGEST_SENTENCE)}</p>'
    yield f'<p class="next"><strong>Next</strong> {text(finding.next, LONGEST_SENTENCE)}</p>'
    if finding.evidence:
        measured = text(evidence_text(finding.evidence), LONGEST_SENTENCE)
        yield f'<p class="evidence"><strong>Measured</strong> {measured} {button}</p>'


def badge(kind: str, words: str) -> str:
    """Return a label with the symbol and the colour of a severity."""
    symbol = f'<span aria-hidden="true">{SYMBOLS[kind]}</span>'
    return f'<span class="badge {kind}">{symbol} {text(words, LONGEST_SENTENCE)}</span>'


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
    sentence = text(first["sentence"], LONGEST_IN_TABLE)
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
    return f"<p><strong>{text(name)}</strong>: {text(info['formula'], LONGEST_IN_TABLE)}. {text(info['reading'])}</p>"


def _section(id_: str, title: str, content: str) -> str:
    return f'<section id="{id_}"><h2>{text(title)}</h2>{content}</section>'
