"""The members of a family that a hook reports, and the file with all of them."""

import json
import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopscope.errors import UsageError
from loopscope.hooks import Remembered, Remembering
from loopscope.training_hooks.measures import FamilyFile, SeriesBudget

VALUES = st.dictionaries(st.text("abc.", min_size=1), st.floats(), max_size=40)


@given(VALUES, st.integers(0, 9), st.integers(0, 9))
def test_budget_bounds_number_of_series(values, top, bottom):
    """At most top + bottom members are chosen; the others are between those of top and bottom, up to nine digits."""
    chosen = SeriesBudget("hook", top=top, bottom=bottom).choose(values)
    assert len(chosen) == min(top + bottom, len(values))
    assert chosen == [name for name in values if name in chosen]
    keys = {name: math.inf if math.isnan(value) else float(f"{value:.9g}") for name, value in values.items()}
    left_out = [keys[name] for name in values if name not in chosen]
    assert all(sum(keys[name] >= value for name in chosen) >= top for value in left_out)
    assert all(sum(keys[name] <= value for name in chosen) >= bottom for value in left_out)


def test_rounding_errors_choose_no_members():
    """Members whose values are equal but for rounding are chosen by their order."""
    budget = SeriesBudget("hook", top=1, bottom=1)
    assert budget.choose({"a": 1.0, "b": 1 - 1e-15, "c": 1 + 1e-15, "d": 1 - 2e-15}) == ["a", "d"]
    assert budget.choose({"a": 1.0, "b": 1 - 1e-6, "c": 1 + 1e-6, "d": 1.0}) == ["b", "c"]


def test_patterns_choose_members():
    """Members that match a pattern are reported in addition to the largest and the smallest."""
    values = {"embed": 1.0, "h.0.w": 2.0, "h.1.w": 3.0, "head": math.nan}
    assert SeriesBudget("hook", "h.*, none", top=1, bottom=0).choose(values) == ["h.0.w", "h.1.w", "head"]
    assert SeriesBudget("hook", "*", top=0, bottom=0).choose(values) == list(values)


@pytest.mark.parametrize("pattern", ["layer.*", "HEAD"])
def test_patterns_without_members_are_refused(pattern):
    """A pattern that matches nothing is a mistake, and the sentence shows existing names."""
    with pytest.raises(UsageError, match="matches none of the 2 names; the first are 'embed', 'head'"):
        SeriesBudget("hook", f"embed, {pattern}").check_names(["embed", "head"])


def test_family_file_continues_at_checkpoint(tmp_path):
    """Lines after the checkpoint are replaced, so the file of a resumed run is that of an uninterrupted one."""
    run = SimpleNamespace(output_dir=tmp_path, strategy="only")
    interrupted, resumed = FamilyFile(), FamilyFile()
    interrupted.start("norms", run)
    interrupted.append(1, {"norm": {"a": 1.0, "b": math.inf}})
    state = interrupted.state_dict()
    interrupted.append(2, {"norm": {"a": 7.0}})
    resumed.start("norms", run)
    resumed.load_state_dict(state)
    resumed.append(2, {"norm": {"a": 2.0}})
    lines = (tmp_path / FamilyFile.name("norms", "only")).read_text().splitlines()
    assert list(map(json.loads, lines)) == [
        {"step": 1, "norm": {"a": 1.0, "b": math.inf}},
        {"step": 2, "norm": {"a": 2.0}},
    ]


class Writer(Remembering):
    """An owner of a file."""

    file = Remembered(FamilyFile)


def test_family_file_keeps_its_path_when_loaded(tmp_path):
    """A step that the loop cancels loads the state of the hook while the run continues."""
    writer = Writer()
    writer.file.start("norms", SimpleNamespace(output_dir=tmp_path, strategy="only"))
    writer.file.append(1, {"norm": {"a": 1.0}})
    state = writer.state_dict()
    writer.file.append(2, {"norm": {"a": 7.0}})
    writer.load_state_dict(state)
    writer.file.append(2, {"norm": {"a": 2.0}})
    lines = (tmp_path / FamilyFile.name("norms", "only")).read_text().splitlines()
    assert [json.loads(line)["norm"] for line in lines] == [{"a": 1.0}, {"a": 2.0}]
