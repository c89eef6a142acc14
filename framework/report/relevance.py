"""The order of metrics by relevance: those that explain the run come first, the others in the order of the record."""

import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..doctor import COURSE, SEVERITIES, Finding, by_common_name
from .curves import EVALUATED_BY
from .run_reader import ShownRun

LOSSES = ("training_checks/loss", "training_metrics/loss")
"""The training loss of steps, and of epochs."""
VALIDATION = re.compile(r"(val|valid|validation|eval|test|dev)(_|$)")
FURTHER = ("lr", "learning_rate"), ("grad_norm", "total_grad_norm", "gradient_norm")
"""Last parts of the names of metrics that nearly every reader wants: of each kind, the one with most points."""
MOST_EVIDENCE = 4  # charts of the findings' metrics
FEWEST = MOST_LEAD = 4  # charts that are open at first; charts at the top of the page


@dataclass(frozen=True)
class MetricOrder:
    """Names of metrics: all by relevance, losses, those at the top of the page, and those that are open at first."""

    names: Sequence[str]
    main: Sequence[str]
    lead: Sequence[str]
    first: Sequence[str]


def order_of(runs: Sequence[ShownRun]) -> MetricOrder:
    """Order the metrics of runs by relevance."""
    alerted = [str(alert["hook"]) for shown in runs for alert in shown.alerts]
    findings = [finding for shown in runs for finding in shown.diagnosis or ()]
    return ordered(_sizes(runs), findings, alerted)


def ordered(sizes: Mapping[str, int], findings: Sequence[Finding], alerted: Sequence[str] = ()) -> MetricOrder:
    """Order metrics by relevance: losses, evidence, accuracy, learning rate, gradient norm, then the others by hook.

    In the training of a policy, its reward, divergence, entropy and length come first, and the loss, which says little,
    after them.

    Args:
        sizes: the number of points of each metric, in the order of the record.
        findings: those of the diagnosis; the metrics of those above ``info`` are evidence.
        alerted: names of hooks with alerts.
    """
    policy = policy_metrics(sizes)
    main = [*policy, *filter(None, [_loss(sizes), _validation(sizes)])]
    recorded = evidence_metrics(findings, sizes)
    evidence = [name for name in recorded if name not in main and sizes[name] > 1][:MOST_EVIDENCE]
    evaluations = [name for name in validation_numbers(sizes) if direction_of(name) < 0][:1]
    further = [longest for kind in FURTHER if (longest := _longest(sizes, kind))]
    first = list(dict.fromkeys([*main, *evidence, *evaluations, *further]))
    others = [name for name in sizes if name not in first]
    hooks = list(dict.fromkeys([*always_on(), *map(_hook, recorded), *alerted, *map(_hook, others)]))
    others.sort(key=lambda name: hooks.index(_hook(name)))
    names = [*first, *others]
    opened = names[: max(FEWEST, len(first))]
    return MetricOrder(names, main, opened[:MOST_LEAD], opened)


def policy_metrics(names: Iterable[str]) -> list[str]:
    """Return what shows the course of a policy's training, of a run that reports a reward.

    >>> policy_metrics(["reported/loss", "reported/kl", "reported/reward"])
    ['reported/reward', 'reported/kl']
    """
    found = by_common_name(names)
    return [found[common] for common in COURSE if common in found] if "reward" in found else []


def evidence_metrics(findings: Sequence[Finding], sizes: Mapping[str, int]) -> list[str]:
    """Return the recorded metrics behind the findings above ``info``, in the order of the findings."""
    items = [item for finding in findings if finding.severity != "info" for item in finding.evidence]
    return list(dict.fromkeys(filter(None, [recorded_name(item.metric, sizes) for item in items])))


def recorded_name(metric: str, sizes: Mapping[str, int]) -> str:
    """Return the recorded metric that a finding names, or the first of the family that it names; empty for none."""
    if metric in sizes:
        return metric
    return next((name for name in sizes if name.startswith(f"{metric}/")), "")


