"""Layout of metrics in parallel blocks, with as many metrics per hook as fit the columns and lines."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size

from .text import Line, shortened

INDENT = COLUMN_GAP = 2
BLOCK_GAP = 3
MOST_BLOCKS = 6
LOWEST_BLOCK = 9
LONGEST_NAME, SHORTENED_NAME, LONGEST_FULL_NAME = 26, 20, 44
NARROWEST = 8
RISING, FALLING, FLAT = "↑", "↓", "→"
ARROW_STYLES = {RISING: "bold green", FALLING: "bold magenta", FLAT: "dim", "": ""}
HEADING_STYLE = "bold cyan"


class Cell(NamedTuple):
    """One metric: its name within the hook, its value as text, its arrow; a higher rank is omitted first.

    The arrow, or a space, may follow a sparkline; an age may replace it.
    """

    name: str
    text: str
    arrow: str = ""
    rank: int = 0


class Widths(NamedTuple):
    """The columns of a block: names (with indent and gap), values, arrows."""

    names: int
    values: int
    arrows: int

    def within(self, names: int, width: int) -> "Widths":
        """Limit names to ``names`` columns, then shrink names before values until the block fits into ``width``."""
        values = max(1, min(self.values, width - 1 - COLUMN_GAP - self.arrows))
        room = max(1 + COLUMN_GAP, width - values - self.arrows)
        return Widths(min(self.names, names + COLUMN_GAP, room), values, self.arrows)


@dataclass(frozen=True)
class Group:
    """The metrics of one hook; without a heading they are not indented."""

    heading: str
    cells: Sequence[Cell]

    @cached_property
    def height(self) -> int:
        """The number of lines of the group."""
        return len(self.cells) + bool(self.heading)

    @cached_property
    def widths(self) -> Widths:
        """The columns that the group needs without shortening."""
        names = max([cell_len(cell.name) for cell in self.cells])
        names = INDENT + min(names, LONGEST_NAME) if self.heading else min(names, LONGEST_FULL_NAME)
        values = max(cell_len(cell.text) for cell in self.cells)
        arrows = max(1 + len(cell.arrow) if cell.arrow else 0 for cell in self.cells)
        return Widths(max(names + COLUMN_GAP, cell_len(self.heading)), values, arrows)

    def first(self, count: int) -> "Group":
        """Keep the ``count`` metrics with the lowest rank, in their order."""
        if count >= len(self.cells):
            return self
        ranks = [cell.rank for cell in self.cells]
        ranked = sorted(range(len(ranks)), key=ranks.__getitem__)
        return Group(self.heading, [self.cells[index] for index in sorted(ranked[:count])])


Blocks = list[tuple[list[Group], Widths]]
Choice = Callable[[Sequence[Group], int], list[Group]]
"""Keeps a number of metrics."""


def fitted(
    groups: Sequence[Group], width: int, height: int, *, most_blocks: int = MOST_BLOCKS
) -> tuple[list[Line], int]:
    """Lay out the groups on ``height`` lines of ``width`` columns; return the lines and the number of shown metrics.

    Every hook keeps equally many metrics, those with the lowest rank. If not even two of each fit, the result is one
    list without headings: the first metric of every hook, then the second of every hook. Blocks are as low as possible
    without splitting short groups.
    """
    sizes = [len(group.cells) for group in groups]
    if not sizes or width < NARROWEST or height < 1:
        return [], 0
    for choice, least, most in ((of_each, min(2, max(sizes)), max(sizes)), (in_turn, 1, sum(sizes))):

        def is_too_much(count: int, choice: Choice = choice) -> bool:
            return not divided(choice(groups, count), width, height, most_blocks)

        # The needed space grows with the count, so a binary search finds the first count that does not fit.
        count = bisect_left(range(most + 1), True, least, key=is_too_much) - 1
        if count >= least:
            return _lowest(choice(groups, count), width, height, most_blocks)
    return [], 0


def _lowest(groups: Sequence[Group], width: int, height: int, most_blocks: int) -> tuple[list[Line], int]:
    """Lay out groups that fit on as few lines as possible, but at least :data:`LOWEST_BLOCK` for long groups."""

    def fits(lines: int) -> bool:
        return bool(divided(groups, width, lines, most_blocks))

    least = min(height, LOWEST_BLOCK, max(group.height for group in groups))
    lowest = bisect_left(range(height), True, least, key=fits)
    return _side_by_side(divided(groups, width, lowest, most_blocks)), sum(len(group.cells) for group in groups)


def of_each(groups: Sequence[Group], count: int) -> list[Group]:
    """Keep the first ``count`` metrics of every group."""
    return [group.first(count) for group in groups]


def in_turn(groups: Sequence[Group], count: int) -> list[Group]:
    """Keep ``count`` metrics, the first of every group before any second one, as one group with full names."""
    turns = sorted((turn, index) for index, group in enumerate(groups) for turn in range(len(group.cells)))
    taken = Counter(index for _, index in turns[:count])
    kept = [group.first(taken[index]) for index, group in enumerate(groups)]
    return [Group("", [cell._replace(name=f"{group.heading}/{cell.name}") for group in kept for cell in group.cells])]


def divided(groups: Sequence[Group], width: int, height: int, most: int) -> Blocks:
    """Divide groups into blocks that fit next to each other, shortening long names if needed; empty if impossible."""
    if height < 1 + bool(groups[0].heading):
        return []
    blocks = list(in_blocks(groups, height))
    if len(blocks) > most:
        return []
    wanted = [Widths(*map(max, zip(*[group.widths for group in block], strict=True))) for block in blocks]
    for names in range(INDENT + LONGEST_NAME, SHORTENED_NAME - 1, -2) if groups[0].heading else (LONGEST_FULL_NAME,):
        widths = [item.within(names, width) for item in wanted]
        if sum(sum(item) + BLOCK_GAP for item in widths) - BLOCK_GAP <= width:
            return list(zip(blocks, widths, strict=True))
    return []


def in_blocks(groups: Sequence[Group], height: int) -> Iterator[list[Group]]:
    """Yield blocks of at most ``height`` lines; groups longer than a block are split.

    >>> blocks = in_blocks([Group("a", [Cell("x", "1")] * 4), Group("b", [Cell("x", "1")])], 3)
    >>> [[(group.heading, len(group.cells)) for group in block] for block in blocks]
    [[('a', 2)], [('a (continued)', 2)], [('b', 1)]]
    """
    block: list[Group] = []
    room = height
    for group in groups:
        if block and group.height > room:
            yield block
            block, room = [], height
        rest = group
        while rest.height > room:
            count = room - bool(group.heading)
            yield [Group(rest.heading, rest.cells[:count])]
            rest = Group(f"{group.heading} (continued)" if group.heading else "", rest.cells[count:])
        block.append(rest)
        room -= rest.height
    yield block


def _side_by_side(blocks: Blocks) -> list[Line]:
    gap = " " * BLOCK_GAP
    columns = [list(_block_lines(block, widths, gap * (index > 0))) for index, (block, widths) in enumerate(blocks)]
    lines: list[Line] = []
    for row in zip_longest(*columns):
        empty = [[(" " * (sum(widths) + BLOCK_GAP * (index > 0)), "")] for index, (_, widths) in enumerate(blocks)]
        lines.append([piece for cell, nothing in zip(row, empty, strict=True) for piece in cell or nothing])
        while lines[-1] and not lines[-1][-1][0].strip():
            lines[-1].pop()
    return lines


def _block_lines(block: Sequence[Group], widths: Widths, margin: str) -> Iterator[Line]:
    """Yield the lines of one block; a value that does not fit is omitted, never truncated."""
    for group in block:
        names = widths.names - COLUMN_GAP
        indent = " " * INDENT if group.heading and names > INDENT else ""
        if group.heading:
            heading = shortened(group.heading, sum(widths))
            yield [(margin + set_cell_size(heading, sum(widths)), HEADING_STYLE)]
        for cell in group.cells:
            name = indent + shortened(cell.name, names - len(indent))
            value = cell.text if cell_len(cell.text) <= widths.values else "…"
            text = margin + set_cell_size(name, widths.names) + set_cell_size(value, widths.values)
            if cell.arrow:
                padded = cell.arrow.rjust(widths.arrows - 1)
                yield [(text + " " + padded[:-1], ""), (padded[-1], ARROW_STYLES.get(padded[-1], ""))]
            else:
                yield [(text + " " * widths.arrows, "")]
