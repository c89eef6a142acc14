"""One process writes a run: a lock on its folder, which the system releases when the process is gone."""

import errno
import fcntl
import json
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..durable_files import read_json, refusal_of_disk
from ..errors import UsageError, notice

LOCK = "run.lock"
PATIENCE = 0.05  # seconds in which whoever only asks whether the lock is held has let go of it


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock on a run's folder, which must exist; children that start programs of their own do not inherit it.

    Raises :class:`UsageError` that names the process which holds it. The lock of a process that is gone is taken over
    with a notice; where the file system has no locks, a notice says that nothing is locked.
    """
    path = folder / LOCK
    with refusal_of_disk(path):
        descriptor = _locked(path)
    try:
        if os.fstat(descriptor).st_size:
            notice(f"The lock on {folder} was left by {_owner(path)}, which is gone; it is taken over.")
        mine = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        with refusal_of_disk(path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(mine).encode(), 0)
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink()
    finally:
        os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Return whether a process that is alive holds the lock on a run's folder."""
    with suppress(OSError):
        if (folder / LOCK).is_file():
            with (folder / LOCK).open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return True
    return False


def _locked(path: Path) -> int:
    """Open and lock the file, once more if whoever held it removed it in between: then another one is the lock."""
    while True:
        descriptor = _opened(path)
        try:
            _lock(descriptor, path)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.lstat()):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _opened(path: Path) -> int:
    """Open the file, or make it; raises :class:`UsageError` for a folder, or a link, behind which another lies."""
    try:
        # Without O_NONBLOCK a FIFO under the name would keep the process waiting for a reader.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(path, flags, 0o644)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR):
            raise
        raise _no_lock(path) from error
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:  # none, where its owner has just removed it
        return descriptor
    os.close(descriptor)
    raise _no_lock(path)


def _no_lock(path: Path) -> UsageError:
    return UsageError(f"{path} is a link or no plain file, so it is not the lock of a run; remove it.")


def _lock(descriptor: int, path: Path) -> None:
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(PATIENCE)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        remedy = "wait for it, stop it, or choose another --output-dir"
        raise UsageError(f"{path.parent} is being written by {_owner(path)}; {remedy}.") from error
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
        notice(f"{path.parent} lies on a file system without locks: nothing keeps a second process from writing it.")


def _owner(path: Path) -> str:
    """Name the process that a lock file tells of."""
    try:
        owner = read_json(path)
        return f"process {owner['pid']} on {owner['host']}, since {owner['since']}"
    except (UsageError, KeyError):
        return "another process"
