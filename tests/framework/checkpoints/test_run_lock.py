"""The lock of a run: one process writes it, a second is refused, a stale lock is taken over."""

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
from loopscope.checkpoints import is_locked, run_lock
from loopscope.checkpoints.lock import LOCK
from loopscope.cli import main
from loopscope.errors import LoopscopeError, RunNotice, UsageError

from tests.framework.runs.small_experiment import Small, contents, registered

HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
file.write('{"pid": 4711, "host": "elsewhere", "since": "2030-01-01 12:00:00"}')
file.flush()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def locked(tmp_path: Path):
    """Return a run's folder whose lock another process holds."""
    folder = tmp_path / "small/plain"
    folder.mkdir(parents=True)
    words = [sys.executable, "-c", HOLDER, str(folder / LOCK)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield folder
        process.kill()


@pytest.mark.guarantee("one-writer-per-run")
@pytest.mark.process
def test_second_process_is_refused_naming_the_first(locked: Path) -> None:
    """The error names the process, the host and the start time of the holder."""
    with (
        pytest.raises(UsageError, match=r"process 4711 on elsewhere, since 2030-01-01 12:00:00; wait"),
        run_lock(locked),
    ):
        pass


@pytest.mark.process
@pytest.mark.parametrize("option", ["--overwrite", "--resume", "--no-console-output"])
def test_the_command_is_refused_before_anything_is_written(option: str, locked: Path, tmp_path: Path, capfd) -> None:
    before = contents(tmp_path)
    with registered(Small):
        words = ["run", "small", "--strategy", "plain", "--output-dir", str(tmp_path), "--hook-csv"]
        assert main([*words, "--no-console-output", option]) == 2
    output, errors = capfd.readouterr()
    assert (output, errors.count("\n")) == ("", 1)
    assert "is being written by process 4711" in errors
    assert contents(tmp_path) == before


def test_lock_names_its_holder_and_is_removed(tmp_path: Path) -> None:
    """The lock file contains the process ID and disappears when the run ends."""
    with run_lock(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
        with pytest.raises(UsageError, match=f"process {os.getpid()}"), run_lock(tmp_path):
            pass
    assert contents(tmp_path) == {}


def test_lock_is_removed_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), run_lock(tmp_path):
        raise ZeroDivisionError
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("text", ['{"pid": 4711, "host": "here", "since": "then"}', "cut off {", "[]"])
def test_stale_lock_is_taken_over_with_notice(text: str, tmp_path: Path) -> None:
    """The stale file has a valid record, a truncated one or JSON of another shape."""
    (tmp_path / LOCK).write_text(text)
    who = "process 4711 on here, since then" if "4711" in text else "another process"
    with pytest.warns(RunNotice, match=f"was left by {who}, which no longer runs; this process"), run_lock(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_lock_file_deleted_before_locking_is_retried(tmp_path: Path, monkeypatch) -> None:
    """The owner deletes the file between open and lock, so the next process must lock a new file."""
    lock, tries = fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        tries.append(descriptor)
        if len(tries) == 1:
            (tmp_path / LOCK).unlink()  # like its owner at its end, between our open and our lock
        lock(descriptor, operation)

    monkeypatch.setattr("loopscope.checkpoints.lock.fcntl.flock", late)
    with run_lock(tmp_path), pytest.raises(UsageError, match="is being written"), run_lock(tmp_path):
        pass
    assert len(tries) == 4  # the second process tries again a moment later


def refuse(number: int) -> Any:
    def refusing(*arguments: Any) -> None:
        raise OSError(number, os.strerror(number))

    return refusing


def test_file_system_without_locks_is_reported(tmp_path: Path, monkeypatch) -> None:
    """The run issues a notice and continues."""
    monkeypatch.setattr("loopscope.checkpoints.lock.fcntl.flock", refuse(errno.ENOLCK))
    with pytest.warns(RunNotice, match="is on a file system without locks"), run_lock(tmp_path):
        assert (tmp_path / LOCK).exists()


@pytest.mark.parametrize(("function", "number"), [("open", errno.EROFS), ("pwrite", errno.ENOSPC)])
def test_unwritable_lock_raises_a_clear_error(function: str, number: int, tmp_path: Path, monkeypatch) -> None:
    """The error quotes the reason, here a read-only file system or a full disk."""
    monkeypatch.setattr(f"loopscope.checkpoints.lock.os.{function}", refuse(number))
    with (
        pytest.raises(LoopscopeError, match=rf"run\.lock could not be written: {os.strerror(number)}"),
        run_lock(tmp_path),
    ):
        pass


@pytest.mark.guarantee("one-writer-per-run")
def test_link_instead_of_lock_is_refused(tmp_path: Path) -> None:
    """Its target keeps its content."""
    target, folder = tmp_path / "precious", tmp_path / "run"
    target.write_text("all of it")
    folder.mkdir()
    (folder / LOCK).symlink_to(target)
    with pytest.raises(LoopscopeError, match=r"run\.lock could not be written"), run_lock(folder):
        pass
    assert target.read_text() == "all of it"


def test_lock_query_does_not_block_new_run(tmp_path: Path) -> None:
    """The run waits while another process briefly holds a shared lock for its query."""
    (tmp_path / LOCK).touch()
    asking = (tmp_path / LOCK).open("rb")
    fcntl.flock(asking, fcntl.LOCK_SH)
    Timer(0.01, asking.close).start()
    with run_lock(tmp_path):
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)
