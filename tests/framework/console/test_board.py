import io
import math

import pytest
from loopscope.console import Board
from loopscope.console.board import Notice, Track, arrow_of
from loopscope.console.frame import frame
from loopscope.console.grid import Cell
from loopscope.hooks import Series
from rich.console import Console

from tests.sinks.emits import run_info


def board_of(emitted, live=None, described=()):
    board = Board(live or {})
    board.start(run_info(None, described=list(described)))
    board.take(emitted, 3, 7)
    return board


def cells_of(board):
    return {name: Cell(name, track.brief()) for name, track in board.tracks.items()}


def names(groups):
    return {group.heading: [cell.name for cell in group.cells] for group in groups}


@pytest.mark.parametrize("scale", [1e-30, 1.0, -1.0, 1e30])
def test_arrow_compares_last_value_with_first(scale):
    """The middle of three values and their scale do not matter; a change of 0.09 percent is flat."""
    up, down = ("↑", "↓") if scale > 0 else ("↓", "↑")
    assert arrow_of([1.0 * scale, 9.0 * scale, 1.01 * scale]) == up
    assert arrow_of([1.0 * scale, 0.0, 0.99 * scale]) == down
    assert arrow_of([1.0 * scale, 1.0 * scale, 1.0009 * scale]) == "→"


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 2.0], [1.0, math.nan, 2.0], [1.0, 2.0, math.inf]])
def test_arrow_needs_three_finite_values(values):
    assert arrow_of(values) == ""


def test_zeros_are_flat():
    assert arrow_of([0.0, 0.0, 0.0]) == "→"


def test_every_value_of_a_series_counts():
    track = Track()
    track.add(1.0)
    track.add(Series([1, 2], [5.0, 9.0]))
    assert (track.last, arrow_of(track.recent)) == (9.0, "↑")
    track.add(Series([3, 4, 5, 6], [8.0, 7.0, 6.0, 5.0]))
    assert (track.last, arrow_of(track.recent)) == (5.0, "↓")


def test_metrics_are_grouped_in_described_order():
    """Live metrics form groups with headings, and the other metrics are grouped by hook."""
    emitted = {"b/x": 1.0, "a/loss": 2.0, "a/y": 3.0, "a/evaluation": {"val_loss": 4.0}, "c/z/weight": 5.0}
    live = {"loss": ["a/loss", "a/evaluation/val_loss", "a/absent"], "one": ["c/z/weight"]}
    board = board_of(emitted, live, described=["a/y", "b/x"])
    groups = board.groups(cells_of(board))
    assert list(map(names, groups)) == [{"loss": ["loss", "val_loss"], "one": ["weight"]}, {"a": ["y"], "b": ["x"]}]


def test_live_metrics_of_one_name_keep_hooks():
    live = {"norms": ["a/norm", "b/norm"]}
    board = board_of({"a/norm": 1.0, "b/norm": 2.0}, live)
    assert names(board.groups(cells_of(board))[0]) == {"norms": ["a/norm", "b/norm"]}


def test_training_metrics_replace_missing_live_metrics():
    board = board_of({"training_metrics/loss": 1.0, "a/b": 2.0})
    assert list(map(names, board.groups(cells_of(board)))) == [{"training": ["loss"]}, {"a": ["b"]}]


def test_parameter_metrics_are_hidden():
    """Metrics of single parameters get no track, and a new strategy starts with an empty board."""
    board = board_of({"norms/grad/0.weight": 1.0, "norms/total": 2.0})
    assert list(board.tracks) == ["norms/total"]
    board.start(run_info(None, "other"))
    assert (board.tracks, board.step) == ({}, 0)


def test_later_warnings_keep_critical_finding_visible():
    board = board_of({})
    board.notices += [Notice("critical", "no-mask"), *(Notice("warning", f"later {n}") for n in range(9))]
    console = Console(file=io.StringIO(), width=80, height=24, force_terminal=True)
    console.print(frame(board, None, console))
    assert "critical: " in console.file.getvalue()
    assert "no-mask" in console.file.getvalue()
    assert "later 8" in console.file.getvalue()
