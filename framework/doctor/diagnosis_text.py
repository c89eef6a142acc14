"""The findings of a diagnosis as lines of text."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .findings import Diagnosis, Evidence, Finding

MOST_EVIDENCE = 3
"""Measured values in the text of a finding; JSON has all."""
MOST_BRIEF = 3
"""Findings at the end of a run."""
INDENT = "    "


def diagnosis_lines(diagnosis: "Diagnosis", width: int = 100, most: int | None = None) -> list[str]:
    """Return the lines of a diagnosis: the verdict, then each finding, most important first.

    Args:
        diagnosis: the findings.
        width: the largest length of a line.
        most: the largest number of findings; the number of the others is stated.
    """
    findings = list(diagnosis)[:most]
    has_problem = bool(diagnosis.at_least("warning"))
    lines = [] if has_problem else textwrap.wrap(diagnosis.verdict, width, subsequent_indent=INDENT)
    for finding in findings:
        lines += finding_lines(finding, width)
    if left := len(diagnosis) - len(findings):
        lines.append(f"{left} more with loopscope doctor RUN.")
    missing = [item for item in diagnosis.missing if has_problem or item not in diagnosis.unchecked]
    for sentence in (*diagnosis.untested, *missing):
        lines += textwrap.wrap(sentence, width, subsequent_indent=INDENT)
    return lines


def finding_lines(finding: "Finding", width: int = 100) -> Iterator[str]:
    """Yield the lines of a finding: its severity, id and step, why, next, and the measured values."""
    when = f"from step {finding.step:,}" if finding.step else "before the first step"
    yield f"{finding.severity}: {finding.id}, {when} (confidence {finding.confidence:.0%})"
    rows = [("why", finding.why), ("next", finding.next), ("measured", evidence_text(finding.evidence))]
    rows += [("tested", item.sentence) for item in finding.tests]
    for label, text in rows:
        if text:
            indent = f"{INDENT}{label:9} "
            yield from textwrap.wrap(
                text, width, initial_indent=indent, subsequent_indent=" " * len(indent), break_on_hyphens=False
            )


def brief_lines(diagnosis: "Diagnosis", width: int | None = None, most: int = MOST_BRIEF) -> list[str]:
    """Return the most important findings above ``info``: of each what is wrong, and what to do next.

    Args:
        diagnosis: the findings.
        width: the columns in which longer lines are wrapped, or ``None`` for one line each.
        most: the largest number of findings; the number of the others is stated.
    """
    findings = diagnosis.at_least("warning")
    lines = []
    for finding in findings[:most]:
        when = f"from step {finding.step:,}" if finding.step else "before the first step"
        lines += [f"{finding.severity}: {finding.id}, {when}: {finding.why}", f"{INDENT}next: {finding.next}"]
    if left := len(findings) - len(findings[:most]):
        lines.append(f"{INDENT}{left} more with loopscope doctor.")
    return lines if width is None else [part for line in lines for part in wrapped(line, width)]


def wrapped(line: str, width: int) -> list[str]:
    """Wrap a line between words, with further lines indented."""
    return textwrap.wrap(line, max(width, 2 * len(INDENT)), subsequent_indent=INDENT, break_on_hyphens=False)


def evidence_text(evidence: "Sequence[Evidence]") -> str:
    """Return the measured values in one text."""
    return "; ".join(_evidence_item(item) for item in evidence[:MOST_EVIDENCE])


def _evidence_item(item: "Evidence") -> str:
    text = f"{item.metric} {value_text(item.value)}"
    if item.limit is not None:
        text += f", limit {value_text(item.limit)}"
    return f"{text} (usual: {item.usual})" if item.usual else text


def value_text(value: object) -> str:
    """Return a value as text, a float with three digits."""
    if isinstance(value, float):
        return f"{value:.3g}"
    return ", ".join(map(value_text, value)) if isinstance(value, (list, tuple)) else str(value)
