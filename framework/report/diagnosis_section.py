"""The top of the page: the verdict about all runs, and the findings of each."""

from collections.abc import Collection, Iterator, Mapping, Sequence

from ..doctor import SEVERITIES, Diagnosis, Finding, evidence_text
from ..errors import counted, listed
from .relevance import FindingGroup, finding_groups
from .run_reader import ShownRun
from .run_styles import RunStyle
from .tables import labelled, text, titled

LONGEST_SENTENCE, LONGEST_STATE = 1000, 300
MOST_OPEN = 3  # findings of the page with all details; the others are lines that open
MOST_NAMED = 4  # runs or findings in the verdict
MOST_MEMBERS = 8  # runs of a finding
KINDS = ("critical", "warning", "unknown", "none")  # of runs, in their order
SYMBOLS = {"critical": "✖", "warning": "▲", "info": "●", "none": "✔", "unknown": "?"}


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
    problems = [group for group in groups if group.finding.severity != "info"]
    opened = [group.number for group in problems[:MOST_OPEN]]
    where = {group.number: _members(group, runs, styles) if len(runs) > 1 else "" for group in groups}
    findings = _list(problems, where, opened, charted)
    remarks = [group for group in groups if group.finding.severity == "info"]
    if remarks:
        content = _list(remarks, where, [group.number for group in remarks], charted)
        findings += _folded(counted(len(remarks), "remark"), content)
    by_severity = sorted(range(len(runs)), key=lambda index: KINDS.index(severity_of(runs[index].diagnosis)))
    cards = "".join(_card(runs[index], sentences[index], styles[index], len(runs) == 1) for index in by_severity)
    cards = f'<div class="runs">{cards}</div>'
    return f"{cards if len(runs) == 1 else ''}{findings}{'' if len(runs) == 1 else cards}{_unchecked(runs)}"


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
