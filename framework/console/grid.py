"""Metrics in blocks side by side: as many, and as much of each hook, as a given number of columns and lines hold."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple

from rich.cells import cell_len

from .lines import Line, padded, printable, shortened
from .text import value_text

INDENT = COLUMN_GAP = 2
BLOCK_GAP = 3
MOST_BLOCKS = 6
SHORTEST_PIECE = 8
LONGEST_NAME = 26
SHORTENED_NAME = 20
LONGEST_FULL_NAME = 44
LONGEST_VALUE = 20
MOST_KEYS = 4
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


@dataclass(frozen=True)
class Group:
    """The metrics of one hook; without a heading they stand under nothing and are not indented."""

    heading: str
    metrics: Sequence[Cell]

    @cached_property
    def height(self) -> int:
        """Lines that the group takes."""
        return len(self.metrics) + bool(self.heading)

    @cached_property
    def columns(self) -> "Columns":
        """The widths that the group would like."""
        names = max(map(cell_len, [cell.name for cell in self.metrics]))
        names = INDENT + min(names, LONGEST_NAME) if self.heading else min(names, LONGEST_FULL_NAME)
        values = max(map(cell_len, [cell.text for cell in self.metrics]))
        arrows = 2 if any([cell.arrow for cell in self.metrics]) else 0
        return Columns(max(names, cell_len(self.heading) - COLUMN_GAP), values, arrows)


class Columns(NamedTuple):
    """The widths of a block: its names, indented, its values and its arrows."""

    names: int
    values: int
    arrows: int

    @classmethod
    def of(cls, block: Sequence[Group]) -> "Columns":
        """Return the widths that hold every group of a block."""
        return cls(*map(max, zip(*(group.columns for group in block), strict=True)))

    @property
    def width(self) -> int:
        """Columns of the whole block."""
        return self.names + COLUMN_GAP + self.values + self.arrows

    def within(self, width: int) -> "Columns":
        """Shorten the names, and only then the values, to fit into ``width`` columns."""
        names = max(1, min(self.names, width - (self.width - self.names)))
        return Columns(names, max(1, min(self.values, width - names - COLUMN_GAP - self.arrows)), self.arrows)


Blocks = list[tuple[list[Group], Columns]]


def flattened(metrics: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield metrics, and small dicts among them key by key.

    >>> dict(flattened({"h/loss": 0.5, "h/evaluation": {"val_loss": 2.0}}))
    {'h/loss': 0.5, 'h/evaluation/val_loss': 2.0}
    """
    for name, value in metrics.items():
        if isinstance(value, Mapping) and 0 < len(value) <= MOST_KEYS:
            yield from ((f"{name}/{key}", item) for key, item in value.items())
        else:
            yield name, value


