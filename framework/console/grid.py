"""Metrics in blocks side by side: as many, and as much of each hook, as a given number of columns and lines hold."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import zip_longest
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size

from .text import Line, printable, shortened

INDENT = COLUMN_GAP = 2
BLOCK_GAP = 3
MOST_BLOCKS = 6
SHORTEST_PIECE = 8
LONGEST_NAME, SHORTENED_NAME, LONGEST_FULL_NAME = 26, 20, 44
NARROWEST = 8
RISING, FALLING, FLAT = "↑", "↓", "→"
ARROW_STYLES = {RISING: "bold green", FALLING: "bold magenta", FLAT: "dim", "": ""}
HEADING_STYLE = "bold cyan"


class Cell(NamedTuple):
    """One metric: its name within the hook, its value as text, and its arrow; those of a higher rank give way first."""

    name: str
    text: str
    arrow: str = ""
    rank: int = 0


class Widths(NamedTuple):
    """The columns of a block: its names with their indent, its values, its arrows."""

    names: int
    values: int
    arrows: int

    @property
    def total(self) -> int:
        """Columns of the whole block."""
        return self.names + COLUMN_GAP + self.values + self.arrows

    def within(self, names: int, width: int) -> "Widths":
        """Shorten names to ``names`` columns, and then names before values until the block fits into ``width``."""
        values = max(1, min(self.values, width - 1 - COLUMN_GAP - self.arrows))
        return Widths(max(1, min(self.names, names, width - COLUMN_GAP - values - self.arrows)), values, self.arrows)


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
        return Widths(
            max(names, cell_len(self.heading) - COLUMN_GAP), values, 2 * any(cell.arrow for cell in self.cells)
        )

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
    they stand in one list without headings: the first of every hook, then the second of every hook.
    """
    sizes = [len(group.cells) for group in groups]
    if not sizes or width < NARROWEST or height < 1:
        return [], 0
    for choice, counts in ((evenly, range(min(2, max(sizes)), max(sizes) + 1)), (in_turn, range(1, sum(sizes) + 1))):
        divided = [partial(_divided, choice, groups, count, width, most_blocks) for count in counts]
        # More metrics never take fewer lines: the first count that is too tall comes after the one to be shown.
        fits = bisect_left(divided, True, key=lambda blocks: _height(blocks()) > height)
        if fits:
            blocks = divided[fits - 1]()
            return _side_by_side(blocks), sum(len(group.cells) for block, _ in blocks for group in block)
    return [], 0


def evenly(groups: Sequence[Group], count: int) -> list[Group]:
    """Keep ``count`` metrics of every group."""
    return [group.first(count) for group in groups]


def in_turn(groups: Sequence[Group], count: int) -> list[Group]:
    """Keep ``count`` metrics in all, a first of every group before a second of any, as one group under full names."""
    turns = sorted((turn, index) for index, group in enumerate(groups) for turn in range(len(group.cells)))
    taken = Counter(index for _, index in turns[:count])
    kept = [group.first(taken[index]) for index, group in enumerate(groups)]
    return [Group("", [cell._replace(name=f"{each.heading}/{cell.name}") for each in kept for cell in each.cells])]


def _divided(
    choice: Callable[[Sequence[Group], int], list[Group]], groups: Sequence[Group], count: int, width: int, most: int
) -> Blocks:
    """Divide a choice into as many blocks as fit side by side; long names are shortened before a block is saved."""
    chosen = choice(groups, count)
    most = min(most, (width + BLOCK_GAP) // (NARROWEST + BLOCK_GAP))
    names = range(INDENT + LONGEST_NAME, SHORTENED_NAME - 1, -2) if chosen[0].heading else (LONGEST_FULL_NAME,)
    while True:
        blocks = balanced(chosen, most)
        wanted = [Widths(*map(max, zip(*[group.widths for group in block], strict=True))) for block in blocks]
        for longest in names:
            widths = [item.within(longest, width) for item in wanted]
            if sum(item.total + BLOCK_GAP for item in widths) - BLOCK_GAP <= width:
                return list(zip(blocks, widths, strict=True))
        most = len(blocks) - 1


def _height(blocks: Blocks) -> int:
    return max(sum([group.height for group in block]) for block, _ in blocks)


def _side_by_side(blocks: Blocks) -> list[Line]:
    gap = " " * BLOCK_GAP
    columns = [list(_block_lines(block, widths, gap * (index > 0))) for index, (block, widths) in enumerate(blocks)]
    lines: list[Line] = []
    for row in zip_longest(*columns):
        cells = [
            cell or [(" " * (widths.total + BLOCK_GAP), "")] for cell, (_, widths) in zip(row, blocks, strict=True)
        ]
        lines.append([piece for cell in cells for piece in cell])
        while lines[-1] and not lines[-1][-1][0].strip():
            lines[-1].pop()
    return lines


def _block_lines(block: Sequence[Group], widths: Widths, margin: str) -> Iterator[Line]:
    """Yield the lines of one block; a value that does not fit is left out rather than cut."""
    for group in block:
        indent = " " * INDENT if group.heading and widths.names > INDENT else ""
        if group.heading:
            heading = shortened(printable(group.heading), widths.total)
            yield [(margin + set_cell_size(heading, widths.total), HEADING_STYLE)]
        for cell in group.cells:
            name = indent + shortened(printable(cell.name), widths.names - len(indent))
            value = cell.text if cell_len(cell.text) <= widths.values else "…"
            text = margin + set_cell_size(name, widths.names + COLUMN_GAP) + set_cell_size(value, widths.values)
            if cell.arrow:
                yield [(text + " ", ""), (cell.arrow, ARROW_STYLES[cell.arrow])]
            else:
                yield [(text + " " * widths.arrows, "")]


def balanced(groups: Sequence[Group], most: int) -> list[list[Group]]:
    """Divide the groups, in order, into at most ``most`` blocks, the tallest as low as can be.

    Groups that are longer than an even share are cut.

    >>> x = Cell("x", "1")
    >>> groups = [Group("a", [x] * 4), Group("b", [x] * 2), Group("c", [x])]
    >>> [[group.heading for group in block] for block in balanced(groups, 2)]
    [['a'], ['b', 'c']]
    """
    pieces = in_pieces(groups, most)
    limit = max(max(piece.height for piece in pieces), -(-sum(piece.height for piece in pieces) // most))
    while len(blocks := _filled(pieces, limit)) > most:
        limit += 1
    return blocks


def in_pieces(groups: Sequence[Group], blocks: int) -> list[Group]:
    """Cut groups that are longer than an even share of ``blocks`` blocks.

    >>> [(piece.heading, len(piece.cells)) for piece in in_pieces([Group("a", [Cell("x", "1")] * 20)], 2)]
    [('a', 10), ('a (continued)', 10)]
    """
    shortest = SHORTEST_PIECE if any(group.heading for group in groups) else 1
    share = max(shortest, -(-sum(len(group.cells) for group in groups) // blocks))
    return [
        group
        if len(group.cells) <= share
        else Group(group.heading + (" (continued)" if begin and group.heading else ""), group.cells[begin:][:share])
        for group in groups
        for begin in range(0, len(group.cells), share)
    ]


def _filled(groups: Sequence[Group], limit: int) -> list[list[Group]]:
    blocks: list[list[Group]] = []
    height = limit
    for group in groups:
        if height + group.height > limit:
            blocks.append([])
            height = 0
        blocks[-1].append(group)
        height += group.height
    return blocks
