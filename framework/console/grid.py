"""Metrics in blocks side by side: as many, and as much of each hook, as a given number of columns and lines hold."""

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
    """One metric: its name within the hook, its value as text, its arrow; those of a higher rank give way first.

    The arrow, or a space for none, may follow a sparkline; an age may take its place.
    """

    name: str
    text: str
    arrow: str = ""
    rank: int = 0


class Widths(NamedTuple):
    """The columns of a block: its names with their indent and the gap behind them, its values, its arrows."""

    names: int
    values: int
    arrows: int

    def within(self, names: int, width: int) -> "Widths":
        """Shorten names to ``names`` columns, and then names before values until the block fits into ``width``."""
        values = max(1, min(self.values, width - 1 - COLUMN_GAP - self.arrows))
        room = max(1 + COLUMN_GAP, width - values - self.arrows)
        return Widths(min(self.names, names + COLUMN_GAP, room), values, self.arrows)


@dataclass(frozen=True)
class Group:
    """The metrics of one hook; without a heading they stand under nothing and are not indented."""

    heading: str
    cells: Sequence[Cell]

    @cached_property
    def height(self) -> int:
        """Lines that the group takes."""
        return len(self.cells) + bool(self.heading)

    @cached_property
    def widths(self) -> Widths:
        """The columns that the group would like."""
        names = max([cell_len(cell.name) for cell in self.cells])
        names = INDENT + min(names, LONGEST_NAME) if self.heading else min(names, LONGEST_FULL_NAME)
        values = max(cell_len(cell.text) for cell in self.cells)
        arrows = max(1 + len(cell.arrow) if cell.arrow else 0 for cell in self.cells)
        return Widths(max(names + COLUMN_GAP, cell_len(self.heading)), values, arrows)

    def first(self, count: int) -> "Group":
        """Keep the ``count`` metrics of the lowest rank, in their order."""
        if count >= len(self.cells):
            return self
        ranked = sorted(range(len(self.cells)), key=lambda index: self.cells[index].rank)
        return Group(self.heading, [self.cells[index] for index in sorted(ranked[:count])])


Blocks = list[tuple[list[Group], Widths]]


def fitted(
    groups: Sequence[Group], width: int, height: int, *, most_blocks: int = MOST_BLOCKS
) -> tuple[list[Line], int]:
    """Lay out as much of the groups as ``height`` lines of ``width`` columns hold; return it with the metrics shown.

    Every hook keeps as many of its metrics as every other, those of the lowest rank. Where not even two of each fit,
    they stand in one list without headings: the first of every hook, then the second of every hook. Blocks are as low
    as can be without cutting short groups.
    """
    sizes = [len(group.cells) for group in groups]
    if not sizes or width < NARROWEST or height < 1:
        return [], 0
    choices: list[tuple[Callable[[int], list[Group]], range]] = [
        (lambda count: [group.first(count) for group in groups], range(min(2, max(sizes)), max(sizes) + 1)),
        (lambda count: in_turn(groups, count), range(1, sum(sizes) + 1)),
    ]
    for choice, counts in choices:
        # More metrics never take less room: the first count that is too much comes after the one to be shown.
        fits = bisect_left(counts, True, key=lambda count: not divided(choice(count), width, height, most_blocks))
        if fits:
            shown = choice(counts[fits - 1])
            begin = min(height, LOWEST_BLOCK, max(group.height for group in shown))
            low = bisect_left(range(height), True, begin, key=lambda low: bool(divided(shown, width, low, most_blocks)))
            return _side_by_side(divided(shown, width, low, most_blocks)), sum(len(group.cells) for group in shown)
    return [], 0


def in_turn(groups: Sequence[Group], count: int) -> list[Group]:
    """Keep ``count`` metrics in all, a first of every group before a second of any, as one group under full names."""
    turns = sorted((turn, index) for index, group in enumerate(groups) for turn in range(len(group.cells)))
    taken = Counter(index for _, index in turns[:count])
    kept = [group.first(taken[index]) for index, group in enumerate(groups)]
    return [Group("", [cell._replace(name=f"{each.heading}/{cell.name}") for each in kept for cell in each.cells])]


def divided(groups: Sequence[Group], width: int, height: int, most: int) -> Blocks:
    """Divide groups into blocks that fit side by side, long names shortened as far as they must be; or into none."""
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
    """Yield blocks of at most ``height`` lines; groups that are longer than a block are cut.

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
            held = room - bool(group.heading)
            yield [Group(rest.heading, rest.cells[:held])]
            rest = Group(f"{group.heading} (continued)" if group.heading else "", rest.cells[held:])
        block.append(rest)
        room -= rest.height
    yield block


def _side_by_side(blocks: Blocks) -> list[Line]:
    gap = " " * BLOCK_GAP
    columns = [list(_block_lines(block, widths, gap * (index > 0))) for index, (block, widths) in enumerate(blocks)]
    lines: list[Line] = []
    for row in zip_longest(*columns):
        empty = [[(" " * (sum(widths) + BLOCK_GAP), "")] for _, widths in blocks]
        lines.append([piece for cell, nothing in zip(row, empty, strict=True) for piece in cell or nothing])
        while lines[-1] and not lines[-1][-1][0].strip():
            lines[-1].pop()
    return lines


def _block_lines(block: Sequence[Group], widths: Widths, margin: str) -> Iterator[Line]:
    """Yield the lines of one block; a value that does not fit is left out rather than cut."""
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
