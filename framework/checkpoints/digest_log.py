"""Digests of the training state in the record of a run: a file of lines, each a link of a chain."""

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from ..data import RowNumbers
from ..digests import ALGORITHM, link, state_digests
from ..durable_files import refusal_of_disk
from ..errors import LoopscopeError
from ..firing import HookManager
from ..state import LoopState
from .row_log import ENTRY, rows_entry

DIGESTS = "digests.jsonl"


class Digest(NamedTuple):
    """One line of the file: the digest of each entry of the state at a moment, and the link that ends with it."""

    epoch: int
    step: int
    algorithm: str
    link: str
    entries: Mapping[str, str]
    since: int = 0
    """The entry ``rows``, if there is one, is that of the steps after this one."""

    def unlike(self, other: "Digest") -> list[str]:
        """Name the entries that differ; those of rows compare only where both speak of the same steps."""
        comparable = self.since == other.since and ENTRY in self.entries and ENTRY in other.entries
        names = [name for name in {**self.entries, **other.entries} if comparable or name != ENTRY]
        return [name for name in names if self.entries.get(name) != other.entries.get(name)]


def read_digests(folder: Path) -> dict[tuple[int, int], Digest]:
    """Return the digests in the folder of a run by epoch and step, as far as lines are whole and fit to the chain."""
    found: dict[tuple[int, int], Digest] = {}
    path, before = folder / DIGESTS, ""
    for line in path.read_text("utf-8", "replace").splitlines() if path.is_file() else ():
        try:
            digest = Digest(**json.loads(line))
            if digest.algorithm != ALGORITHM or digest.link != link(before, digest.step, digest.entries):
                break
        except (ValueError, TypeError, AttributeError):
            break
        found[digest.epoch, digest.step] = digest
        before = digest.link
    return found


class DigestLog:
    """Writes a line ``every`` so many steps (0: none, ``None``: at every snapshot); the first of all processes does."""

    def __init__(self, folder: Path, manager: HookManager, every: int | None, numbers: RowNumbers) -> None:
        self._path, self._manager, self._every = folder / DIGESTS, manager, every
        self._link = ""
        self._bytes, self._writes = 0, manager.task.ranks.is_main
        self._summary = xxhash.xxh3_128()
        self._numbers = numbers
        self._since: int | None = None

    def position(self) -> dict[str, Any]:
        """Return what a checkpoint says of the file: its length, its bytes' digest, the last link and its step."""
        return {"bytes": self._bytes, "xxh3_128": self._summary.hexdigest(), "link": self._link, "since": self._since}

    def go_on(self, position: Mapping[str, Any]) -> None:
        """Cut the file to what it was at a checkpoint; where it is not what it was, a new chain begins in it."""
        if not self._writes:
            return
        data = self._path.read_bytes()[: position["bytes"]] if self._path.is_file() else b""
        if xxhash.xxh3_128_hexdigest(data) != position["xxh3_128"]:
            warnings.warn(f"{self._path} is not what the checkpoint knows; its digests begin anew.", stacklevel=2)
            self._path.unlink(missing_ok=True)
            return
        if self._path.is_file():
            os.truncate(self._path, len(data))
        self._bytes, self._link, self._since = len(data), position["link"], position.get("since")
        self._summary.update(data)

    def pause(self, loop: LoopState, *, unit_ended: bool) -> None:
        """Write a line if one is due."""
        since = self._since = loop.step - 1 if self._since is None else self._since
        if not self._is_due(loop, unit_ended=unit_ended):
            return
        entries = state_digests(self._manager.state) | rows_entry(self._manager, self._numbers, since, loop.step)
        self._link, self._since = link(self._link, loop.step, entries), loop.step
        digest = Digest(loop.epoch, loop.step, ALGORITHM, self._link, entries, since)
        data = (json.dumps(digest._asdict()) + "\n").encode()
        self._summary.update(data)
        self._bytes += len(data)
        if self._writes:
            try:
                with refusal_of_disk(self._path), self._path.open("ab") as file:
                    file.write(data)
            except LoopscopeError as error:
                self._writes = False  # all processes go on computing digests together
                warnings.warn(f"{error} The run goes on without digests.", stacklevel=3)

    def _is_due(self, loop: LoopState, *, unit_ended: bool) -> bool:
        """Snapshots are known where a unit has ended, as its evaluation may end the run."""
        task, counts_epochs = self._manager.task, self._manager.counts_epochs
        if self._every is None:
            done = loop.epoch if counts_epochs else loop.step
            return unit_ended and (loop.stopped or done == task.length or done % task.snapshot_every == 0)
        return bool(self._every) and unit_ended != counts_epochs and loop.step % self._every == 0
