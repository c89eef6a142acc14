import pytest
from loopscope.console.grid import Cell, Group, fitted, in_blocks
from rich.cells import cell_len


def hooks(sizes, **cell):
    return [
        Group(f"hook_{hook}", [Cell(f"metric_{index}", f"{index}.125", **cell) for index in range(size)])
        for hook, size in enumerate(sizes)
    ]


def text_of(lines):
    return ["".join(text for text, _ in line) for line in lines]


def test_long_group_keeps_all_metrics():
    metrics = [Cell(f"m{index}", str(index)) for index in range(37)]
    pieces = [piece for block in in_blocks([Group("a", metrics)], 11) for piece in block]
    assert [metric for piece in pieces for metric in piece.cells] == metrics
    assert [piece.heading for piece in pieces] == ["a", *["a (continued)"] * 3]


@pytest.mark.parametrize("most", [1, 2, 3])
def test_blocks_keep_order_and_minimal_height(most):
    """Blocks contain all groups in order, and the tallest block is as low as possible."""
    groups = [Group(str(index), [Cell("m", "1")] * size) for index, size in enumerate([5, 1, 4, 2, 2, 7])]
    lowest = lowest_height(groups, most)
    blocks = list(in_blocks(groups, lowest))
    assert [group for block in blocks for group in block] == groups
    assert len(blocks) <= most
    assert max(sum(group.height for group in block) for block in blocks) <= lowest
    lines, shown = fitted(groups, {1: 9, 2: 15, 3: 24}[most], 40)
    assert (len(lines), shown) == (lowest, 21)


def lowest_height(groups, most):
    """Find the least possible height of the tallest block by brute force over all divisions."""
    heights = [len(group.cells) + 1 for group in groups]
    if most == 1 or len(groups) == 1:
        return sum(heights)
    cuts = range(1, len(groups))
    return min([sum(heights), *(max(sum(heights[:cut]), lowest_height(groups[cut:], most - 1)) for cut in cuts)])


@pytest.mark.parametrize("width", [8, 13, 20, 44, 80, 160])
@pytest.mark.parametrize("height", [1, 2, 5, 20, 60])
@pytest.mark.parametrize("arrow", ["", "↑"])
def test_fitted_lines_fit_and_are_counted(width, height, arrow):
    lines, shown = fitted(hooks([3, 9, 1, 5], arrow=arrow), width, height)
    assert len(lines) <= height
    assert all(sum(cell_len(text) for text, _ in line) <= width for line in lines)
    assert sum(text.count(".125") + text.count("…") for text in text_of(lines)) >= shown > 0


def test_numbers_are_never_truncated():
    groups = [Group("a_hook", [Cell("a_long_name_of_a_metric", "-1.235e-07", "↓")])]
    texts = ["\n".join(text_of(fitted(groups, width, 5)[0])) for width in range(8, 60)]
    assert all(("-1.235e-07" in text) or not any(digit in text for digit in "0123456789") for text in texts)
    assert all("-1.235e-07" in text for text in texts[8:])


def test_large_space_shows_all_metrics():
    groups = hooks([3, 9, 1, 5])
    assert fitted(groups, 160, 30)[1] == 18


def test_limited_space_is_shared_between_hooks():
    """Each hook keeps the same number of metrics, those of the lowest rank first."""
    first = [Cell("list", "1, 2", rank=1), Cell("still", "1", rank=2), Cell("one", "1"), Cell("two", "2")]
    lines, shown = fitted([Group("a", first), *hooks([6, 6])], 30, 9)
    assert shown == 6
    assert [text.split()[0] for text in text_of(lines)] == [
        *("a", "one", "two", "hook_0", "metric_0", "metric_1", "hook_1", "metric_0", "metric_1")
    ]


def test_tiny_space_lists_full_metric_names():
    """If few lines fit, one list takes metrics from each hook in turn, with full names."""
    lines, shown = fitted(hooks([6, 1, 6]), 40, 4)
    assert shown == 4
    assert [text.split()[0] for text in text_of(lines)] == [
        *("hook_0/metric_0", "hook_0/metric_1", "hook_1/metric_0", "hook_2/metric_0")
    ]


def test_nothing_is_laid_out_where_there_is_nothing():
    assert fitted([], 80, 24) == ([], 0)
    assert fitted(hooks([2]), 80, 0) == ([], 0)
    assert fitted(hooks([2]), 7, 10) == ([], 0)


def test_rows_below_a_short_block_stay_aligned():
    """Where the left block has ended, the right one keeps its columns."""
    lines, shown = fitted([Group("a", [Cell("x", "1")]), Group("b", [Cell(f"m{n}", "1") for n in range(7)])], 60, 9)
    positions = {line.index(" 1") for line in text_of(lines)[2:] if " 1" in line}
    assert shown == 8
    assert len(positions) == 1
