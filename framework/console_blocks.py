"""Metrics in blocks side by side: as many, and as much of each hook, as a given number of columns and lines hold."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.text import Text

from framework.number_text import value_text

INDENT = COLUMN_GAP = 2
BLOCK_GAP = 3
MOST_BLOCKS = 6
SHORTEST_PIECE = 8
LONGEST_NAME = 26
SHORTENED_NAME = 20
LONGEST_FULL_NAME = 38
LONGEST_VALUE = 20
MOST_KEYS = 4
RISING, FALLING, FLAT = "↑", "↓", "→"
ARROW_STYLES = {RISING: "bold green", FALLING: "bold magenta", FLAT: "dim"}


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

    @property
    def height(self) -> int:
        """Lines that the group takes."""
        return len(self.metrics) + bool(self.heading)


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
        texts = [value_text(item) for item in value]
    else:
        return fitted_name(value_text(value), LONGEST_VALUE, keep_end=False)
    for kept in range(len(texts), 0, -1):
        text = ", ".join(texts[:kept]) + ("" if kept == len(texts) else f", … ({len(texts)})")
        if len(text) <= LONGEST_VALUE:
            return text
    return f"{len(texts)} values"


def fitted_name(name: str, width: int, *, keep_end: bool = True) -> str:
    """Shorten a name to ``width`` columns; its end, which often tells most, is kept.

    >>> fitted_name("loss_autocorrelation_lag_10", 20)
    'loss_auto…ion_lag_10'
    """
    if cell_len(name) <= width:
        return name
    tail = (width // 2 if keep_end else 0) if width > 4 else 0
    head = max(0, width - 1 - tail)
    return name[:head] + "…" + (name[-tail:] if tail else "")


def fitted(groups: Sequence[Group], width: int, height: int) -> tuple[Text, int]:
    """Lay out as much of the groups as ``height`` lines of ``width`` columns hold; return it with the metrics shown.

    Every hook keeps as many of its metrics as every other, those of the lowest rank. Where not even two of each fit,
    they stand in one list without headings.
    """
    most = max((len(group.metrics) for group in groups), default=0)
    if not most or width < 1 or height < 1:
        return Text(), 0
    return (
        _most([[_first(group, count) for group in groups] for count in range(2, most + 1)], width, height)
        or _most([[_listed(groups, count)] for count in range(1, height * MOST_BLOCKS + 1)], width, height)
        or (Text(), 0)
    )


def _most(choices: Sequence[Sequence[Group]], width: int, height: int) -> tuple[Text, int] | None:
    """Lay out the last of the choices, each larger than the one before, that fits."""
    low, high, best = 0, len(choices) - 1, None
    while low <= high:
        middle = (low + high) // 2
        lines = metric_lines(choices[middle], width)
        if lines.plain.count("\n") < height:
            low, best = middle + 1, (lines, sum(len(group.metrics) for group in choices[middle]))
        else:
            high = middle - 1
    return best


def _first(group: Group, count: int) -> Group:
    """Keep ``count`` metrics of a group, in its order."""
    ranked = sorted(range(len(group.metrics)), key=lambda index: group.metrics[index].rank)
    return replace(group, metrics=[group.metrics[index] for index in sorted(ranked[:count])])


def _listed(groups: Sequence[Group], count: int) -> Group:
    """List ``count`` metrics under their full names: the first of every hook, then the second of every hook."""
    turns = zip_longest(*(sorted(group.metrics, key=lambda cell: cell.rank) for group in groups))
    cells = [(index, cell) for turn in turns for index, cell in enumerate(turn) if cell is not None]
    kept = sorted(cells[:count], key=lambda item: item[0])
    return Group("", [cell._replace(name=f"{groups[index].heading}/{cell.name}") for index, cell in kept])


def metric_lines(groups: Sequence[Group], width: int) -> Text:
    """Lay the groups out in as many blocks side by side as ``width`` columns hold.

    Made of lines rather than nested tables, whose measuring would cost tens of milliseconds.
    """
    for most in range(MOST_BLOCKS, 0, -1):
        blocks = balanced(in_pieces(groups, most), most)
        room = width - BLOCK_GAP * (len(blocks) - 1)
        widths = _narrowed([_Columns.of(block) for block in blocks], room)
        if sum(widths) <= room:
            break
    columns = [list(_block_lines(block, min(wide, width))) for block, wide in zip(blocks, widths, strict=True)]
    rows = []
    for cells in zip_longest(*columns, fillvalue=Text()):
        row = Text()
        for cell, wide in zip(cells, widths, strict=True):
            row.append_text(cell).append(" " * (wide + BLOCK_GAP - cell.cell_len))
        row.rstrip()
        rows.append(row)
    return Text("\n").join(rows)


def arrow_text(arrow: str) -> Text:
    """Return an arrow in its colour, after a space; nothing for none."""
    return Text.assemble(" ", (arrow, ARROW_STYLES[arrow])) if arrow else Text()


class _Columns(NamedTuple):
    """The widths of a block: its names, indented, and its values; ``arrows`` is what those take."""

    names: int
    values: int
    arrows: int

    @classmethod
    def of(cls, block: Sequence[Group]) -> "_Columns":
        cells = [cell for group in block for cell in group.metrics]
        heading = bool(block[0].heading)
        longest = INDENT + LONGEST_NAME if heading else LONGEST_FULL_NAME
        names = min(longest, INDENT * heading + max(cell_len(cell.name) for cell in cells))
        names = max(names, *(cell_len(group.heading) - COLUMN_GAP for group in block))
        arrows = 2 if any(cell.arrow for cell in cells) else 0
        return cls(names, max(cell_len(cell.text) for cell in cells), arrows)

    @property
    def width(self) -> int:
        return self.names + COLUMN_GAP + self.values + self.arrows

    def within(self, width: int) -> "_Columns":
        """Shorten the names, and only then the values, to fit into ``width`` columns."""
        names = max(1, min(self.names, width - (self.width - self.names)))
        return _Columns(names, max(1, min(self.values, width - names - COLUMN_GAP - self.arrows)), self.arrows)


def _narrowed(blocks: Sequence[_Columns], room: int) -> list[int]:
    """Return the widths of blocks side by side in ``room`` columns: long names are shortened, the longest first."""
    widths, names = [block.width for block in blocks], [block.names for block in blocks]
    while sum(widths) > room and max(names) > SHORTENED_NAME:
        longest = names.index(max(names))
        names[longest] -= 1
        widths[longest] -= 1
    return widths


def _block_lines(block: Sequence[Group], width: int) -> Iterator[Text]:
    """Yield the lines of one block; a value that does not fit is left out rather than cut."""
    columns = _Columns.of(block).within(width)
    for group in block:
        indent = INDENT if group.heading and columns.names > INDENT else 0
        if group.heading:
            yield Text(fitted_name(group.heading, width), style="bold cyan")
        for cell in group.metrics:
            name = fitted_name(cell.name, columns.names - indent)
            padding = " " * (columns.names - indent - cell_len(name) + COLUMN_GAP)
            value = cell.text if cell_len(cell.text) <= columns.values else "…"
            value += " " * (columns.values - cell_len(value))
            yield Text(" " * indent + name + padding + value).append_text(arrow_text(cell.arrow))


def in_pieces(groups: Sequence[Group], blocks: int) -> list[Group]:
    """Cut groups that are longer than an even share of ``blocks`` blocks.

    >>> [(piece.heading, len(piece.metrics)) for piece in in_pieces([Group("a", [Cell("x", "1")] * 20)], 2)]
    [('a', 10), ('a (continued)', 10)]
    """
    shortest = SHORTEST_PIECE if any(group.heading for group in groups) else 1
    share = max(shortest, -(-sum(len(group.metrics) for group in groups) // blocks))
    return [
        Group(group.heading + (" (continued)" if begin and group.heading else ""), group.metrics[begin : begin + share])
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