def brief(value: Any) -> str:
    """Return a value in at most twenty columns: of a list as many items as fit, and how many there are.

    >>> brief([0.123456, 2, 3]), brief([1.25e-7, 33.333, 44.44]), brief(1 / 3)
    ('0.1235, 2, 3', '1.25e-07, … (3)', '0.3333')
    """
    if isinstance(value, Mapping):
        texts = [f"{key} {value_text(item)}" for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        texts = [value_text(item) for item in value[:LONGEST_VALUE]]
    else:
        return shortened(printable(value_text(value)), LONGEST_VALUE, keep_end=False)
    for kept in range(min(len(texts), LONGEST_VALUE), 0, -1):
        text = ", ".join(texts[:kept]) + ("" if kept == len(value) else f", … ({len(value)})")
        if len(text) <= LONGEST_VALUE:
            return printable(text)
    return f"{len(value)} values" if value else "none"


def fitted(groups: Sequence[Group], width: int, height: int) -> tuple[list[Line], int]:
    """Lay out as much of the groups as ``height`` lines of ``width`` columns hold; return it with the metrics shown.

    Every hook keeps as many of its metrics as every other, those of the lowest rank. Where not even two of each fit,
    they stand in one list without headings.
    """
    most = max((len(group.metrics) for group in groups), default=0)
    if not most or width < NARROWEST or height < 1:
        return [], 0
    ranked = [sorted(range(len(group.metrics)), key=lambda index: group.metrics[index].rank) for group in groups]

    def first(count: int) -> list[Group]:
        chosen = [sorted(order[:count]) for order in ranked]
        return [
            group
            if count >= len(group.metrics)
            else replace(group, metrics=[group.metrics[index] for index in indices])
            for group, indices in zip(groups, chosen, strict=True)
        ]

    found = _most(first, range(min(2, most), most + 1), width, height)
    if found is None:
        turns = list(_turns(groups, ranked))
        found = _most(lambda count: [_listed(turns, count)], range(1, len(turns) + 1), width, height)
    if found is None:
        return [], 0
    return _lines(found, width), sum(len(group.metrics) for block, _ in found for group in block)


def _most(choice: Callable[[int], Sequence[Group]], counts: range, width: int, height: int) -> Blocks | None:
    """Divide the largest choice that fits into blocks."""
    low, high, best = counts.start, counts.stop - 1, None
    while low <= high:
        middle = (low + high) // 2
        blocks = _divided(choice(middle), width)
        if max(sum(group.height for group in block) for block, _ in blocks) <= height:
            low, best = middle + 1, blocks
        else:
            high = middle - 1
    return best


def _turns(groups: Sequence[Group], ranked: Sequence[Sequence[int]]) -> Iterator[tuple[int, Cell]]:
    """Yield the first metric of every group under its full name, then the second of every group."""
    for turn in zip_longest(*ranked):
        for index, place in enumerate(turn):
            if place is not None:
                cell = groups[index].metrics[place]
                yield index, cell._replace(name=f"{groups[index].heading}/{cell.name}")


def _listed(turns: Sequence[tuple[int, Cell]], count: int) -> Group:
    """List ``count`` metrics, hook by hook."""
    return Group("", [cell for _, cell in sorted(turns[:count], key=lambda item: item[0])])


def metric_lines(groups: Sequence[Group], width: int) -> list[Line]:
    """Lay all groups out in as many blocks side by side as ``width`` columns hold."""
    return _lines(_divided(groups, width), width)


def _divided(groups: Sequence[Group], width: int) -> Blocks:
    most = MOST_BLOCKS
    while True:
        blocks = balanced(in_pieces(groups, most), most)
        columns = [Columns.of(block) for block in blocks]
        if groups[0].heading:
            columns = _narrowed(columns, width - BLOCK_GAP * (len(blocks) - 1))
        taken = sum(item.width for item in columns) + BLOCK_GAP * (len(blocks) - 1)
        if taken <= width or len(blocks) == 1:
            return list(zip(blocks, columns, strict=True))
        most = min(most, len(blocks)) - 1


def _narrowed(blocks: list[Columns], room: int) -> list[Columns]:
    """Shorten long names, the longest first, until the blocks fit into ``room`` columns."""
    names = [block.names for block in blocks]
    missing = sum(block.width for block in blocks) - room
    while missing > 0 and max(names) > SHORTENED_NAME:
        names[names.index(max(names))] -= 1
        missing -= 1
    return [block._replace(names=width) for block, width in zip(blocks, names, strict=True)]


def _lines(blocks: Blocks, width: int) -> list[Line]:
    columns = [list(_block_lines(block, wide.within(width))) for block, wide in blocks]
    rows: list[Line] = []
    for cells in zip_longest(*columns):
        row: Line = []
        for cell, (_, wide) in zip(cells, blocks, strict=True):
            row += padded(cell or [], wide.width + BLOCK_GAP)
        rows.append(_without_end(row))
    return rows


def _without_end(row: Line) -> Line:
    while row and not row[-1][0].strip():
        row.pop()
    return [*row[:-1], (row[-1][0].rstrip(), row[-1][1])] if row else row


def _block_lines(block: Sequence[Group], columns: Columns) -> Iterator[Line]:
    """Yield the lines of one block; a value that does not fit is left out rather than cut."""
    for group in block:
        indent = INDENT if group.heading and columns.names > INDENT else 0
        if group.heading:
            yield [(shortened(printable(group.heading), columns.width), HEADING_STYLE)]
        for cell in group.metrics:
            name = " " * indent + shortened(printable(cell.name), columns.names - indent)
            name += " " * (columns.names + COLUMN_GAP - cell_len(name))
            value = cell.text if cell_len(cell.text) <= columns.values else "…"
            line = [(name + value, "")]
            if cell.arrow:
                line += [(" " * (columns.values + 1 - cell_len(value)), ""), (cell.arrow, ARROW_STYLES[cell.arrow])]
            yield line


def in_pieces(groups: Sequence[Group], blocks: int) -> list[Group]:
    """Cut groups that are longer than an even share of ``blocks`` blocks.

    >>> [(piece.heading, len(piece.metrics)) for piece in in_pieces([Group("a", [Cell("x", "1")] * 20)], 2)]
    [('a', 10), ('a (continued)', 10)]
    """
    shortest = SHORTEST_PIECE if any(group.heading for group in groups) else 1
    share = max(shortest, -(-sum(len(group.metrics) for group in groups) // blocks))
    return [
        group
        if len(group.metrics) <= share
        else Group(group.heading + (" (continued)" if begin and group.heading else ""), group.metrics[begin:][:share])
        for group in groups
        for begin in range(0, len(group.metrics), share)
    ]


def balanced(groups: Sequence[Group], most: int) -> list[list[Group]]:
    """Divide the groups, in order, into at most ``most`` blocks, the tallest as low as can be.

    >>> x = Cell("x", "1")
    >>> groups = [Group("a", [x] * 4), Group("b", [x] * 2), Group("c", [x])]
    >>> [[group.heading for group in block] for block in balanced(groups, 2)]
    [['a'], ['b', 'c']]
    """
    limit = max(max(group.height for group in groups), -(-sum(group.height for group in groups) // most))
    while len(blocks := _filled(groups, limit)) > most:
        limit += 1
    return blocks


def _filled(groups: Iterable[Group], limit: int) -> list[list[Group]]:
    blocks: list[list[Group]] = []
    height = limit
    for group in groups:
        if height + group.height > limit:
            blocks.append([])
            height = 0
        blocks[-1].append(group)
        height += group.height
    return blocks
