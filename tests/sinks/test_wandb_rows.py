"""Conversion of record lines to W&B rows, without a client."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from loopscope.sinks.client_process import ClientTask, Ending, RecordReplacedError, chunks, distribution, rows
from loopscope.sinks.wandb_process import description, start_wandb_run

POINTS = ("POST_STEP",)


class FakeListener:
    """A listener that receives the end of the run after a number of polls."""

    def __init__(self, polls: int, ending: Ending, between=lambda: None):
        self.polls, self.ending, self.between = polls, ending, between

    def wait(self, seconds: float) -> bool:
        if seconds:
            self.between()
        self.polls -= 1
        return self.polls < 0


def read_records(polls: int, path: Path, ending: Ending | None = None, **options: Any) -> Iterator[dict[str, Any]]:
    return chain.from_iterable(chunks(path, FakeListener(polls, ending or Ending("completed"), **options)))


def row_of(metrics, point="POST_EPOCH", step=7):
    return rows({"epoch": 3, "step": step, "hook_point": point, **metrics}, POINTS, sorted)


def test_values_of_an_epoch_are_one_row():
    assert row_of({"h/a": 0.5, "h/b": {"x": True}}) == [{"step": 7, "epoch": 3, "h/a": 0.5, "h/b/x": 1}]


def test_series_rows_have_steps_mean_and_histogram():
    """Each value is in the row of its step; mean and histogram are in the last row."""
    series = {"h/a": {"steps": [2, 4], "values": [3.0, 1.0]}, "h/b": {"steps": [4], "values": [{"w": 2.0}]}}
    assert row_of(series, "POST_STEP", step=4) == [
        {"step": 2, "epoch": 3, "h/a": 3.0},
        {"step": 4, "epoch": 3, "h/a": 1.0, "h/a/mean": 2.0, "h/a/histogram": [1.0, 3.0], "h/b/w": 2.0},
    ]


def test_series_like_dict_outside_series_stays_dict():
    """At hook points without series, steps and values are ordinary keys."""
    (row,) = row_of({"h/a": {"steps": 1, "values": 2}})
    assert row == {"step": 7, "epoch": 3, "h/a/steps": 1, "h/a/values": 2}


def test_nonfinite_values_are_counted_outside_histogram():
    """The mean shows them as NaN or infinity."""
    assert distribution("h", [1.0, math.nan, math.inf], sorted) == {"h": [1.0], "h/non_finite": 2}
    assert distribution("h", [-math.inf], sorted) == {"h/non_finite": 1}
    (row,) = row_of({"h/a": {"steps": [7], "values": [math.nan]}}, "POST_STEP")
    assert math.isnan(row["h/a/mean"])


def test_oversized_integers_become_floats():
    (row,) = row_of({"h/a": 2**62, "h/b": 2**70, "h/c": -(10**400)})
    assert (row["h/a"], row["h/b"], row["h/c"]) == (2**62, 2.0**70, -math.inf)
    assert type(row["h/a"]) is int


def test_huge_integer_does_not_stop_other_values():
    """An integer beyond the float range becomes infinity."""
    (row,) = row_of({"h/a": {"steps": [7], "values": [10**400]}, "h/b": 1.0}, "POST_STEP")
    assert (row["h/a/mean"], row["h/b"]) == (math.inf, 1.0)


def test_growing_record_is_read_without_torn_line(tmp_path):
    """Lines are read as they are completed, and a torn last line is left out."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a":')
    more = iter([' 2}\n{"a": NaN}\n', '{"cut'])
    with path.open("a") as file:
        between = lambda: print(next(more), end="", file=file, flush=True)
        values = [line["a"] for line in read_records(5, path, between=between)]
    assert values[:2] == [1, 2]
    assert math.isnan(values[2])
    assert len(values) == 3


def test_reading_stops_at_size_of_run(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    assert [line["a"] for line in read_records(0, path, Ending("completed", 9))] == [1]


def test_overwritten_record_raises(tmp_path):
    """A record that another run overwrites while it is read raises RecordReplacedError."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    with pytest.raises(RecordReplacedError, match="was overwritten"):
        list(read_records(3, path, between=lambda: path.write_text("{}\n")))


VARIABLES = {
    "WANDB_PROJECT": "mine",
    "WANDB_NAME": "seventh try",
    "WANDB_RUN_GROUP": "sweep",
    "WANDB_JOB_TYPE": "train",
    "WANDB_DIR": "/elsewhere",
}


@pytest.mark.parametrize("variable", [None, *VARIABLES])
def test_variables_replace_their_defaults(monkeypatch, variable):
    """W&B reads a variable only if the argument is missing."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("WANDB_TAGS", raising=False)
    task = ClientTask("r", "folder", None, "exp", "s", {}, {}, [], None)
    arguments = {"project": "exp", "group": "exp", "name": "s", "job_type": "s", "dir": "folder", "tags": None}
    assert description(task) == arguments
    if variable is not None:
        monkeypatch.setenv(variable, VARIABLES[variable])
        replaced = dict(zip(VARIABLES, ["project", "name", "group", "job_type", "dir"], strict=True))[variable]
        assert description(task) == {name: value for name, value in arguments.items() if name != replaced}
    assert description(replace(task, project="chosen"))["project"] == "chosen"


def test_tags_of_variable_and_treatments_are_joined(monkeypatch):
    monkeypatch.setenv("WANDB_TAGS", "a, b,")
    task = ClientTask("r", "folder", None, "exp", "s", {}, {"grad_clip": ["gradients"]}, [], None)
    assert description(task)["tags"] == ["a", "b", "treatment:grad_clip"]


class WithoutLogin:
    """A W&B module without a login."""

    class UsageError(Exception):
        pass

    def init(self, *, mode: str | None = None, **options: Any) -> tuple[str | None, dict[str, Any]]:
        if mode is None:
            raise self.UsageError("No API key configured. Use `wandb login` to log in.")
        return mode, options


def test_without_a_login_the_client_is_offline(monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert start_wandb_run(WithoutLogin(), project="demo") == ("offline", {"project": "demo"})


def test_requested_mode_is_kept(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(WithoutLogin.UsageError, match="No API key"):
        start_wandb_run(WithoutLogin(), project="demo")
