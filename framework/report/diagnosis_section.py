"""The top of the page: the verdict about all runs, and the findings of each."""

from collections.abc import Collection, Iterator, Sequence

from ..doctor import SEVERITIES, Diagnosis, Finding, evidence_text
from ..errors import counted, listed
from .run_reader import ShownRun
from .run_styles import RunStyle
from .tables import text

LONGEST_SENTENCE, LONGEST_STATE = 1000, 300
MOST_OPEN = 3  # findings of the page with all details; the others are lines that open
MOST_NAMED = 4  # runs in the verdict
SYMBOLS = {"critical": "✖", "warning": "▲", "info": "●", "none": "✔", "unknown": "?"}


def verdict_of(runs: Sequence[ShownRun]) -> tuple[str, str]:
    """Return the most severe kind of finding of all runs (or ``none`` or ``unknown``), and the verdict in words."""
    if len(runs) == 1:
        (diagnosis,) = (shown.diagnosis for shown in runs)
        first = f": {_name(diagnosis.findings[0])}" if diagnosis and _has_problem(diagnosis) else ""
        return severity_of(diagnosis), diagnosis_words(diagnosis) + first
    severities = {shown.label: severity_of(shown.diagnosis) for shown in runs}
    unchecked = [
        shown.label for shown in runs if shown.diagnosis is not None and severity_of(shown.diagnosis) == "unknown"
    ]
    named = [f"{shown.label} ({_most_important(shown.diagnosis)})" for shown in runs if _has_problem(shown.diagnosis)]
    unread = [shown.label for shown in runs if shown.diagnosis is None]
    unknown = f" {counted(len(unread), 'run')} could not be diagnosed: {listed(unread, MOST_NAMED)}." if unread else ""
    unknown += f" {counted(len(unchecked), 'run')} not checked: {listed(unchecked, MOST_NAMED)}." if unchecked else ""
    if not named:
        checked = len(runs) - len(unread) - len(unchecked)
        good = f"No problem was found in {counted(checked, 'run')}." if checked else ""
        return "unknown" if unknown else "none", (good + unknown).strip()
    worst = "critical" if "critical" in severities.values() else "warning"
    return worst, f"Problems in {len(named)} of {len(runs)} runs: {listed(named, MOST_NAMED)}.{unknown}"


def severity_of(diagnosis: Diagnosis | None) -> str:
    """Return ``critical`` or ``warning``; else ``none`` if everything was checked, and ``unknown`` if it was not."""
    if diagnosis is None:
        return "unknown"
    if diagnosis.severity in ("critical", "warning"):
        return diagnosis.severity
    return "unknown" if diagnosis.unchecked else "none"


def _has_problem(diagnosis: Diagnosis | None) -> bool:
    return severity_of(diagnosis) in ("critical", "warning")


def _most_important(diagnosis: Diagnosis | None) -> str:
    """Return severity and name of the first finding."""
    return f"{diagnosis.findings[0].severity}: {_name(diagnosis.findings[0])}" if diagnosis else ""


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
    """Return a card per run with its state and its findings, in the order of the runs; findings are numbered.

    Args:
        runs: the runs of the page.
        sentences: a sentence per run about its state.
        styles: the styles of the runs.
        charted: the numbers of findings with a chart.
    """
    opened, cards, number = _opened(runs), [], 1
    for shown, sentence, style in zip(runs, sentences, styles, strict=True):
        cards.append(_card(shown, sentence, style, _findings(shown.diagnosis, number, opened, charted), len(runs) == 1))
        number += len(shown.diagnosis or ())
    return "".join(cards) + _unchecked(runs)


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


def _opened(runs: Sequence[ShownRun]) -> frozenset[int]:
    """Return the numbers of the findings with all details: the first of each run, or the first ones of a single run."""
    ranked, number = [], 1
    for shown in runs:
        diagnosis = list(shown.diagnosis or ())
        problems = [place for place, finding in enumerate(diagnosis, number) if finding.severity != "info"]
        ranked += [(rank, place) for rank, place in enumerate(problems)]
        number += len(diagnosis)
    firsts = [place for rank, place in ranked if rank == 0]
    return frozenset((firsts if len(firsts) > 1 else [place for _, place in ranked])[:MOST_OPEN])


def _card(shown: ShownRun, sentence: str, style: RunStyle, findings: str, is_only: bool) -> str:
    kind = severity_of(shown.diagnosis)
    verdict = "" if is_only else f'<p class="result">{badge(kind, diagnosis_words(shown.diagnosis))}</p>'
    heading = f"<h3>{style.swatch}{text(shown.label)}</h3>"
    state = f'<p class="state">{text(sentence, LONGEST_STATE)}</p>'
    return f'<article class="run {kind}">{heading}{verdict}{state}{findings}</article>'


def _findings(diagnosis: Diagnosis | None, number: int, opened: Collection[int], charted: Collection[int]) -> str:
    """Return the findings: problems, with or without all details, and folded remarks."""
    if diagnosis is None:
        return ""
    numbered = list(enumerate(diagnosis, number))
    problems = [(place, finding) for place, finding in numbered if finding.severity != "info"]
    remarks = [(place, finding) for place, finding in numbered if finding.severity == "info"]
    html = _list(problems, opened, charted)
    if remarks:
        html += _folded(counted(len(remarks), "remark"), _list(remarks, [place for place, _ in remarks], charted))
    return html


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{text(title)}</summary>{content}</details>"


def _list(numbered: Sequence[tuple[int, Finding]], opened: Collection[int], charted: Collection[int]) -> str:
    items = "".join(
        _finding(number, finding, is_open=number in opened, has_chart=number in charted) for number, finding in numbered
    )
    return f'<ol class="findings">{items}</ol>' if items else ""


def _finding(number: int, finding: Finding, *, is_open: bool, has_chart: bool) -> str:
    """Return a finding: severity, name, first step and confidence; why, next, and the measured values."""
    when = f"from step {finding.step:,}" if finding.step else "before the first step"
    name = _name(finding)
    about = f"{when} · {finding.confidence:.0%} certain" if is_open else when
    head = (
        f'<span class="number">{number}</span><h4>{text(name[:1].upper() + name[1:])}</h4>'
        f'{badge(finding.severity, finding.severity)}<span class="about">{about}</span>'
    )
    button = f'<button type="button" class="jump" data-finding="{number}" disabled>Show chart</button>'
    body = "".join(_lines(finding, button if has_chart else ""))
    content = f'<div class="head">{head}</div>{body}'
    if not is_open:
        certain = f'<p class="about">{finding.confidence:.0%} certain</p>'
        content = f'<details><summary class="head">{head}</summary>{certain}{body}</details>'
    return f'<li class="finding {finding.severity}" id="finding-{number}" value="{number}">{content}</li>'


def _lines(finding: Finding, button: str) -> Iterator[str]:
    yield f'<p class="why">{text(finding.why, LONGEST_SENTENCE)}</p>'
    yield f'<p class="next"><strong>Next</strong> {text(finding.next, LONGEST_SENTENCE)}</p>'
    if finding.evidence:
        measured = text(evidence_text(finding.evidence), LONGEST_SENTENCE)
        yield f'<p class="evidence"><strong>Measured</strong> {measured} {button}</p>'


def badge(kind: str, words: str) -> str:
    """Return a label with the symbol and the colour of a severity."""
    return f'<span class="badge {kind}"><span aria-hidden="true">{SYMBOLS[kind]}</span> {text(words)}</span>'
