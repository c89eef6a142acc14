"""Output of the commands that read runs: text or one JSON object, bounded in size, with a note on what was cut."""

import json
import shlex
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from ..console import make_console, printable
from ..durable_files import plain_json
from ..errors import LoopscopeError, UsageError, counted, require, shortened
from .parser import CommandParser

SCHEMA = 1
"""Version of the JSON of all commands (docs/schemas/commands.json); it changes if a field is renamed or removed."""
MOST_BYTES = 4096
"""Bytes of an output by default: about 1,000 tokens of a language model."""
LONGEST_TEXT = 400
"""Characters of a text in an output that is still too long after its lists were cut."""
ALL = "--all"
FEW_ENTRIES = 5
"""Entries of a field that remain if others can be cut instead."""
Kept = Literal["first", "last"]


class ReportedError(LoopscopeError):
    """A result that ends a command with status 1, such as a difference, after the output has described it."""


def with_output_options(parser: CommandParser, *, json_text: str = "write one JSON object") -> CommandParser:
    """Add the options of a command that reads runs to its parser, and return it."""
    parser.add_argument("--json", action="store_true", help=json_text)
    limit = f"cut the output at N bytes (default: {MOST_BYTES:,}; text on a terminal is not cut)"
    parser.add("max_bytes", int | None, limit)
    parser.add_argument(ALL, action="store_true", help="cut nothing")
    return parser


@dataclass(frozen=True)
class Output:
    """Writes the result of a command.

    Args:
        words: the command without the options of the output, for the note on what was cut.
        is_json: whether to write JSON.
        most: the largest number of bytes, or ``None`` without a limit.
    """

    words: Sequence[str]
    is_json: bool
    most: int | None

    @classmethod
    def of(cls, command: str, words: Sequence[str], given: Mapping[str, Any]) -> "Output":
        """Return the output of a command with its words and parsed options.

        Raises:
            UsageError: for a negative limit.
        """
        limit = given["max_bytes"]
        require(limit is None or limit >= 0, f"--max-bytes is {limit}; it must be a number of bytes, 0 for no limit.")
        default = None if make_console().is_terminal and not given["json"] else MOST_BYTES
        most = None if given["all"] or limit == 0 else limit or default
        return cls([command, *_without_limit(words)], given["json"], most)

    @property
    def more(self) -> str:
        """The command that cuts nothing."""
        return shlex.join(["loopscope", *self.words, ALL])

    def write(self, content: Mapping[str, Any], cut: Mapping[str, Kept], lines: Callable[[], Iterable[str]]) -> None:
        """Write the content as JSON, or as lines of text.

        Args:
            content: plain values, without the version of the schema.
            cut: the lists and mappings that may be cut, the least important first, and which of their entries remain.
            lines: returns the lines of the text, of which the last ones remain if those of a list do; the first one
                always does.
        """
        if self.is_json:
            sys.stdout.write(f"{encoded(self._bounded(content, cut))}\n")
        else:
            self.write_lines([*lines()], "last" if "last" in cut.values() else "first")

    def write_lines(self, lines: Sequence[str], kept: Kept = "first") -> None:
        """Write lines of text; beyond the limit only their number, and the command that shows them."""
        if not lines:
            return
        head, *rest = [f"{printable(line)}\n" for line in lines]
        if self.most is not None and sum(len(line.encode()) for line in (head, *rest)) > self.most:
            room = self.most - len(f"{head}{self._note(len(rest))}".encode())
            ordered = rest if kept == "first" else rest[::-1]
            number = 0
            while number < len(ordered) and (room := room - len(ordered[number].encode())) >= 0:
                number += 1
            note = self._note(len(rest) - number)
            rest = [*rest[:number], note] if kept == "first" else [note, *rest[len(rest) - number :]]
        sys.stdout.write("".join([head, *rest]))

    def _note(self, omitted: int) -> str:
        return f"... {counted(omitted, 'more line')}: {printable(self.more)}\n"

    def _bounded(self, content: Mapping[str, Any], cut: Mapping[str, Kept]) -> dict[str, Any]:
        """Return the content with the version of the schema, and without what exceeds the limit."""
        bounded: dict[str, Any] = {"schema": SCHEMA, **plain_json(content, finite=True)}
        for floor in (FEW_ENTRIES, 0):  # some entries of every field are better than all of one
            for name, kept in cut.items():
                if self._fits(bounded):
                    return bounded
                part, total = partial(self._part, bounded, name, kept), len(bounded[name])
                fitting = bisect_left(range(total), True, key=partial(self._exceeds, part)) - 1
                if (number := max(fitting, min(floor, total))) < total:
                    bounded = part(number)
        return bounded if self._fits(bounded) else _with_short_texts(bounded)

    def _part(self, content: Mapping[str, Any], name: str, kept: Kept, number: int) -> dict[str, Any]:
        """Return the content with a number of entries of one field, and with notes on all that was omitted."""
        entries = content[name]
        items = list(entries.items()) if isinstance(entries, Mapping) else entries
        part = items[:number] if kept == "first" else items[len(items) - number :]
        omitted = {note["field"]: note["omitted"] for note in content.get("truncated", ())}
        omitted[name] = omitted.get(name, 0) + len(items) - number
        notes = [{"field": field, "omitted": count, "more": self.more} for field, count in omitted.items()]
        return {**content, name: dict(part) if isinstance(entries, Mapping) else part, "truncated": notes}

    def _exceeds(self, part: Callable[[int], Mapping[str, Any]], number: int) -> bool:
        return not self._fits(part(number))

    def _fits(self, content: Mapping[str, Any]) -> bool:
        return self.most is None or len(encoded(content).encode()) < self.most


def _without_limit(words: Sequence[str]) -> list[str]:
    """Return words without --all and --max-bytes."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in ("--max-bytes", "--max_bytes"):
            next(rest, None)
        elif word != ALL and not word.startswith(("--max-bytes=", "--max_bytes=")):
            kept.append(word)
    return kept


def encoded(content: Mapping[str, Any]) -> str:
    """Return JSON on one line, in ASCII, so that texts of files cannot control a terminal."""
    return json.dumps(content, allow_nan=False)


def _with_short_texts(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_short_texts(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_short_texts(item) for item in value]
    return shortened(value, LONGEST_TEXT) if isinstance(value, str) else value


def write_error(error: LoopscopeError) -> None:
    """Write an error as the JSON object of a command."""
    status = 2 if isinstance(error, UsageError) else 1
    text = shortened(" ".join(str(error).split()), MOST_BYTES // 2)
    sys.stdout.write(f"{encoded({'schema': SCHEMA, 'error': text, 'status': status})}\n")
