"""Memory declared attribute by attribute: what is saved, what comes back, what a reset leaves."""

import pytest
import torch
from loopscope.errors import UsageError
from loopscope.hooks import Remembered, Remembering, TrainingHook


class Window(Remembering):
    """A helper with a memory and an option."""

    size = 2
    values = Remembered(list[float])

    def add(self, value: float) -> None:
        self.values = [*self.values, value][-self.size :]


class Watch(TrainingHook):
    """A hook that remembers values of every kind."""

    name = "watch"
    best = Remembered[float | None](lambda: None)
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


def test_the_state_has_what_is_remembered_but_not_what_is_used_up_within_a_step():
    state = used().state_dict()
    assert torch.equal(state.pop("zeros"), torch.ones(3))
    assert state == {"best": 0.5, "names": {"a": ["x"]}, "window": {"values": [7.0]}}


def test_a_new_hook_goes_on_from_the_state_and_shares_no_list_with_it():
    state = used().state_dict()
    hook = Watch()
    hook.load_state_dict(state)
    hook._names["a"].append("y")
    hook._window.values.append(8.0)
    again = Watch()
    again.load_state_dict(state)
    assert (again.best, again._names, again._window.values) == (0.5, {"a": ["x"]}, [7.0])
    assert (hook._names, hook._window.values) == ({"a": ["x", "y"]}, [7.0, 8.0])


def test_what_is_not_saved_stays_when_a_state_is_loaded():
    hook = used()
    hook.load_state_dict(Watch().state_dict())
    assert hook.best is None
    assert hook._seen == {"b"}


def test_a_reset_leaves_what_a_new_hook_has_and_gives_no_value_to_two_hooks():
    hook, other = used(), Watch()
    names = hook._names
    hook.reset()
    assert vars(hook) == vars(Watch())
    assert (hook.best, hook._names, hook._window.values, hook._seen) == (None, {}, [], set())
    assert hook._names is not names
    assert hook._names is not other._names
    assert hook._window is not other._window


def test_merged_entries_stand_beside_the_others():
    class Merging(Remembering):
        count = Remembered(int)
        window = Remembered(Window, merged=True)

    merging = Merging()
    merging.window.add(1.0)
    assert merging.state_dict() == {"count": 0, "values": [1.0]}
    again = Merging()
    again.load_state_dict(merging.state_dict())
    assert again.window.values == [1.0]


def test_a_subclass_adds_to_what_its_base_remembers_and_may_replace_it():
    class Sub(Window):
        count = Remembered(int)
        values = Remembered(lambda: [1.0])

    assert Sub().state_dict() == {"values": [1.0], "count": 0}


def test_a_state_that_lacks_a_part_is_refused_by_the_name_of_the_part():
    with pytest.raises(UsageError, match="its state has no 'names', so it is that of another version"):
        Watch().load_state_dict({"best": None})


def test_two_attributes_that_would_be_saved_under_one_name_are_refused():
    with pytest.raises(UsageError, match="Twice remembers two attributes as 'count'; rename one of them"):
        type("Twice", (Remembering,), {"count": Remembered(int), "_count": Remembered(int)})


def test_a_hook_that_defines_the_three_methods_itself_is_asked_nothing_else():
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
