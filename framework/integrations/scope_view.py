"""The view of a scope in a notebook: the verdict and the first findings, then the newest numbers."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..console import number_text, printable
from ..doctor import Diagnosis, Finding, finding_lines
from ..errors import counted
from ..report import ordered

MOST_FINDINGS, MOST_NUMBERS = 3, 20
WIDTH = 100
STYLES = {"critical": "bold red", "warning": "yellow"}


def scope_view(status: str, diagnosis: Diagnosis, metrics: Mapping[str, Any]) -> Group:
    """Return progress, verdict, at most three findings, and at most 20 numbers, the most relevant first.

    Args:
        status: the line about the progress.
        diagnosis: the findings up to now.
        metrics: the newest metrics by full name.
    """
    problems = diagnosis.at_least("warning")
    parts: list[RenderableType] = [Text(printable(status)), _verdict(problems)]
    parts += [_finding(finding) for finding in problems[:MOST_FINDINGS]]
    left = len(diagnosis) - len(problems[:MOST_FINDINGS])
    if left:
        parts.append(Text(f"{counted(left, 'further finding')}: print(scope.diagnose()).", "dim"))
    numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
    if numbers:
        parts.append(_table(numbers, diagnosis))
    return Group(*parts)


def _verdict(problems: list[Finding]) -> Text:
    if not problems:
        return Text("No problem was found.", "green")
    counts = {severity: sum(finding.severity == severity for finding in problems) for severity in STYLES}
    words = [f"{count} {severity}" for severity, count in counts.items() if count]
    return Text(f"{counted(len(problems), 'problem')}: {', '.join(words)}", STYLES[problems[0].severity])


def _finding(finding: Finding) -> Text:
    first, *others = finding_lines(finding, WIDTH)
    return Text.assemble((printable(first), STYLES[finding.severity]), *(f"\n{printable(line)}" for line in others))


def _table(numbers: Mapping[str, float], diagnosis: Diagnosis) -> Table:
    """Return the most relevant numbers, and how many others there are."""
    names = ordered(dict.fromkeys(numbers, 2), list(diagnosis)).names
    left = len(names) - MOST_NUMBERS
    caption = f"{left:,} more: scope.last_metrics()" if left > 0 else None
    table = Table("metric", "value", caption=caption, caption_justify="left")
    for name in names[:MOST_NUMBERS]:
        table.add_row(Text(printable(name)), number_text(numbers[name]))
    return table