def _sizes(runs: Sequence[ShownRun]) -> dict[str, int]:
    """Return the names of all metrics with their largest number of points, in the order of the records."""
    sizes: dict[str, int] = {}
    for shown in runs:
        for name, (steps, _) in shown.points.items():
            sizes[name] = max(sizes.get(name, 0), len(steps))
        for name, rows in shown.lists.items():
            sizes[name] = max(sizes.get(name, 0), len(rows.rows))
    return sizes


def _loss(sizes: Mapping[str, int]) -> str:
    """Return the training loss; empty if none was recorded."""
    known = [name for name in LOSSES if name in sizes]
    if known:
        return max(known, key=sizes.__getitem__)
    return next((name for name in sizes if last_part(name) in ("loss", "train_loss")), "")


def _validation(sizes: Mapping[str, int]) -> str:
    """Return the validation loss, or else another number of the validation; empty if none was recorded."""
    names = validation_numbers(sizes)
    losses = [name for name in names if "loss" in last_part(name)]
    return next(iter([*losses, *names]), "")


def validation_numbers(names: Iterable[str]) -> list[str]:
    """Return the results of the validation; those of the training's own evaluation if there are any.

    >>> validation_numbers(["a/val_loss", "training_metrics/val_acc", "checks/eval_mode"])
    ['training_metrics/val_acc']
    """
    numbers = [name for name in names if VALIDATION.match(last_part(name)) and direction_of(name)]
    return [name for name in numbers if _hook(name) in always_on()] or numbers


def always_on() -> list[str]:
    """Return the names of the hooks of every run; without those of other packages until hooks need torch, too."""
    if "torch" not in sys.modules:  # its import takes over a second
        return [EVALUATED_BY]
    from ..hooks import HookRegistry

    return list(dict.fromkeys([EVALUATED_BY, *(hook.name for hook in HookRegistry if hook.always)]))


def direction_of(name: str) -> int:
    """Return 1 if lower values of a metric are better, −1 if higher ones are, 0 if neither is known."""
    last = last_part(name)
    if any(word in last for word in ("loss", "perplexity", "ppl", "error")):
        return 1
    return -1 if "acc" in last else 0


def _longest(sizes: Mapping[str, int], last_parts: Sequence[str]) -> str:
    names = [name for name in sizes if last_part(name) in last_parts]
    return max(names, key=sizes.__getitem__, default="")


def _hook(name: str) -> str:
    return name.partition("/")[0]


def last_part(name: str) -> str:
    """Return the name of a metric without its hook and its groups."""
    return name.rpartition("/")[2]


def _finite(limit: float | None) -> float | None:
    return limit if limit is not None and math.isfinite(limit) else None


@dataclass(frozen=True)
class FindingGroup:
    """A finding of one or more runs, with its number on the page; the details are those of the first run."""

    number: int
    finding: Finding
    members: Sequence[tuple[int, Finding]]
    """The places of the runs, and their findings."""


def finding_groups(runs: Sequence[ShownRun]) -> list[FindingGroup]:
    """Return the findings of all runs, equal ones together, the most severe and most frequent first.

    Those of a single run keep the order of its diagnosis, in which consequences follow their causes.
    """
    members: dict[tuple[str, str], list[tuple[int, Finding]]] = {}
    for index, shown in enumerate(runs):
        for finding in shown.diagnosis or ():
            members.setdefault((finding.severity, finding.id), []).append((index, finding))
    groups = [*members.values()]
    if len(runs) > 1:
        groups.sort(key=lambda group: (-SEVERITIES.index(group[0][1].severity), -len(group)))
    return [FindingGroup(number, group[0][1], group) for number, group in enumerate(groups, 1)]


def finding_marks(runs: Sequence[ShownRun], order: MetricOrder) -> Iterator[dict[str, Any]]:
    """Yield the findings of all runs as plain values for the charts, with their numbers on the page."""
    names = dict.fromkeys(order.names, 0)
    for group in finding_groups(runs):
        for index, finding in group.members:
            pairs = [(recorded_name(item.metric, names), item.limit) for item in finding.evidence]
            metrics = [{"name": name, "limit": _finite(limit)} for name, limit in pairs if name]
            about = {"number": group.number, "run": index, "severity": finding.severity, "step": finding.step}
            yield {**about, "metrics": metrics}
