"""Digests of the training state in a run's record: a file of JSON lines, chained by their links."""

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from ..data import RowNumbers
from ..digests import ALGORITHM, link, state_digests
from ..durable_files import translated_disk_errors
from ..engine import HookManager
from ..errors import LoopscopeError, warn
from ..state import LoopState
from .row_log import ENTRY, rows_entry

DIGESTS = "digests.jsonl"


class Digest(NamedTuple):
    """One line of the file: the digest of each state entry at one moment, and the link of the chain up to it."""

    epoch: int
    step: int
    algorithm: str
    link: str
    entries: Mapping[str, str]
    since: int = 0
    """The entry ``rows``, where present, covers the steps after this one."""

    def differing_entries(self, other: "Digest") -> list[str]:
        """Return the names of the entries that differ; ``rows`` is compared only if both cover the same steps."""
        comparable = self.since == other.since and ENTRY in self.entries and ENTRY in other.entries
        names = [name for name in {**self.entries, **other.entries} if comparable or name != ENTRY]
        return [name for name in names if self.entries.get(name) != other.entries.get(name)]


def read_digests(folder: Path) -> dict[tuple[int, int], Digest]:
    """Return the digests in a run's folder by epoch and step, up to the first line that does not continue the chain."""
    digests: dict[tuple[int, int], Digest] = {}
    path, previous_link = folder / DIGESTS, ""
    for line in path.read_text("utf-8", "replace").splitlines() if path.is_file() else ():
        try:
            digest = Digest(**json.loads(line))
            if digest.algorithm != ALGORITHM or digest.link != link(previous_link, digest.step, digest.entries):
                break
            if {int} != {type(digest.epoch), type(digest.step)}:
                break
        except (ValueError, TypeError, AttributeError, RecursionError):
            break
        digests[digest.epoch, digest.step] = digest
        previous_link = digest.link
    return digests


class DigestLog:
    """Writes a digest ``every`` so many steps (0: never, ``None``: at every snapshot), with the ``numbers`` of rows.

    All ranks compute the digest together; the main one writes it. The entries in ``left_out`` are not written.
    """

    def __init__(
        self,
        folder: Path,
        manager: HookManager,
        every: int | None = None,
        numbers: RowNumbers | None = None,
        left_out: Collection[str] = (),
    ) -> None:
        self._path, self._manager, self._every = folder / DIGESTS, manager, every
        self._link = ""
        self._bytes, self._writes = 0, manager.task.ranks.is_main
        self._summary = xxhash.xxh3_128()
        self._numbers, self._left_out = numbers, left_out
        self._since: int | None = None

    def position(self) -> dict[str, Any]:
        """Return the position for a checkpoint: the file's length and digest, its last link and that link's step."""
        return {"bytes": self._bytes, "xxh3_128": self._summary.hexdigest(), "link": self._link, "since": self._since}

    def truncate_to(self, position: Mapping[str, Any]) -> None:
        """Truncate the file to its length at a checkpoint; if its bytes have changed since, start a new chain."""
        if not self._writes:
            return
        data = self._path.read_bytes()[: position["bytes"]] if self._path.is_file() else b""
        if xxhash.xxh3_128_hexdigest(data) != position["xxh3_128"]:
            warn(
                f"{self._path} has changed since the checkpoint was written; a new chain of digests starts.",
                stacklevel=2,
            )
            self._path.unlink(missing_ok=True)
            return
        if self._path.is_file():
            os.truncate(self._path, len(data))
        self._bytes, self._link, self._since = len(data), position["link"], position.get("since")
        self._summary.update(data)

    def keep_until(self, step: int) -> None:
        """Remove the lines of later steps, and continue the chain of the earlier ones."""
        if not self._writes or not self._path.is_file():
            return
        digests = [digest for digest in read_digests(self._path.parent).values() if digest.step <= step]
        with translated_disk_errors(self._path):
            self._path.write_text("".join(f"{json.dumps(digest._asdict())}\n" for digest in digests))
        if digests:
            self._link, self._since = digests[-1].link, digests[-1].step

    def pause(self, loop: LoopState, *, unit_ended: bool) -> None:
        """Write a line if one is due."""
        self._since = loop.step - 1 if self._since is None else self._since
        if self._is_due(loop, unit_ended=unit_ended):
            self.write(loop)

    def write(self, loop: LoopState) -> None:
        """Write a line about this moment."""
        since = self._since or 0
        digests = state_digests(self._manager.state)
        entries = {name: value for name, value in digests.items() if name not in self._left_out}
        if self._numbers is not None:
            entries |= rows_entry(self._manager, self._numbers, since, loop.step)
        self._link, self._since = link(self._link, loop.step, entries), loop.step
        digest = Digest(loop.epoch, loop.step, ALGORITHM, self._link, entries, since)
        data = (json.dumps(digest._asdict()) + "\n").encode()
        self._summary.update(data)
        self._bytes += len(data)
        if self._writes:
            try:
                with translated_disk_errors(self._path), self._path.open("ab") as file:
                    file.write(data)
            except LoopscopeError as error:
                self._writes = False  # digests are still computed, since the other ranks wait for this one
                warn(f"{error} The run continues without digests.", stacklevel=3)

    def _is_due(self, loop: LoopState, *, unit_ended: bool) -> bool:
        """Return whether a digest is due; snapshots are known when a unit ends, as its evaluation may stop the run."""
        task, counts_epochs = self._manager.task, self._manager.counts_epochs
        if self._every is None:
            done = loop.epoch if counts_epochs else loop.step
            return unit_ended and (loop.stopped or done == task.length or done % task.snapshot_every == 0)
        return bool(self._every) and unit_ended != counts_epochs and loop.step % self._every == 0
