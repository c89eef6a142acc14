"""Differences between a stored record and a new one, as text; input and output are plain data."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MOST_LINES, MOST_NAMES, MOST_DIFF_LINES = 40, 4, 12
HELP, REFUSED = "help", "refused"
FACTS, DIGESTS = "facts", "digests"
STATE = "another final state"
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Difference:
    """A difference in one case of a part: its description and the metrics concerned."""

    part: str
    case: str
    what: str
    names: tuple[str, ...] = ()


def differences(part: str, stored: Record, now: Record) -> list[Difference]:
    """Return the differences of one part; digests are compared if both records of a case have them."""
    if part == HELP:
        return [*differing_texts(stored, now)]
    all_differences = [Difference(part, case, "no longer recorded") for case in stored if case not in now]
    all_differences += [Difference(part, case, "new, and not stored") for case in now if case not in stored]
    for case in stored:
        if case in now:
            all_differences += differing_facts(part, case, stored[case][FACTS], now[case][FACTS])
            all_differences += differing_digests(part, case, stored[case], now[case])
    return all_differences


def differing_facts(part: str, case: str, stored: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield added and removed metrics, metrics with other steps, and added, removed or changed refusals."""
    before, after = stored.get(REFUSED), now.get(REFUSED)
    if before != after:
        words = {None: "trains"}
        yield Difference(part, case, f"{words.get(before, f'refused ({before})')}, now {words.get(after, after)}")
        return
    if missing := tuple(name for name in stored if name not in now):
        yield Difference(part, case, "metrics missing", missing)
    if new := tuple(name for name in now if name not in stored):
        yield Difference(part, case, "new metrics", new)
    if moved := tuple(name for name in stored if name in now and list(stored[name]) != list(now[name])):
        first = moved[0]
        steps_text = f"first of them {stored[first]}, now {now[first]}"
        yield Difference(part, case, f"other number of values, first or last step ({steps_text})", moved)


def differing_digests(part: str, case: str, stored: Record, now: Record) -> Iterator[Difference]:
    """Yield the parts of the final state, and the metrics, that both records have with different digests."""
    before, after = stored.get(DIGESTS), now.get(DIGESTS)
    if before is None or after is None:
        return
    changed = [name for name in before if name in after and before[name] != after[name]]
    metrics = {*stored[FACTS]} | {*now[FACTS]}
    if state := tuple(name for name in changed if name not in metrics):
        yield Difference(part, case, STATE, state)
    if values := tuple(name for name in changed if name in metrics):
        yield Difference(part, case, "other values", values)


def differing_texts(stored: Mapping[str, list[str]], now: Mapping[str, list[str]]) -> Iterator[Difference]:
    """Yield the added, removed and changed help texts, the latter with the changed lines."""
    for command in [*stored, *(command for command in now if command not in stored)]:
        if command not in now:
            yield Difference(HELP, command, "the command no longer exists")
        elif command not in stored:
            yield Difference(HELP, command, "new, and not stored")
        elif stored[command] != now[command]:
            lines = [*difflib.unified_diff(stored[command], now[command], lineterm="", n=0)][2:]
            yield Difference(HELP, command, "\n".join(["another text", *capped(lines, MOST_DIFF_LINES)]))


def report(listed_differences: Iterable[Difference]) -> list[str]:
    """Return lines that report all differences, grouped over cases, with final states first."""
    grouped: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for difference in sorted(listed_differences, key=lambda item: item.what != STATE):
        grouped.setdefault((difference.part, difference.what, difference.names), []).append(difference.case)
    lines = []
    for (part, what, names), cases in grouped.items():
        names_text = f": {', '.join(capped(names, MOST_NAMES))}" if names else ""
        lines += f"{part}: {', '.join(capped(cases, MOST_NAMES))}: {what}{names_text}".split("\n")
    return capped(lines, MOST_LINES)


def capped(items: Iterable[str], most: int) -> list[str]:
    """Return the first items, and the number of the others.

    >>> capped("abcd", 2)
    ['a', 'b', 'and 2 more']
    """
    kept = list(items)
    return kept if len(kept) <= most else [*kept[:most], f"and {len(kept) - most} more"]
