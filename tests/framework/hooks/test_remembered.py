"""Remembered attributes: saved state, loaded state and reset."""

import pytest
import torch
from loopscope.errors import UsageError
from loopscope.hooks import Remembered, Remembering, TrainingHook


class Window(Remembering):
    """A helper with remembered values and an option."""

    size = 2
    values = Remembered(list[float])

    def add(self, value: float) -> None:
        self.values = [*self.values, value][-self.size :]


class Watch(TrainingHook):
    """A hook that remembers values of every kind."""

    name = "watch"
    best = Remembered[float | None](None)
    _names = Remembered(dict[str, list[str]])
    _zeros = Remembered(lambda hook: torch.zeros(hook.length), by_options=True)
    _window = Remembered(Window)
    _seen = Remembered(set[str], saved=False)

    def __init__(self, *, length: int = 3) -> None:
        self.length = length

    def compute(self, ctx):
        return {}

    def describe_metrics(self):
        return []


def used() -> Watch:
    hook = Watch()
    hook.best = 0.5
    hook._names["a"] = ["x"]
    hook._zeros = hook._zeros + 1
    hook._window.add(7.0)
    hook._seen.add("b")
    return hook


def test_state_contains_only_saved_attributes():
    """Attributes that live within a step are not in the state."""
    state = used().state_dict()
    assert torch.equal(state.pop("zeros"), torch.ones(3))
    assert state == {"best": 0.5, "names": {"a": ["x"]}, "window": {"values": [7.0]}}


def test_loaded_hooks_share_no_values_with_state():
    """Changes in one hook reach neither the state nor a second hook."""
    state = used().state_dict()
    hook = Watch()
    hook.load_state_dict(state)
    hook._names["a"].append("y")
    hook._window.values.append(8.0)
    second = Watch()
    second.load_state_dict(state)
    assert (second.best, second._names, second._window.values) == (0.5, {"a": ["x"]}, [7.0])
    assert (hook._names, hook._window.values) == ({"a": ["x", "y"]}, [7.0, 8.0])


def test_unsaved_attributes_survive_loading_a_state():
    hook = used()
    hook.load_state_dict(Watch().state_dict())
    assert hook.best is None
    assert hook._seen == {"b"}


def test_reset_restores_fresh_unshared_values():
    """After a reset, attributes equal those of a new hook and are shared with none."""
    hook, other = used(), Watch()
    names = hook._names
    hook.reset()
    assert vars(hook) == vars(Watch())
    assert (hook.best, hook._names, hook._window.values, hook._seen) == (None, {}, [], set())
    assert hook._names is not names
    assert hook._names is not other._names
    assert hook._window is not other._window


def test_merged_entries_join_the_other_entries():
    """The entries of a merged helper are at the top level of the state."""

    class Merging(Remembering):
        count = Remembered(int)
        window = Remembered(Window, merged=True)

    merging = Merging()
    merging.window.add(1.0)
    assert merging.state_dict() == {"count": 0, "values": [1.0]}
    loaded = Merging()
    loaded.load_state_dict(merging.state_dict())
    assert loaded.window.values == [1.0]


def test_subclass_extends_and_overrides_remembered_attributes():
    class Sub(Window):
        count = Remembered(int)
        values = Remembered([1.0])

    assert Sub().state_dict() == {"values": [1.0], "count": 0}


def test_incomplete_state_names_the_missing_part():
    with pytest.raises(UsageError, match="its state has no 'names', so it was saved by another version"):
        Watch().load_state_dict({"best": None})


def test_attributes_with_equal_saved_names_are_refused():
    """A public and a private attribute of one name would share an entry."""
    with pytest.raises(UsageError, match="Twice remembers two attributes as 'count'; rename one of them"):
        type("Twice", (Remembering,), {"count": Remembered(int), "_count": Remembered(int)})


def test_handwritten_state_methods_are_sufficient():
    """A hook that defines state_dict, load_state_dict and reset needs nothing else."""

    class ByHand(Watch):
        def state_dict(self):
            return {"mine": 1}

        def load_state_dict(self, state):
            self.loaded = dict(state)

        def reset(self):
            self.loaded = {}

    hook = ByHand()
    hook.load_state_dict(hook.state_dict())
    assert hook.loaded == {"mine": 1}
    hook.reset()
    assert hook.loaded == {}


def test_initial_values_are_copied_for_each_owner():
    class Sums(Remembering):
        rows = Remembered([1.0])

    first, second = Sums(), Sums()
    first.rows.append(2.0)
    assert second.rows == [1.0]
    first.reset()
    assert first.rows == [1.0]
