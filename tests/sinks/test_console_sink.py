import io
import random
import re

import pytest
from rich.console import Console

from framework.hook_points import HookPoint
from framework.metrics import Series
from sinks.console import ConsoleSink, Group, balanced, in_pieces
from tests.sinks.emits import run_info

SCALARS = {"training_metrics/loss": 0.123456, "norms/total": 1234.5678, "norms/grad/layers.0.weight": 9.9}


def console_of(width, *, terminal=True):
    return Console(
        file=io.StringIO(), width=width, force_terminal=terminal, force_interactive=terminal, legacy_windows=False
    )


def shown(metrics, width=80, *, terminal=True, point=HookPoint.POST_EPOCH, described=()):
    """Return what a sink shows of one emit and a SNAPSHOT."""
    console = console_of(width, terminal=terminal)
    sink = ConsoleSink(console=console)
    sink.set_run_context(run_info(None, "stride", list(described)))
    sink.emit(metrics, 9, point, step=1234)
    sink.snapshot(9, 1234)
    return console.file.getvalue()


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_nothing_is_shown_before_a_snapshot():
    console = console_of(80)
    sink = ConsoleSink(console=console)
    sink.set_run_context(run_info(None))
    sink.emit(SCALARS, 0, HookPoint.POST_EPOCH, step=1)
    assert console.file.getvalue() == ""
    sink.snapshot(0, 1)
    assert "0.1235" in console.file.getvalue()


def test_the_title_says_what_and_when():
    title = plain(shown(SCALARS)).splitlines()[0]
    assert title.startswith("exp  stride  epoch 9  step 1,234 ")


def test_values_have_four_significant_digits_and_stand_under_their_hook():
    lines = [line.split() for line in plain(shown(SCALARS, 30)).splitlines()]
    assert lines[1:] == [["training_metrics"], ["loss", "0.1235"], ["norms"], ["total", "1235"]]


def test_metrics_of_single_parameters_are_hidden():
    assert "layers.0.weight" not in shown(SCALARS)


def test_hooks_stand_in_the_order_in_which_they_were_described():
    text = shown({"b/x": 1, "a/y": 2}, 30, described=["a/y", "b/x"])
    assert text.index("a") < text.index("b")


def test_a_series_is_its_last_value_the_mean_and_the_count_since_the_last_table():
    console = console_of(80)
    sink = ConsoleSink(console=console)
    sink.set_run_context(run_info(None))
    for epoch, values in enumerate([[1.0, 2.0], [4.0, 5.0]]):
        sink.emit({"h/loss": Series([1, 2], values)}, epoch, HookPoint.POST_STEP, step=2)
    sink.snapshot(1, 4)
    sink.emit({"h/loss": Series([5], [7.0])}, 2, HookPoint.POST_STEP, step=5)
    sink.snapshot(2, 5)
    assert re.findall(r"loss +(.+?) *\n", plain(console.file.getvalue())) == ["5 / 3 (4)", "7 / 7 (1)"]


def test_what_no_snapshot_showed_is_shown_at_the_end():
    console = console_of(80)
    sink = ConsoleSink(console=console)
    sink.set_run_context(run_info(None))
    sink.emit(SCALARS, 0, HookPoint.POST_EPOCH, step=1)
    sink.close("interrupted")
    assert "0.1235" in console.file.getvalue()


def test_a_snapshot_without_news_shows_nothing():
    console = console_of(80)
    sink = ConsoleSink(console=console)
    sink.set_run_context(run_info(None))
    sink.snapshot(0, 1)
    assert console.file.getvalue() == ""


def test_without_a_terminal_there_are_plain_lines_one_for_each_hook():
    text = shown(SCALARS | {"norms/list": [1, 2]}, terminal=False)
    assert text == (
        "exp  stride  epoch 9  step 1,234\n  training_metrics: loss 0.1235\n  norms: total 1235, list 1, 2\n"
    )


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_line_is_wider_than_the_terminal_and_nothing_is_cut(width):
    metrics = {f"hook_{hook}/a_metric_{index}": index * 1.5 for hook in range(4) for index in range(6)}
    lines = plain(shown(metrics | {"long/text": "#" * 200}, width)).splitlines()
    assert max(map(len, lines)) <= width
    assert "".join(lines).count("#") == 200
    assert sum(line.count("a_metric_") for line in lines) == 24


def test_a_wide_terminal_shows_blocks_side_by_side():
    metrics = {f"hook_{hook}/a_metric_with_a_name_{index}": index * 1.25 for hook in range(4) for index in range(6)}
    heights = [len(shown(metrics, width).splitlines()) for width in (40, 80, 140)]
    assert heights == [29, 15, 8]


def test_every_piece_of_a_long_group_is_kept():
    metrics = [(f"m{index}", str(index)) for index in range(37)]
    pieces = in_pieces([Group("a", metrics)], 4)
    assert [metric for piece in pieces for metric in piece.metrics] == metrics
    assert [piece.heading for piece in pieces] == ["a", *["a (continued)"] * 3]


@pytest.mark.parametrize("most", [1, 2, 3, 9])
def test_blocks_hold_all_groups_in_order_and_the_tallest_is_as_low_as_can_be(most):
    groups = [Group(str(index), [("m", "1")] * size) for index, size in enumerate([5, 1, 4, 2, 2, 7])]
    blocks = balanced(groups, most)
    assert [group for block in blocks for group in block] == groups
    assert len(blocks) <= most
    assert max(sum(len(group.metrics) + 1 for group in block) for block in blocks) == lowest_height(groups, most)


def lowest_height(groups, most):
    """Find the least possible height of the tallest block, by trying every division."""
    heights = [len(group.metrics) + 1 for group in groups]
    if most == 1 or len(groups) == 1:
        return sum(heights)
    cuts = range(1, len(groups))
    return min([sum(heights), *(max(sum(heights[:cut]), lowest_height(groups[cut:], most - 1)) for cut in cuts)])


def test_names_that_look_like_markup_are_shown_as_they_are():
    assert "[red]m" in plain(shown({"h/[red]m": 1.0, "h/b": "[/]"}))


def test_drawing_takes_nothing_from_the_random_generator():
    random.seed(1)
    before = random.getstate()
    shown(SCALARS)
    assert random.getstate() == before
