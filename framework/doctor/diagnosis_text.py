"""A diagnosis, and its findings as lines of text."""

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..hooks import SEVERITIES, Severity
from .findings import SCHEMA, Evidence, Finding

MOST_EVIDENCE = 3
"""Measured values in the text of a finding; JSON has all."""
MOST_BRIEF = 3
"""Findings at the end of a run."""
INDENT = "    "


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """The findings about a run, most important first, and what the record lacked for a complete diagnosis.

    Iterate over it for the findings; ``print``, or the last line of a notebook's cell, shows them.
    """

    findings: Sequence[Finding] = ()
    missing: Sequence[str] = ()
    """Sentences about what was not checked, and what to add."""
    untested: Sequence[str] = ()
    """Sentences about findings whose cause could not be tested."""
    unchecked: str = ""
    """Why a diagnosis without problems is no good news: sentences about checks that the record does not allow."""
    course: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Of the training of a policy: the first and last levels of reported numbers, by common name."""

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __str__(self) -> str:
        """Return the findings as lines of text."""
        return "\n".join(diagnosis_lines(self))

    __repr__ = __str__

    @classmethod
    def of(cls, findings: Iterable[Mapping[str, Any]]) -> "Diagnosis":
        """Return the diagnosis of a summary, whose findings are plain values.

        Raises:
            UsageError: for content without the required fields.
        """
        return cls([Finding.of(content) for content in findings])

    @property
    def severity(self) -> Severity | None:
        """The highest severity among the findings, or ``None`` without any."""
        return max((finding.severity for finding in self.findings), key=SEVERITIES.index, default=None)

    def at_least(self, severity: Severity) -> list[Finding]:
        """Return the findings of this severity or a higher one."""
        lowest = SEVERITIES.index(severity)
        return [finding for finding in self.findings if SEVERITIES.index(finding.severity) >= lowest]

    @property
    def verdict(self) -> str:
        """The diagnosis in one short sentence."""
        counts = {name: sum(finding.severity == name for finding in self.findings) for name in SEVERITIES}
        if not counts["critical"] and not counts["warning"]:
            return f"Not checked: {self.unchecked}" if self.unchecked else "No problem was found."
        words = [
            f"{counts[name]} {name}{'s' if name == 'warning' and counts[name] > 1 else ''}"
            for name in ("critical", "warning")
            if counts[name]
        ]
        return f"Found {' and '.join(words)}; most important: {self.findings[0].why}"

    def as_dict(self) -> dict[str, Any]:
        """Return the diagnosis as plain values, in the versioned schema."""
        content: dict[str, Any] = {"schema": SCHEMA} | ({"course": dict(self.course)} if self.course else {})
        content["findings"] = [finding.as_dict() for finding in self.findings]
        content["checked"] = not self.unchecked
        lists = {"missing": list(self.missing), "untested": list(self.untested)}
        return content | {name: sentences for name, sentences in lists.items() if sentences}


def diagnosis_lines(diagnosis: Diagnosis, width: int = 100) -> list[str]:
    """Return the lines of a diagnosis: the verdict, then each finding, most important first.

    Args:
        diagnosis: the findings.
        width: the largest length of a line.
    """
    has_problem = bool(diagnosis.at_least("warning"))
    lines = [] if has_problem else textwrap.wrap(diagnosis.verdict, width, subsequent_indent=INDENT)
    for finding in diagnosis:
        lines += finding_lines(finding, width)
    if diagnosis.course:
        levels = (
            f"{name.replace('_', ' ')} {value_text(item['start'])} to {value_text(item['end'])}"
            for name, item in diagnosis.course.items()
        )
        lines += textwrap.wrap(f"Reported, from start to end: {'; '.join(levels)}.", width, subsequent_indent=INDENT)
    missing = [item for item in diagnosis.missing if has_problem or item not in diagnosis.unchecked]
    for sentence in (*diagnosis.untested, *missing):
        lines += textwrap.wrap(sentence, width, subsequent_indent=INDENT)
    return lines


def finding_lines(finding: Finding, width: int = 100) -> Iterator[str]:
    """Yield the lines of a finding: its severity, id and step, why, next, and the measured values."""
    yield f"{finding.severity}: {finding.id}, {finding.when} (confidence {finding.confidence:.0%})"
    rows = [("why", finding.why), ("next", finding.next), ("measured", evidence_text(finding.evidence))]
    rows += [("tested", item.sentence) for item in finding.tests]
    if finding.law_result:
        rows.append(("law", f"{finding.law}: {finding.law_result}"))
    elif finding.law:
        rows.append(("certain", f"run the training by loopscope check --laws {finding.law}"))
    for label, text in rows:
        if text:
            indent = f"{INDENT}{label:9} "
            yield from textwrap.wrap(
                text, width, initial_indent=indent, subsequent_indent=" " * len(indent), break_on_hyphens=False
            )


def brief_lines(diagnosis: Diagnosis, width: int | None = None) -> list[str]:
    """Return the most important findings above ``info``: of each what is wrong, and what to do next.

    Args:
        diagnosis: the findings.
        width: the columns in which longer lines are wrapped, or ``None`` for one line each.
    """
    findings = diagnosis.at_least("warning")
    lines = []
    for finding in findings[:MOST_BRIEF]:
        lines += [f"{finding.severity}: {finding.id}, {finding.when}: {finding.why}", f"{INDENT}next: {finding.next}"]
    if left := len(findings) - len(findings[:MOST_BRIEF]):
        lines.append(f"{INDENT}{left} more with loopscope doctor.")
    return lines if width is None else [part for line in lines for part in wrapped(line, width)]


def wrapped(line: str, width: int) -> list[str]:
    """Wrap a line between words, with further lines indented."""
    return textwrap.wrap(line, max(width, 2 * len(INDENT)), subsequent_indent=INDENT, break_on_hyphens=False)


def evidence_text(evidence: Sequence[Evidence]) -> str:
    """Return the measured values in one text."""
    return "; ".join(_evidence_item(item) for item in evidence[:MOST_EVIDENCE])


def _evidence_item(item: Evidence) -> str:
    text = f"{item.metric} {value_text(item.value)}"
    if item.limit is not None:
        text += f", limit {value_text(item.limit)}"
    return f"{text} (usual: {item.usual})" if item.usual else text


def value_text(value: object) -> str:
    """Return a value as text, a float with three digits."""
    if isinstance(value, float):
        return f"{value:.3g}"
    return ", ".join(map(value_text, value)) if isinstance(value, (list, tuple)) else str(value)
