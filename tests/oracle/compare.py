"""What differs between a stored record and a new one, in words; plain data in and plain data out."""

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
    """What is different, in words, with the metrics that it is about, in one case of a part."""

    part: str
    case: str
    what: str
    names: tuple[str, ...] = ()


def differences(part: str, stored: Record, now: Record) -> list[Difference]:
    """Return what differs in one part; digests are compared where both records of a case have them."""
    if part == HELP:
        return [*differing_texts(stored, now)]
    found = [Difference(part, case, "not recorded any more") for case in stored if case not in now]
    found += [Difference(part, case, "new, and not stored") for case in now if case not in stored]
    for case in stored:
        if case in now:
            found += differing_facts(part, case, stored[case][FACTS], now[case][FACTS])
            found += differing_digests(part, case, stored[case], now[case])
    return found


def differing_facts(part: str, case: str, stored: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield metrics that came, went or have other steps, and refusals that came, went or have another class."""
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
        told = f"first of them {stored[first]}, now {now[first]}"
        yield Difference(part, case, f"other number of values, first or last step ({told})", moved)


def differing_digests(part: str, case: str, stored: Record, now: Record) -> Iterator[Difference]:
    """Yield the parts of the final state, and the metrics, that are there in both records with other digests."""
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
    """Yield the help texts that came, went or changed, these with the changed lines."""
    for command in [*stored, *(command for command in now if command not in stored)]:
        if command not in now:
            yield Difference(HELP, command, "no such command any more")
        elif command not in stored:
            yield Difference(HELP, command, "new, and not stored")
        elif stored[command] != now[command]:
            lines = [*difflib.unified_diff(stored[command], now[command], lineterm="", n=0)][2:]
            yield Difference(HELP, command, "\n".join(["another text", *capped(lines, MOST_DIFF_LINES)]))


def report(found: Iterable[Difference]) -> list[str]:
    """Return lines that tell of all differences, the same one of several cases once, and final states first."""
    grouped: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for difference in sorted(found, key=lambda each: each.what != STATE):
        grouped.setdefault((difference.part, difference.what, difference.names), []).append(difference.case)
    lines = []
    for (part, what, names), cases in grouped.items():
        told = f": {', '.join(capped(names, MOST_NAMES))}" if names else ""
        lines += f"{part}: {', '.join(capped(cases, MOST_NAMES))}: {what}{told}".split("\n")
    return capped(lines, MOST_LINES)


def capped(items: Iterable[str], most: int) -> list[str]:
    """Return the first of the items, and how many more there are.

    >>> capped("abcd", 2)
    ['a', 'b', 'and 2 more']
    """
    kept = list(items)
    return kept if len(kept) <= most else [*kept[:most], f"and {len(kept) - most} more"]
