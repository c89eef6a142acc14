"""Findings over several runs: in how many runs each occurs, and with which settings it comes."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from ..doctor import Diagnosis
from ..errors import counted
from ..hooks import SEVERITIES
from ..runs import RunRecord
from ..sweeps import associations

UNTESTED = ("output_dir", "name", "command")
"""Entries of records that are no settings of a training."""


def finding_groups(diagnoses: Sequence[Diagnosis], records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return the findings of runs as plain values, the most severe and frequent first, with significant settings."""
    severities: dict[str, list[str]] = {}
    affected: dict[str, list[int]] = {}
    for index, diagnosis in enumerate(diagnoses):
        for finding in {finding.id: finding for finding in reversed(diagnosis.findings)}.values():
            severities.setdefault(finding.id, []).append(finding.severity)
            affected.setdefault(finding.id, []).append(index)
    settings = associations(affected, [*map(settings_of, records)])
    groups = [
        {
            "id": name,
            "severity": max(severities[name], key=SEVERITIES.index),
            "runs": len(affected[name]),
            "of": len(diagnoses),
            "settings": [
                {
                    "condition": item.condition,
                    "runs": list(item.runs),
                    "others": list(item.others),
                    "p": item.p,
                    "holm": item.holm,
                    **({"same_as": list(dict.fromkeys(item.same_as))} if item.same_as else {}),
                }
                for item in settings[name]
            ],
        }
        for name in affected
    ]
    return sorted(groups, key=_importance, reverse=True)


def group_lines(groups: Sequence[Mapping[str, Any]], count: int, width: int) -> Iterator[str]:
    """Yield lines about the findings of several runs."""
    if not groups:
        return
    is_tested = any(group["settings"] for group in groups)
    test = "; p is that of Fisher's exact test after Holm's correction" if is_tested else ""
    yield f"Findings over {counted(count, 'run')}{test}:"
    for group in groups:
        yield f"  {group['severity']}: {group['id']} in {group['runs']} of {group['of']} runs"
        for item in group["settings"]:
            (runs, having), (others, rest) = item["runs"], item["others"]
            others_alike = item.get("same_as", ())
            verb = "divides" if len(others_alike) == 1 else "divide"
            same = f"; {', '.join(others_alike)} {verb} the runs alike" if others_alike else ""
            text = (
                f"{having} of {runs} runs with {item['condition']}, {rest} of {others} others (p = {item['holm']:.1g}"
            )
            yield from textwrap.wrap(f"{text}{same})", width, initial_indent="    ", subsequent_indent="      ")


def _importance(group: Mapping[str, Any]) -> tuple[int, int, str]:
    return SEVERITIES.index(group["severity"]), group["runs"], group["id"]


def settings_of(record: RunRecord) -> dict[str, Any]:
    """Return the settings of a run: the words of a script, its training, or the options of an experiment."""
    words = list(record.provenance.get("watch", {}).get("command", ()))
    given = {
        word.removeprefix("--"): _value(value)
        for word, value in pairwise(words)
        if word.startswith("--") and not value.startswith("--")
    }
    named = {**given, "strategy": record.strategy, **record.config, **record.training}
    if words:  # the strategy of an attached run is the name of its folder
        del named["strategy"]
    scalars = (int, float, str, bool, type(None))
    return {name: value for name, value in named.items() if name not in UNTESTED and isinstance(value, scalars)}


def _value(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word
