"""Recording of the parts in two processes; runs in the tree to be recorded."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

PARTS = ("hooks", "experiments", "trainers", "ranks", "help")
PROCESSES = 2
WHOLE = ""
"""Stands for the name of a case: one call records the part, in a process without the oracle's experiments."""


def check_tree(tree: Path) -> None:
    """Raise :class:`RuntimeError` unless loopscope is imported from a tree."""
    import loopscope

    imported = Path(str(loopscope.__file__)).resolve()
    if tree.resolve() not in imported.parents:
        raise RuntimeError(f"The oracle is to record {tree}, but loopscope is imported from {imported}.")


def record(parts: list[str], tree: Path) -> dict[str, Any]:
    """Return the record of these parts: by part and by case, ``facts`` and ``digests``; of ``help`` the texts."""
    check_tree(tree)
    records: dict[str, Any] = {part: {} for part in parts}
    context = multiprocessing.get_context("spawn")
    for part in parts:
        if part in ("ranks", "help"):
            with ProcessPoolExecutor(1, context, check_tree, (tree,)) as alone:
                records[part] = alone.submit(record_one, (part, WHOLE)).result()
    units = [(part, name) for part in parts for name in names_of(part)]
    with ProcessPoolExecutor(PROCESSES, context, prepare, (tree,)) as pool:
        for (part, name), result in zip(units, pool.map(record_one, units), strict=True):
            records[part][name] = result
    return records


def names_of(part: str) -> list[str]:
    """Return the names of the cases of a part that are recorded separately."""
    from tests.oracle import experiment_cases, hook_cases, product, trainer_cases

    product.discover()
    by_part = {"hooks": hook_cases, "experiments": experiment_cases, "trainers": trainer_cases}
    return by_part[part].names() if part in by_part else []


def prepare(tree: Path) -> None:
    """Prepare a process: register the oracle's experiments, and trigger late imports by running two cases.

    Importing rich draws from Python's generator, so the first case of a process would differ from its second.
    """
    check_tree(tree)
    from tests.oracle import experiments, hook_cases, product, recording

    product.discover()
    experiments.register()
    product.keep_optimizers()
    for name in ("training_metrics/epoch", "training_metrics/attach"):
        with recording.isolated_case():
            hook_cases.record(name)


def record_one(unit: tuple[str, str]) -> Any:
    """Return the record of one case, or of a whole part."""
    from tests.oracle import product, recording

    part, name = unit
    product.discover()
    if name == WHOLE:
        with recording.isolated_case():
            return record_whole(part)
    from tests.oracle import experiment_cases, hook_cases, trainer_cases

    functions: dict[str, Callable[[str], Any]] = {
        "hooks": hook_cases.record,
        "experiments": experiment_cases.record,
        "trainers": trainer_cases.record,
    }
    with recording.isolated_case():
        try:
            return functions[part](name)
        except Exception as error:
            error.add_note(f"Raised by the case {name} of {part}.")
            raise


def record_whole(part: str) -> Any:
    """Return the record of a part that one call records."""
    if part == "help":
        from tests.oracle import help_cases

        return help_cases.texts()
    from tests.oracle import rank_cases

    return rank_cases.record_all()
