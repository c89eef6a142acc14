"""The command ``loopscope alerts RUN``: the alerts of a run together with the findings of its diagnosis."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from ..doctor import diagnose
from ..errors import counted, require
from ..hooks import SEVERITIES, Severity
from ..runs import RunRecord, read_alerts, read_history, warn_of_changes
from .output import Output, with_output_options
from .parser import CommandParser, given_run

MOST_ITEMS = 50
MOST_ROWS = 8
"""Rows of an alert in the output; alerts.jsonl has all."""
Item = dict[str, Any]


def alerts_parser() -> CommandParser:
    """Build the parser of ``loopscope alerts``."""
    about = "List the alerts of a run's hooks and the findings of its diagnosis, the newest last, also while it runs."
    parser = CommandParser("alerts RUN [--since STEP] [--severity S] [--limit N]", about)
    parser.add_argument("RUN", nargs="*", help="the folder of a run")
    parser.add("since", int, "only those of this step and later ones", default=0)
    parser.add("severity", Severity, "only those of at least this severity", default="info")
    parser.add("limit", int, "only the newest N", default=MOST_ITEMS)
    return with_output_options(parser)


def alerts(words: Sequence[str]) -> None:
    """List alerts and findings; raises :class:`UsageError` for bad input."""
    given = alerts_parser().complete(words)
    folder = given_run(given, "alerts")
    require(given["since"] >= 0, f"--since is {given['since']}; it must be a step, 0 or more.")
    require(given["limit"] >= 1, f"--limit is {given['limit']}; it must be at least 1.")
    RunRecord.read(folder)
    warn_of_changes(folder)
    items = sorted([*_findings(folder), *map(_alert, read_alerts(folder))], key=itemgetter("step"))
    lowest = SEVERITIES.index(given["severity"])
    chosen = [item for item in items if item["step"] >= given["since"] and SEVERITIES.index(item["severity"]) >= lowest]
    newest = chosen[-given["limit"] :]
    counts = Counter(item["severity"] for item in chosen if item["kind"] != "recovery")
    content = {
        "run": str(folder),
        "counts": {severity: counts[severity] for severity in SEVERITIES},
        "older": len(chosen) - len(newest),
        "items": newest,
    }
    output = Output.of("alerts", words, given)
    output.write(content, {"items": "last"}, partial(_lines, content))


def _findings(folder: Path) -> Iterator[Item]:
    for finding in diagnose(read_history(folder)):
        content = finding.as_dict()
        names = ("step", "severity", "id", "confidence", "next")
        yield {"kind": "finding", **{name: content[name] for name in names}, "sentence": finding.why}


def _alert(alert: Mapping[str, Any]) -> Item:
    names = ("step", "severity", "id", "hook", "metric", "value", "limit")
    item = {"kind": "recovery" if alert.get("is_over") else "alert"} | {name: alert.get(name) for name in names}
    rows = alert.get("rows")
    if isinstance(rows, list):
        item |= {"rows": rows[:MOST_ROWS], "row_count": len(rows)}
    return item | {"sentence": alert["sentence"]}


def _lines(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the numbers of items, then a line per item, the newest last."""
    counts = content["counts"]
    numbers = ", ".join(f"{number} {severity}" for severity, number in reversed(counts.items()) if number)
    yield f"{content['run']}: {numbers or 'no alerts and no findings'}"
    if content["older"]:
        yield f"{counted(content['older'], 'older one')}; --limit shows more."
    for item in content["items"]:
        sentence = " ".join(str(item["sentence"]).split())
        yield f"step {item['step']:,}  {item['severity']} {item['kind']}  {item['id']}: {sentence}"
