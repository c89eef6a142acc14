"""Lock on a run's folder, so that one process writes it; the system releases the lock when that process ends."""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..durable_files import read_json, translated_disk_errors
from ..errors import UsageError, notice

LOCK = "run.lock"
PATIENCE = 0.05  # seconds after which a shared lock of `is_locked` in another process has been released


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock on an existing folder of a run; programs that a child process executes do not inherit it.

    The lock file of a process that no longer exists is taken over with a notice. A file system without locks causes a
    notice too.

    Raises:
        UsageError: if another process holds the lock; the message names it.
    """
    path = folder / LOCK
    with translated_disk_errors(path):
        descriptor = _acquire(path)
    try:
        if os.fstat(descriptor).st_size:
            notice(
                f"The lock on {folder} was left by {_owner(path)}, which no longer runs; this process takes it over."
            )
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        with translated_disk_errors(path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(owner).encode(), 0)
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink()
    finally:
        os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Return whether a running process holds the lock on a run's folder."""
    with suppress(OSError):
        if (folder / LOCK).is_file():
            with (folder / LOCK).open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return True
    return False


def _acquire(path: Path) -> int:
    """Open and lock the file; try again if its last owner removed it in between, so that the path names another one."""
    while True:
        # A link in a folder from another source must not lead to another file.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            _lock(descriptor, path)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.lstat()):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(PATIENCE)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        advice = "wait for it, stop it, or choose another output folder"
        raise UsageError(f"{path.parent} is being written by {_owner(path)}; {advice}.") from error
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
        notice(f"{path.parent} is on a file system without locks: do not let a second process write to it.")


def _owner(path: Path) -> str:
    """Describe the process that wrote a lock file."""
    try:
        owner = read_json(path)
        return f"process {owner['pid']} on {owner['host']}, since {owner['since']}"
    except (UsageError, KeyError):
        return "another process"
