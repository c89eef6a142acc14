"""The words after a command, parted: plain ones, switches, options with their values."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..errors import UsageError, nearest


@dataclass
class Words:
    """What a command was given; options by their names, without dashes in front."""

    plain: list[str] = field(default_factory=list)
    switches: set[str] = field(default_factory=set)
    values: dict[str, str] = field(default_factory=dict)
    lists: dict[str, list[str]] = field(default_factory=dict)


def parted(
    words: Iterable[str], *, switches: Iterable[str] = (), values: Iterable[str] = (), lists: Iterable[str] = ()
) -> Words:
    """Part the words after a command, whose options are those named; those of ``lists`` take all words that follow.

    Options are spelled with dashes or underscores. Raises :class:`UsageError` for an option that is none, for one
    without its value, and for a switch with one.

    >>> parted(["run", "--to", "x", "--all", "--names=a", "b"], switches=["all"], values=["to"], lists=["names"])
    Words(plain=['run'], switches={'all'}, values={'to': 'x'}, lists={'names': ['a', 'b']})
    """
    found = Words()
    flags = {f"--{name}": name for name in (*switches, *values, *lists)}
    valued, listed = set(values), set(lists)
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            found.plain.append(word)
            continue
        flag, equals, given = word.partition("=")
        name = flags.get(flag.replace("_", "-"))
        if name is None:
            raise _unknown(flag, flags)
        here = [given] if equals else []
        while rest and ((name in valued and not here) or (name in listed and not rest[0].startswith("-"))):
            here.append(rest.pop(0))
        _put(found, name, here, wanted=name in valued or name in listed, listed=name in listed)
    return found


def _put(found: Words, name: str, given: list[str], *, wanted: bool, listed: bool) -> None:
    if wanted and not given:
        raise UsageError(f"--{name} needs a value.")
    if given and not wanted:
        raise UsageError(f"--{name} takes no value, but got {given[0]!r}.")
    if listed:
        found.lists.setdefault(name, []).extend(given)
    elif wanted:
        found.values[name] = given[0]
    else:
        found.switches.add(name)


def _unknown(flag: str, flags: Iterable[str]) -> UsageError:
    known = sorted(flags)
    return UsageError(f"Unknown option {flag!r}.{nearest(flag, known)} Known: {', '.join(known)}.")
