"""Runs side by side, in plain values: how they ended, what differs, where their records part, what seeds tell."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from ..errors import listed, require
from ..hooks import HookRegistry
from ..runs import RunRecord, differences
from .curves import ACCURACIES
from .found import FoundRun
from .panels import matcher, no_match, run_labels
from .scanning import Scan, parting, scan
from .seeds import contrast, correct, groups_of, spread_of

Row = dict[str, Any]
# Parts of records that are compared, each with what may differ in runs that are meant to be the same.
COMPARED = {"config": {"output_dir"}, "hooks": (), "treatments": (), "versions": (), "environment": {"command"}}


def differing_parts(records: Mapping[str, RunRecord]) -> list[Row]:
    """List the entries in which any of the runs differs: ``part`` of the record, ``name``, and ``values`` by run."""
    found = []
    for part, may_differ in COMPARED.items():
        parts = {label: vars(record)[part] for label, record in records.items()}
        first, *others = parts.values()
        names = dict.fromkeys(item.name for other in others for item in differences(first, other, may_differ))
        values = {name: {label: each.get(name) for label, each in parts.items()} for name in names}
        found += [{"part": part, "name": name, "values": values[name]} for name in names]
    return found


def compare_runs(found: Sequence[FoundRun], patterns: Sequence[str] = ()) -> dict[str, list[Any]]:
    """Compare runs as far as they can be read, in the metrics that match; by default the numbers of the evaluation.

    Raises :class:`UsageError` for fewer than two runs, and, with the nearest names, for a pattern that matches none.
    """
    runs = dict(zip(run_labels([run.path.resolve() for run in found]), found, strict=True))
    records = {label: run.record for label, run in runs.items() if run.record is not None}
    several = f"loopscope compare takes two runs or more, and found {len(records)} that can be read."
    require(len(records) > 1, " ".join([several, *(run.problem for run in found if run.record is None)]))
    wanted = matcher(patterns) if patterns else evaluations()
    scans = {label: scan(runs[label].path, record.strategy, wanted) for label, record in records.items()}
    names = {name: is_number for each in scans.values() for name, is_number in each.names.items()}
    for pattern in patterns:
        matching = list(filter(matcher([pattern]), names))
        if not any(names[name] for name in matching):
            raise no_match(pattern, [name for name in names if names[name]], matching)
    first, *others = [label for label in scans if scans[label].emits] or [""]
    return {
        **told_by_seeds(runs, scans, last=bool(patterns)),
        "differences": differing_parts(records),
        "partings": [{"run": other, "other": first, **parting(scans[first], scans[other])} for other in others],
    }


def evaluations() -> Callable[[str], bool]:
    """Return a function that is true for the numbers of the evaluation."""
    always = [hook.name for hook in HookRegistry if hook.always]
    return matcher([f"{hook}/{name}" for hook in always for name in (*ACCURACIES, "evaluation/**")])


def told_by_seeds(
    runs: Mapping[str, FoundRun], scans: Mapping[str, Scan], *, last: bool = False
) -> dict[str, list[Any]]:
    """Return a row for each run, and for groups that differ in seeds only their spreads, tests, and what to know."""
    groups = groups_of({label: run.record for label, run in runs.items() if run.record is not None})
    rows = [_row(label, run, scans.get(label, Scan(run.path, "")), groups.get(label)) for label, run in runs.items()]
    sentences = list(_sentences(rows))
    spreads, tests = _over_seeds([row for row in rows if row["group"]], sentences, last=last)
    return {"runs": rows, "spreads": spreads, "tests": tests, "sentences": sentences}


def _row(label: str, run: FoundRun, scan: Scan, group: str | None) -> Row:
    record, summary, seed = run.record, run.summary, run.config.get("seed")
    told: Row = {"run": label, "path": str(run.path), "state": run.state}
    told |= {"problem": " ".join([run.problem, scan.problem]).strip()}
    told |= {"experiment": record and record.experiment, "strategy": record and record.strategy, "group": group}
    epochs, steps = (summary["epochs"], summary["steps"]) if summary else scan.length
    reached = summary["target_reached"] if summary else None
    final = {**summary["final"], **summary["metrics"]} if summary else {}
    told |= {"seed": seed if type(seed) is int else None, "epochs": epochs, "steps": steps}
    told |= {"target_epoch": reached and reached["epoch"], "treatments": list(record.treatments) if record else []}
    return told | {"final": final, "metrics": {name: vars(seen) for name, seen in scan.metrics.items()}}


def _sentences(rows: Sequence[Row]) -> Iterator[str]:
    """Say which values are best, and what is missing where."""
    best = {name: seen["best_is"] for row in rows for name, seen in row["metrics"].items()}
    for which in dict.fromkeys(best.values()):
        names = listed([name for name in best if best[name] == which])
        yield f"Best is the {which}: {names}." if which else f"No best, being neither loss nor acc by name: {names}."
    experiments = list(dict.fromkeys(row["experiment"] for row in rows if row["group"]))
    if len(experiments) > 1:
        yield f"These are runs of different experiments, whose numbers are not tested: {listed(experiments)}."
    for row in rows:
        without = [name for name in best if name not in row["metrics"]]
        odd = [f"{seen['not_finite']:,} of {name}" for name, seen in row["metrics"].items() if seen["not_finite"]]
        told = {"": row["problem"], "has no ": listed(without), "not finite: ": listed(odd)}
        if row["state"] != "completed":
            told[row["state"]] = ", so compared as far as it goes, and missing over seeds"
        yield from (f"{row['run']}: {what}{text}" for what, text in told.items() if text)


def _over_seeds(rows: Sequence[Row], told: list[str], *, last: bool) -> tuple[list[Row], list[Row]]:
    """Return the numbers of each group, and the tests between groups of one experiment; tell what is left out."""
    groups: dict[str, dict[int, Row]] = {row["group"]: {} for row in rows}
    for row in sorted(rows, key=lambda row: bool(row["state"] != "completed")):
        seeds = groups[row["group"]]
        if row["seed"] is None:
            told.append(f"{row['run']}: has no seed, and counts in no group")
        elif seeds.setdefault(row["seed"], row) is not row:
            told.append(f"{row['run']}: differs in nothing from {seeds[row['seed']]['run']}, which alone counts")
    few = [name for name, seeds in groups.items() if len(seeds) < 2]
    told += [f"With one seed nothing can be told about chance: {listed(few)}."] if few else []
    if len(few) == len(groups):
        return [], []
    told_of = {row["run"]: _numbers(row, last=last) for row in rows}
    names = dict.fromkeys(name for numbers in told_of.values() for name in numbers)
    found = {
        (name, group): {seed: told_of[row["run"]].get(name) for seed, row in seeds.items()}
        for name in names
        for group, seeds in groups.items()
    }
    experiments = {row["group"]: row["experiment"] for row in rows}
    pairs = [(a, b) for a, b in combinations(groups, 2) if experiments[a] == experiments[b]]
    compared = [({"number": name, "a": a, "b": b}, found[name, a], found[name, b]) for name in names for a, b in pairs]
    tests = [{**about, **contrast(a, b)} for about, a, b in compared]
    correct(tests)
    return [{"number": name, "group": group, **spread_of([*of.values()])} for (name, group), of in found.items()], tests


def _numbers(row: Row, *, last: bool) -> dict[str, float]:
    """Return what is told of a completed run over seeds: best values of metrics, and last ones or final numbers."""
    if row["state"] != "completed":
        return {}
    seen = row["metrics"].items()
    ends = {f"last {name}": each["last"] for name, each in seen} if last else {}
    final = {} if last else {f"final {name}": value for name, value in row["final"].items()}
    return final | ends | {f"best {name}": each["best"] for name, each in seen if each["best"] is not None}
