"""Print the table of ``make shape``: the size of one step, of the author's imports, and of functions."""

import sys
from collections.abc import Iterator

from tests.shape.counts import imported_by_hooks, lambdas, one_step, short_functions, state_exports

TARGETS = {
    "files of one step with one observer": "12",
    "functions of one step with one observer": "45",
    "lines loaded by import loopscope.hooks": "6,000",
    "lowbit modules among them": "0",
    "lambdas": "59",
    "functions of at most two lines, in percent": "20",
    "names exported by state": "30",
}


def measured() -> Iterator[tuple[str, str]]:
    """Yield the name and the value of every measure."""
    calls = one_step()
    lines, modules = imported_by_hooks()
    values = (
        f"{len({file for file, _ in calls})}",
        f"{len(calls)}",
        f"{lines:,}",
        f"{sum('.lowbit' in module for module in modules)}",
        f"{lambdas()}",
        f"{short_functions():.1f}",
        f"{state_exports()}",
    )
    yield from zip(TARGETS, values, strict=True)


def write(line: str) -> None:
    """Write one line to standard output."""
    sys.stdout.write(line + "\n")


def print_table() -> None:
    """Print one line per measure; with ``--step``, also the functions of the step by file."""
    write(f"{'measure':45}{'measured':>10}{'at most':>10}")
    for name, value in measured():
        write(f"{name:45}{value:>10}{TARGETS[name]:>10}")
    if "--step" in sys.argv[1:]:
        for file, function in sorted(one_step()):
            write(f"  {file}: {function}")
    if "--imports" in sys.argv[1:]:
        for module in imported_by_hooks()[1]:
            write(f"  {module}")


print_table()
