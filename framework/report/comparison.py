"""Comparison of runs in plain values: results, differing settings, first diverging step, and tests over seeds."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from ..errors import listed, require
from ..names import as_names
from ..runs import RunRecord, differences
from ..seed_groups import groups_of
from .curves import ACCURACIES, EVALUATED_BY
from .panels import matcher, no_match, run_labels
from .record_scan import Scan, first_difference, scan
from .run_index import FoundRun
from .seeds import contrast, correct, no_contrast, spread_of

Row = dict[str, Any]
# Compared parts of records, each with the entries that may differ between equivalent runs.
COMPARED: dict[str, Collection[str]] = {
    "config": {"output_dir"},
    "training": {"name"},
    "hooks": (),
    "treatments": (),
    "versions": (),
    "environment": {"command"},
    "provenance": {"script", "started", "watch"},
}

BEST = "best "


def differing_parts(records: Mapping[str, RunRecord]) -> list[Row]:
    """Return the entries that differ between runs: ``part`` of the record, ``name``, and ``values`` by run."""
    rows = []
    for part, may_differ in COMPARED.items():
        parts = {label: vars(record)[part] for label, record in records.items()}
        first, *others = parts.values()
        names = dict.fromkeys(item.name for other in others for item in differences(first, other, may_differ))
        values = {name: {label: part_of_run.get(name) for label, part_of_run in parts.items()} for name in names}
        rows += [{"part": part, "name": name, "values": values[name]} for name in names]
    return rows


def compare_runs(
    found_runs: Sequence[FoundRun],
    patterns: str | Sequence[str] = (),
    *,
    scan_of: Callable[..., Scan] = scan,
    difference_of: Callable[[Scan, Scan], dict[str, Any]] = first_difference,
) -> dict[str, list[Any]]:
    """Compare the readable parts of runs in the matching metrics, by default those of the evaluation.

    Args:
        found_runs: the runs.
        patterns: patterns of the metrics.
        scan_of: :func:`scan`, or a function that knows its results.
        difference_of: :func:`first_difference`, or a function that knows its results.

    Raises:
        UsageError: for fewer than two readable runs, and for a pattern without a match, with the nearest names.
    """
    patterns = as_names(patterns)
    runs = dict(zip(run_labels([run.path.resolve() for run in found_runs]), found_runs, strict=True))
    records = {label: run.record for label, run in runs.items() if run.record is not None}
    problem = f"loopscope compare takes two or more runs, but could read {len(records)}."
    require(len(records) > 1, " ".join([problem, *(run.problem for run in found_runs if run.record is None)]))
    wanted = matcher(patterns) if patterns else evaluations()
    scans = {label: scan_of(runs[label].path, record.strategy, wanted) for label, record in records.items()}
    names = {name: is_number for record_scan in scans.values() for name, is_number in record_scan.names.items()}
    for pattern in patterns:
        matching = list(filter(matcher([pattern]), names))
        if not any(names[name] for name in matching):
            raise no_match(pattern, [name for name in names if names[name]], matching)
    first, *others = [label for label in scans if scans[label].emits] or [""]
    return {
        **compare_over_seeds(runs, scans, last=bool(patterns)),
        "differences": differing_parts(records),
        "first_differences": [
            {"run": other, "other": first, **difference_of(scans[first], scans[other])} for other in others
        ],
    }


def evaluations() -> Callable[[str], bool]:
    """Return a function that selects the metrics of the evaluation."""
    return matcher([f"{EVALUATED_BY}/{name}" for name in (*ACCURACIES, "evaluation/**")])


def compare_over_seeds(
    runs: Mapping[str, FoundRun], scans: Mapping[str, Scan], *, last: bool = False
) -> dict[str, list[Any]]:
    """Return a row per run, spreads and tests of groups that differ only in seeds, and explanatory sentences."""
    groups = groups_of({label: run.record for label, run in runs.items() if run.record is not None})
    rows = [_row(label, run, scans.get(label, Scan(run.path, "")), groups.get(label)) for label, run in runs.items()]
    sentences = list(_sentences(rows))
    spreads, tests = _over_seeds([row for row in rows if row["group"]], sentences, last=last)
    return {"runs": rows, "spreads": spreads, "tests": tests, "sentences": sentences}


def _row(label: str, run: FoundRun, scan: Scan, group: str | None) -> Row:
    record, summary = run.record, run.summary
    row: Row = {"run": label, "path": str(run.path), "state": run.state}
    row |= {"problem": " ".join([run.problem, scan.problem]).strip()}
    row |= {"experiment": record and record.experiment, "strategy": record and record.strategy, "group": group}
    epochs, steps = (summary["epochs"], summary["steps"]) if summary else scan.length
    reached = summary["target_reached"] if summary else None
    final = {**summary["final"], **summary["metrics"]} if summary else {}
    row |= {"seed": None if record is None else record.seed, "epochs": epochs, "steps": steps}
    row |= {"target_epoch": reached and reached["epoch"], "treatments": list(record.treatments) if record else []}
    return row | {"final": final, "metrics": {name: vars(metric) for name, metric in scan.metrics.items()}}


def _sentences(rows: Sequence[Row]) -> Iterator[str]:
    """Yield sentences about the direction of best values and about missing values."""
    best = {name: metric["best_is"] for row in rows for name, metric in row["metrics"].items()}
    for direction in dict.fromkeys(best.values()):
        names = listed([name for name in best if best[name] == direction])
        known = f"Best is the {direction}" if direction else "No best value, since the name has neither loss nor acc"
        yield f"{known}: {names}."
    experiments = list(dict.fromkeys(row["experiment"] for row in rows if row["group"]))
    if len(experiments) > 1:
        yield f"Runs of different experiments are not tested against each other: {listed(experiments)}."
    for row in rows:
        without = [name for name in best if name not in row["metrics"]]
        metrics = row["metrics"].items()
        not_finite = [f"{metric['not_finite']:,} of {name}" for name, metric in metrics if metric["not_finite"]]
        problems = {"": row["problem"], "has no ": listed(without), "not finite: ": listed(not_finite)}
        if row["state"] != "completed":
            problems[row["state"]] = ", so only its recorded part is compared, and it is excluded from groups"
        yield from (f"{row['run']}: {label}{text}" for label, text in problems.items() if text)


def _over_seeds(rows: Sequence[Row], sentences: list[str], *, last: bool) -> tuple[list[Row], list[Row]]:
    """Return the spreads of each group and the tests between groups; append excluded runs to ``sentences``."""
    groups: dict[str, dict[int, Row]] = {row["group"]: {} for row in rows}
    for row in sorted(rows, key=lambda row: bool(row["state"] != "completed")):
        seeds = groups[row["group"]]
        if row["seed"] is None:
            sentences.append(f"{row['run']}: has no seed, so it is in no group")
        elif seeds.setdefault(row["seed"], row) is not row:
            sentences.append(f"{row['run']}: has the settings of {seeds[row['seed']]['run']}, and is not counted again")
    few = [name for name, seeds in groups.items() if len(seeds) < 2]
    sentences += [f"One seed is not enough for a significance test: {listed(few)}."] if few else []
    if len(few) == len(groups):
        return [], []
    numbers_of = {row["run"]: _numbers(row, last=last) for row in rows}
    names = dict.fromkeys(name for numbers in numbers_of.values() for name in numbers)
    by_seed = {
        (name, group): {seed: numbers_of[row["run"]].get(name) for seed, row in seeds.items()}
        for name in names
        for group, seeds in groups.items()
    }
    experiments = {row["group"]: row["experiment"] for row in rows}
    pairs = [(a, b) for a, b in combinations(groups, 2) if experiments[a] == experiments[b]]
    cases = [(name, a, b) for name in names for a, b in pairs]
    compared = [({"number": name, "a": a, "b": b}, by_seed[name, a], by_seed[name, b]) for name, a, b in cases]
    uneven = [about for about, _, _ in compared if _is_uneven(about, groups)]
    if uneven:
        uneven_names = listed([*dict.fromkeys(about["number"] for about in uneven)])
        sentences.append(f"Runs with more evaluations find better values by chance, so not tested: {uneven_names}.")
    tests = [
        {**about, **(no_contrast("unequal numbers of evaluations") if about in uneven else contrast(a, b))}
        for about, a, b in compared
    ]
    correct(tests)
    return [
        {"number": name, "group": group, **spread_of([*values.values()])} for (name, group), values in by_seed.items()
    ], tests


def _is_uneven(about: Mapping[str, str], groups: Mapping[str, Mapping[int, Row]]) -> bool:
    """Return whether a test compares best values of different numbers of evaluations."""
    name = about["number"].removeprefix(BEST)
    rows = [row for group in (about["a"], about["b"]) for row in groups[group].values() if row["state"] == "completed"]
    counts = {row["metrics"][name]["points"] for row in rows if name in row["metrics"]}
    return about["number"].startswith(BEST) and len(counts) > 1


def _numbers(row: Row, *, last: bool) -> dict[str, float]:
    """Return the numbers of a completed run for tests over seeds: best values, and last values or final numbers."""
    if row["state"] != "completed":
        return {}
    metrics = row["metrics"].items()
    ends = {f"last {name}": metric["last"] for name, metric in metrics} if last else {}
    final = {} if last else {f"final {name}": value for name, value in row["final"].items()}
    return final | ends | {f"{BEST}{name}": metric["best"] for name, metric in metrics if metric["best"] is not None}
