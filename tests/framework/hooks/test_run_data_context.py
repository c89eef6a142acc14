"""The creation of a RunDataContext, whose generated method is replaced by a faster one."""

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
from loopscope.hooks import HookPoint, RunDataContext

REQUIRED: dict[str, Any] = dict.fromkeys(("model", "config", "loader", "services", "profiler")) | {
    "hook_point": HookPoint.POST_STEP,
    "epoch": 1,
    "step": 7,
}


def test_missing_fields_get_their_defaults() -> None:
    context = RunDataContext(**REQUIRED)
    assert (context.step, context.skipped_steps, dict(context.evaluation)) == (7, 0, {})


def test_both_ways_of_creation_are_equal() -> None:
    context = RunDataContext(**REQUIRED)
    values = {item.name: getattr(context, item.name) for item in fields(context)}
    assert RunDataContext(**values) == context
    assert replace(context, step=8).step == 8


@pytest.mark.parametrize("values", [{"step": 1}, REQUIRED | {"unknown": 1}])
def test_missing_and_unknown_fields_raise(values: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="argument"):
        RunDataContext(**values)


@pytest.mark.parametrize("name", ["step", "unknown"])
def test_attributes_cannot_be_set(name: str) -> None:
    with pytest.raises(FrozenInstanceError):
        setattr(RunDataContext(**REQUIRED), name, 1)
