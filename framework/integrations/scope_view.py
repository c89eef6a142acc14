"""The view of a scope in a notebook: the verdict and the first findings, then the newest numbers."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..console import number_text, printable
from ..doctor import Diagnosis, Finding, finding_lines
from ..errors import counted
from ..report import diagnosis_words, ordered

MOST_FINDINGS, MOST_NUMBERS = 3, 20
WIDTH = 100
STYLES = {"critical": "bold red", "warning": "yellow"}


class FindingText:
    """A finding as lines that fit the width."""

    def __init__(self, finding: Finding) -> None:
        self._finding = finding

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield severity, name and step, why, next, and the measured values."""
        first, *others = finding_lines(self._finding, min(options.max_width, WIDTH))
        yield Text(printable(first), STYLES[self._finding.severity])
        yield from (Text(printable(line)) for line in others)


def scope_view(status: str, diagnosis: Diagnosis | None, metrics: Mapping[str, Any]) -> Group:
    """Return progress, verdict, at most three findings, and at most 20 numbers, the most relevant first.

    Args:
        status: the line about the progress.
        diagnosis: the findings up to now; ``None`` before the start.
        metrics: the newest metrics by full name.
    """
    parts: list[RenderableType] = [Text(printable(status))]
    if diagnosis is not None:
        problems = diagnosis.at_least("warning")
        parts.append(
            Text(
                diagnosis_words(diagnosis),
                STYLES[problems[0].severity] if problems else "" if diagnosis.unchecked else "green",
            )
        )
        parts += [FindingText(finding) for finding in problems[:MOST_FINDINGS]]
        if left := len(diagnosis) - len(problems[:MOST_FINDINGS]):
            parts.append(Text(f"{counted(left, 'further finding')}: print(scope.diagnose())", "dim"))
    numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
    if numbers:
        parts.append(_table(numbers, diagnosis or Diagnosis()))
    return Group(*parts)


def _table(numbers: Mapping[str, float], diagnosis: Diagnosis) -> Table:
    """Return the most relevant numbers, and how many others there are."""
    names = ordered(dict.fromkeys(numbers, 2), list(diagnosis)).names
    left = len(names) - MOST_NUMBERS
    caption = f"{left:,} more: scope.last_metrics()" if left > 0 else None
    table = Table("metric", "value", caption=caption, caption_justify="left")
    for name in names[:MOST_NUMBERS]:
        table.add_row(Text(printable(name)), number_text(numbers[name]))
    return table
