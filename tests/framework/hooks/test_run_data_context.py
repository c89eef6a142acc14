"""The contexts of hooks, which are created without the generated ``__init__`` of their class."""

from dataclasses import FrozenInstanceError, fields

import pytest
from loopscope.hooks import HookPoint, RunDataContext

from tests.support import Case, SpyHook, at, train


def contexts() -> dict[HookPoint, RunDataContext]:
    """Return one context of every hook point of the epoch loop."""
    seen: dict[HookPoint, RunDataContext] = {}
    spy = at(SpyHook, *(point for point in HookPoint if point is not HookPoint.SNAPSHOT))
    train(Case(), [spy(lambda ctx: seen.update({ctx.hook_point: ctx}))])
    return seen


def test_context_has_every_field() -> None:
    """The names of all fields are set, and no others."""
    seen = contexts()
    assert len(seen) == len(HookPoint) - 1
    for context in seen.values():
        assert [*vars(context)] == [item.name for item in fields(RunDataContext)]


@pytest.mark.parametrize("name", ["step", "unknown"])
def test_attributes_cannot_be_set(name: str) -> None:
    with pytest.raises(FrozenInstanceError):
        setattr(contexts()[HookPoint.POST_STEP], name, 1)
