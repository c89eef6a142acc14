"""The table of ``make shape``: ``--write`` renews docs/architecture.md, ``--check`` fails if a limit is broken."""

import sys
from collections.abc import Iterator
from typing import NamedTuple

from tests.shape.counts import (
    ROOT,
    code_lines,
    import_circles,
    imported_by_hooks,
    lambdas,
    one_step,
    repeated_class_names,
    state_exports,
)

PAGE = ROOT / "docs/architecture.md"
START, END = "<!-- shape -->\n", "<!-- end of shape -->"
KERNEL = "lines of code in `framework` without the rooms below"
NOT_REACHED = frozenset[str]()
"""Measures that are above their limits; remove a name once its measure is below."""
LIMITS_OF_ROOMS = {
    "low precision": 1_800,
    "laws": 4_480,
    "watched scripts": 1_900,
    "policies": 1_250,
    "comparisons of commands": 600,
    "budget": 400,
    "compiled models": 600,
    "sweeps": 900,
    "findings over runs": 300,
    "many runs": 500,
    "page of many runs": 500,
}
"""Lines of code, decided as docs/decisions/0047-rooms-have-their-own-limits.md says."""


class Measure(NamedTuple):
    """A measure of the source code and its limit."""

    name: str
    value: int
    limit: int


def measures() -> Iterator[Measure]:
    """Yield every measure."""
    calls = one_step()
    lines, modules = imported_by_hooks()
    yield Measure("files of one step with one observer", len({file for file, _ in calls}), 12)
    yield Measure("functions of one step with one observer", len(calls), 45)
    yield Measure("lines that an import from `loopscope.hooks` loads", lines, 2_500)
    yield Measure("`lowbit` modules among them", sum(".lowbit" in module for module in modules), 0)
    yield Measure("lambdas", lambdas(), 59)
    yield Measure("names exported by `loopscope.state`", state_exports(), 30)
    yield Measure("class names that two classes share", len(repeated_class_names()), 0)
    yield Measure("circles of modules, imports for types included", len(import_circles()), 0)
    rooms = code_lines()
    yield Measure(KERNEL, rooms["the rest"], 31_000)
    for room, limit in LIMITS_OF_ROOMS.items():
        yield Measure(f"lines of code of the room: {room}", rooms[room], limit)


def table(found: list[Measure]) -> str:
    """Return the measures as a table of the page."""
    rows = [f"| {item.name} | {item.value:,} | {item.limit:,} |\n" for item in found]
    return "| measure | now | at most |\n|---|---|---|\n" + "".join(rows)


def write(text: str) -> None:
    """Write to standard output."""
    sys.stdout.write(text)


def main(arguments: list[str]) -> int:
    """Print the table; with ``--check``, return 1 if a limit is broken, or is kept by a measure of NOT_REACHED."""
    found = list(measures())
    write(table(found))
    if "--write" in arguments:
        before, _, rest = PAGE.read_text("utf-8").partition(START)
        after = rest.partition(END)[2]
        PAGE.write_text(f"{before}{START}\n{table(found)}\n{END}{after}", "utf-8")
    if "--step" in arguments:
        write("".join(f"  {file}: {function}\n" for file, function in sorted(one_step())))
    if "--imports" in arguments:
        write("".join(f"  {module}\n" for module in imported_by_hooks()[1]))
    if "--check" not in arguments:
        return 0
    wrong = [item for item in found if (item.value > item.limit) is not (item.name in NOT_REACHED)]
    for item in wrong:
        remedy = "reduce it" if item.value > item.limit else "remove it from NOT_REACHED"
        write(f"{item.name}: {item.value:,}, limit {item.limit:,}; {remedy}.\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
