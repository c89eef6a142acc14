"""The tables of fields in docs/loop.md match runs of both loops."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loopscope.hooks import SET_AT, HookPoint, RunDataContext
from loopscope.hooks.hook_points import POINTS_OF_LOOP

from tests.docs.markdown import ROOT, code, tables
from tests.support import LOOPS, Case, SpyHook, at, train

STEPS = 12
LOG_EVERY = 3
EVALUATED = {"epoch": {6, 12}, "step": {4, 8, 12}}
OPTIONS: dict[str, dict[str, Any]] = {
    "epoch": {"eval_every": 2, "snapshot_every": 1},
    "step": {"eval_every": 4, "snapshot_every": 2, "log_every": LOG_EVERY},
}
CONDITIONS: dict[str, Callable[[str, bool, int], bool]] = {
    "yes": lambda loop, wanted, step: True,
    "-": lambda loop, wanted, step: False,
    "float16": lambda loop, wanted, step: (
        False
    ),  # tests/framework/training/test_precision.py has the runs in which it is set
    "wanted": lambda loop, wanted, step: wanted,
    "wanted, from step 2": lambda loop, wanted, step: wanted and step >= 2,
    "no step since": lambda loop, wanted, step: step in EVALUATED[loop],
}
OF_CONTEXT = {item.name for item in dataclasses.fields(RunDataContext)}
FIELDS = sorted(OF_CONTEXT - {"services"} | {"optimizer_groups", "row_indices"})


def table_of(loop: str) -> dict[str, dict[str, str]]:
    """Return the conditions of the page by field and point."""
    both = [table for table in tables(ROOT / "docs/loop.md") if table and "PRE_STEP" in table[0]]
    rows = {frozenset(row.keys() - {"field"}): table for table in both for row in table}
    table = rows[frozenset(point.name for point in POINTS_OF_LOOP[loop])]
    return {field: row for row in table for field in code(row["field"])}


def seen(loop: str, *, wanted: bool) -> list[tuple[HookPoint, int, dict[str, bool]]]:
    """Run a loop and return the fields that were set at each call."""
    set_fields: list[tuple[HookPoint, int, dict[str, bool]]] = []

    def probe(ctx: Any) -> None:
        values = {name: getattr(ctx, name) for name in FIELDS}
        set_fields.append((ctx.hook_point, ctx.step, {name: is_set(value) for name, value in values.items()}))

    flags = ("needs_grads", "needs_step_series", "needs_prev_step_grads")
    needs = dict.fromkeys(flags, wanted)
    spy = at(SpyHook, *HookPoint, **needs)(probe)
    weight = {"0.weight": torch.ones(1)}
    reference = weight if wanted else None
    options = {"reference_weights": reference, **OPTIONS[loop]}
    train(Case(loop=loop), [spy], steps=STEPS, **options)
    return set_fields


def is_set(value: Any) -> bool:
    return value is not None and value not in ({}, ())


@pytest.mark.parametrize("loop", LOOPS)
def test_the_table_has_every_field(loop: str) -> None:
    assert sorted(table_of(loop)) == FIELDS


@pytest.mark.longer
@pytest.mark.slow_rows("epoch-True", "epoch-False")
@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("loop", LOOPS)
def test_loop_fields_match_documented_table(loop: str, wanted: bool) -> None:
    """Both loops set every field at the points and under the conditions that docs/loop.md lists."""
    table = table_of(loop)
    fires = seen(loop, wanted=wanted)
    assert {point for point, _, _ in fires} == POINTS_OF_LOOP[loop]
    for point, step, fields in fires:
        for field, is_present in fields.items():
            condition = table[field][point.name]
            assert is_present == CONDITIONS[condition](loop, wanted, step), f"{field} at {point.name} of step {step}"


def test_field_error_points_match_documented_table() -> None:
    """The points in the errors about unset fields are those where the documented table sets the field."""
    table = table_of("epoch")
    assert SET_AT.keys() == {name for name, row in table.items() if set(row.values()) - {row["field"], "yes"}}
    for name, (points, _, _) in SET_AT.items():
        there = {point for point, cell in table[name].items() if point != "field" and cell != "-"}
        assert {point.name for point in points} == there, name


@pytest.mark.longer
@pytest.mark.parametrize("loop", LOOPS)
def test_table_conditions_occur_and_do_not_occur(loop: str) -> None:
    """The runs contain steps that meet each condition of the table and steps that do not."""
    conditions = {cell for row in table_of(loop).values() for name, cell in row.items() if name != "field"}
    steps = [step for _, step, _ in seen(loop, wanted=True)]
    for condition in conditions - {"yes", "-", "wanted", "float16"}:
        assert {CONDITIONS[condition](loop, True, step) for step in steps} == {True, False}
