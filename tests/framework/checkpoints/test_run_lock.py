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
def held(tmp_path: Path):
    """Return a run's folder whose lock another process holds."""
    folder = tmp_path / "small/plain"
    folder.mkdir(parents=True)
    words = [sys.executable, "-c", HOLDER, str(folder / LOCK)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield folder
        process.kill()


@pytest.mark.process
def test_a_second_process_is_refused_with_the_first_one_named(held: Path) -> None:
    with pytest.raises(UsageError, match=r"process 4711 on elsewhere, since 2030-01-01 12:00:00; wait"), run_lock(held):
        pass


@pytest.mark.process
@pytest.mark.parametrize("option", ["--overwrite", "--resume", "--no-console-output"])
def test_the_command_is_refused_before_anything_is_written(option: str, held: Path, tmp_path: Path, capfd) -> None:
    before = contents(tmp_path)
    with registered(Small):
        words = ["run", "small", "--strategy", "plain", "--output-dir", str(tmp_path), "--hook-csv"]
        assert main([*words, "--no-console-output", option]) == 2
    output, errors = capfd.readouterr()
    assert (output, errors.count("\n")) == ("", 1)
    assert "is being written by process 4711" in errors
    assert contents(tmp_path) == before


def test_the_lock_says_who_holds_it_and_goes_when_the_run_ends(tmp_path: Path) -> None:
    with run_lock(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
        with pytest.raises(UsageError, match=f"process {os.getpid()}"), run_lock(tmp_path):
            pass
    assert contents(tmp_path) == {}


def test_the_lock_goes_after_an_error_too(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), run_lock(tmp_path):
        raise ZeroDivisionError
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("text", ['{"pid": 4711, "host": "here", "since": "then"}', "cut off {", "[]"])
def test_the_lock_of_a_process_that_is_gone_is_taken_over_with_a_notice(text: str, tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text(text)
    who = "process 4711 on here, since then" if "4711" in text else "another process"
    with pytest.warns(RunNotice, match=f"was left by {who}, which is gone; it is taken over"), run_lock(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_a_lock_file_that_its_owner_removes_meanwhile_is_not_taken_for_the_lock(tmp_path: Path, monkeypatch) -> None:
    lock, tries = fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        tries.append(descriptor)
        if len(tries) == 1:
            (tmp_path / LOCK).unlink()  # as its owner does at its end, between our open and our lock
        lock(descriptor, operation)

    monkeypatch.setattr("loopscope.checkpoints.lock.fcntl.flock", late)
    with run_lock(tmp_path), pytest.raises(UsageError, match="is being written"), run_lock(tmp_path):
        pass
    assert len(tries) == 4  # the second process tries again a moment later


def refuse(number: int) -> Any:
    def refusing(*arguments: Any) -> None:
        raise OSError(number, os.strerror(number))

    return refusing


def test_a_file_system_without_locks_is_told_of(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("loopscope.checkpoints.lock.fcntl.flock", refuse(errno.ENOLCK))
    with pytest.warns(RunNotice, match="lies on a file system without locks"), run_lock(tmp_path):
        assert (tmp_path / LOCK).exists()


@pytest.mark.parametrize(("function", "number"), [("open", errno.EROFS), ("pwrite", errno.ENOSPC)])
def test_a_lock_that_cannot_be_written_is_a_sentence(function: str, number: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(f"loopscope.checkpoints.lock.os.{function}", refuse(number))
    with (
        pytest.raises(LoopscopeError, match=rf"run\.lock could not be written: {os.strerror(number)}"),
        run_lock(tmp_path),
    ):
        pass


@pytest.mark.parametrize("make", ["symlink_to", "hardlink_to"])
def test_a_link_in_the_place_of_the_lock_is_refused_and_what_it_leads_to_is_left(make: str, tmp_path: Path) -> None:
    target, folder = tmp_path / "precious", tmp_path / "run"
    target.write_text("all of it")
    folder.mkdir()
    getattr(folder / LOCK, make)(target)
    with pytest.raises(UsageError, match=r"run\.lock is a link or no plain file"), run_lock(folder):
        pass
    assert target.read_text() == "all of it"


@pytest.mark.parametrize("target", ["nowhere", "/dev/null"])
def test_a_lock_that_leads_nowhere_or_to_a_device_makes_nothing(target: str, tmp_path: Path) -> None:
    (tmp_path / LOCK).symlink_to(target)
    with pytest.raises(UsageError, match="remove it"), run_lock(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_a_pipe_in_the_place_of_the_lock_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LOCK)
    with pytest.raises(UsageError, match="no plain file"), run_lock(tmp_path):
        pass


def test_a_folder_in_the_place_of_the_lock_is_refused(tmp_path: Path) -> None:
    (tmp_path / LOCK).mkdir()
    with pytest.raises(UsageError, match="no plain file"), run_lock(tmp_path):
        pass


def test_whoever_asks_whether_the_lock_is_held_keeps_no_run_from_beginning(tmp_path: Path) -> None:
    (tmp_path / LOCK).touch()
    asking = (tmp_path / LOCK).open("rb")
    fcntl.flock(asking, fcntl.LOCK_SH)
    Timer(0.01, asking.close).start()
    with run_lock(tmp_path):
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)
