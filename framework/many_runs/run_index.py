"""The index of a folder: values computed from the files of its runs, in one SQLite file that may be lost at any time.

A value counts only for the state of the files that it was computed from, and for the version of the code. Runs in
progress are left out. Without a usable file everything is computed again: nothing depends on the index.
"""

import json
import os
import sqlite3
import stat
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import xxhash

from ..checkpoints import is_locked
from ..errors import UsageError
from ..runs import REWINDS
from .code_version import code_version

NAME = ".loopscope-index.sqlite"
TABLE = "CREATE TABLE entries (run BLOB, kind TEXT, state TEXT, value BLOB, PRIMARY KEY (run, kind))"
FEWEST = 16
"""Runs from which on a folder gets an index; fewer are read at once."""
SETTLED = 2.0
"""Seconds since the last change of a run's files; a change within one tick of the file system's clock is invisible."""
PATIENCE = 5.0
"""Seconds to wait for another process that uses the index."""
DECODING = (UsageError, LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""Errors about the content of an index, which may come from another source, like the runs."""
Value = TypeVar("Value")
INTERVAL = 2.0
"""Seconds between two writes, so that an interrupted command keeps what it has computed."""


@dataclass(frozen=True)
class Form(Generic[Value]):
    """How a value is computed, written in the types of JSON, and read.

    Args:
        compute: returns the value.
        encode: returns its content; ``None`` for a value that is not kept.
        decode: returns the value of such content; it may raise any of ``DECODING`` for other content.
    """

    compute: Callable[[], Value]
    encode: Callable[[Value], Any]
    decode: Callable[[Any], Value]


class RunIndex:
    """The indexed values of the runs in a folder, by run and kind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / NAME
        self._database: sqlite3.Connection | None = None
        self._version: str | None = None
        self._new: dict[tuple[bytes, str], tuple[str, bytes]] = {}
        self._written = time.monotonic()

    def open(self, runs: Collection[Path]) -> None:
        """Use the file of the index if the folder has many runs, and remove the entries of other runs than these."""
        if len(runs) < FEWEST or self._database is not None:
            return
        self._version = code_version()
        if self._version is None or self._is_link():
            return
        for _ in range(2):
            try:
                self._database = self._connected()
                self._remove_others({b".", *map(self._key, runs)})
            except sqlite3.OperationalError:  # locked, or a folder that cannot be written
                self.close()
            except sqlite3.DatabaseError:  # damaged
                self._remove_file()
                continue
            return

    def _is_link(self) -> bool:
        """Return whether a file of the index is none that loopscope has written, such as a link to somewhere else."""
        for path in (self._path, self._path.with_name(f"{NAME}-journal")):
            with suppress(FileNotFoundError):
                if not stat.S_ISREG(path.lstat().st_mode):
                    return True
        return False

    def _connected(self) -> sqlite3.Connection:
        database = sqlite3.connect(self._path, timeout=PATIENCE, isolation_level=None)
        database.execute("PRAGMA trusted_schema = OFF")
        tables = [text for (text,) in database.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")]
        if tables != [TABLE]:
            if tables:
                raise sqlite3.DatabaseError("not an index of this version")
            database.execute(TABLE.replace("TABLE", "TABLE IF NOT EXISTS", 1))
        return database

    def _remove_others(self, keys: Collection[bytes]) -> None:
        assert self._database is not None
        indexed = {bytes(run) for (run,) in self._database.execute("SELECT DISTINCT run FROM entries")}
        with suppress(sqlite3.OperationalError):  # read only
            for run in indexed - set(keys):
                self._database.execute("DELETE FROM entries WHERE run = ?", (run,))

    def _remove_file(self) -> None:
        self.close()
        with suppress(OSError):
            self._path.unlink()

    def close(self) -> None:
        """Write what is new, and close the file."""
        self._write()
        if self._database is not None:
            self._database.close()
        self._database = None

    def _key(self, run: Path) -> bytes:
        return os.fsencode(os.path.relpath(run, self._folder))

    def state_of(self, run: Path) -> str | None:
        """Return a digest of the sizes, times and inodes of a run's files; ``None`` for a run that is not indexed."""
        if self._database is None or is_locked(run):
            return None
        try:
            files = sorted([*_files(run), *_files(run / REWINDS, deep=True)])
        except OSError:
            return None
        newest = max((max(times) for _, _, _, *times in files), default=0)
        if newest > (time.time() - SETTLED) * 1e9:
            return None
        return xxhash.xxh3_128_hexdigest(repr((self._version, files)).encode())

    def value(self, run: Path, kind: str, form: Form[Value], *, of: str | None = "") -> Value:
        """Return the indexed value of a run, or compute it, and keep it unless there was a warning.

        Args:
            run: the folder of the run.
            kind: the name of the value.
            form: how to compute the value, and to write and read it.
            of: the state of what else the value depends on; ``None`` if that has none.
        """
        state = self.state_of(run) if of is not None else None
        for content in self.stored(run, [kind], state, of).values():
            with suppress(*DECODING):
                return form.decode(json.loads(content))
        with noticed_warnings() as noticed:
            value = form.compute()
        content = form.encode(value)
        if state is not None and content is not None and not noticed:
            self.store(run, state, {kind: json.dumps(content).encode()}, of)
        return value

    def stored(self, run: Path, kinds: Iterable[str], state: str | None, of: str | None = "") -> dict[str, bytes]:
        """Return the stored values of these kinds for a state of the run."""
        if self._database is None or state is None:
            return {}
        key, entries = self._key(run), dict[str, bytes]()
        query = "SELECT value FROM entries WHERE run = ? AND kind = ? AND state = ?"
        try:
            for kind in kinds:
                new = self._new.get((key, kind))
                row = self._database.execute(query, (key, kind, f"{state}{of}")).fetchone() if new is None else new[1:]
                if row is not None:
                    entries[kind] = bytes(row[0])
        except sqlite3.OperationalError:
            self._database = None
        except sqlite3.DatabaseError:
            self._new.clear()
            self._remove_file()
        return entries

    def store(self, run: Path, state: str, values: Mapping[str, bytes], of: str | None = "") -> None:
        """Keep values of a run, unless its files have changed since the state was taken."""
        if self._database is None or self.state_of(run) != state:
            return
        key = self._key(run)
        self._new |= {(key, kind): (f"{state}{of}", value) for kind, value in values.items()}
        if time.monotonic() - self._written > INTERVAL:
            self._write()

    def _write(self) -> None:
        rows = [(*key, *entry) for key, entry in self._new.items()]
        self._new.clear()
        self._written = time.monotonic()
        if self._database is None or not rows:
            return
        with suppress(sqlite3.DatabaseError):  # locked, read only, a full disk or damaged: the values are lost
            self._database.execute("BEGIN IMMEDIATE")
            try:
                self._database.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?)", rows)
                self._database.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.DatabaseError):
                    self._database.execute("ROLLBACK")
                raise


def _files(folder: Path, *, deep: bool = False) -> Iterator[tuple[str, int, int, int, int]]:
    """Yield path, size, inode and times of the files in a folder; nothing for a missing one."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(NAME):
                continue
            if deep and entry.is_dir(follow_symlinks=False):
                yield from _files(Path(entry.path), deep=True)
                continue
            try:
                status = entry.stat()
            except FileNotFoundError:  # a link to nothing
                status = entry.stat(follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode):
                name = os.path.relpath(entry.path, folder) if deep else entry.name
                yield name, status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


@contextmanager
def noticed_warnings() -> Iterator[list[Any]]:
    """Collect the warnings of the body, which are shown as usual."""
    noticed: list[Any] = []
    show = warnings.showwarning

    def shown(message: Any, *details: Any, **options: Any) -> None:
        noticed.append(message)
        show(message, *details, **options)

    warnings.showwarning = shown
    try:
        yield noticed
    finally:
        warnings.showwarning = show
