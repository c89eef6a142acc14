"""``--on local`` end to end: killed workers, a killed command and a time limit leave the bytes of other runs."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT

PATIENCE = 240  # seconds; on a busy machine the import of torch alone takes many
PROGRAM = [sys.executable, "-m", "tests.framework.cli.troubled", "run", "small", "--hooks", "trouble", "norms"]
WORDS = ["--strategy", "plain", "--seeds", "0-2", "--epochs", "30", "--save-checkpoints", "5"]
FILES = ("plain.jsonl", "plain_final.pt", "digests.jsonl")

pytestmark = [pytest.mark.slow, pytest.mark.process]


def begun(folder: Path, *words: str) -> "subprocess.Popen[str]":
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [*PROGRAM, *WORDS, *words, "--output-dir", str(folder)]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, **piped)


def finished(folder: Path, *words: str) -> tuple[int, str]:
    process = begun(folder, *words)
    output, _ = process.communicate(timeout=PATIENCE)
    return process.returncode, output


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Return the bytes of runs without jobs."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert finished(folder, "--silent")[0] == 0
    return contents(folder)


def contents(folder: Path) -> list[bytes]:
    return [(folder / f"small/plain/seed-{seed}/{file}").read_bytes() for seed in range(3) for file in FILES]


def is_training(run: Path) -> bool:
    return (run / "run.lock").exists() and (run / "checkpoints").is_dir()


def worker(run: Path) -> int:
    return json.loads((run / "run.lock").read_text())["pid"]


def test_killed_jobs_end_with_the_same_bytes(tmp_path: Path, uninterrupted: list[bytes]) -> None:
    """One worker is killed, one is preempted, and the command is killed and asked again; then nothing is left to do."""
    words = ["--trouble.seconds", "0.3", "--on", "local", "--jobs", "2"]
    runs = [tmp_path / f"small/plain/seed-{seed}" for seed in range(3)]
    command = begun(tmp_path, *words)
    wait_for(lambda: is_training(runs[0]) and is_training(runs[1]))
    os.kill(worker(runs[0]), signal.SIGKILL)
    os.kill(worker(runs[1]), signal.SIGUSR2)
    command.kill()
    command.communicate()
    status, output = finished(tmp_path, *words)
    assert status == 0, output
    assert contents(tmp_path) == uninterrupted
    ended = [(run / "summary.json").stat().st_mtime_ns for run in runs]
    assert finished(tmp_path, *words)[0] == 0
    assert [(run / "summary.json").stat().st_mtime_ns for run in runs] == ended
    logs = "".join(path.read_text() for path in (tmp_path / "small/submitit-jobs").glob("*_log.out"))
    assert logs.count("Requeued job") == 1


def test_jobs_at_their_time_limit_continue(tmp_path: Path, uninterrupted: list[bytes]) -> None:
    """A limit of a minute sends the signal after 30 seconds, before the end of each run."""
    words = ["--trouble.seconds", "1.1", "--on", "local", "--jobs", "3", "--on-options", "time=1"]
    status, output = finished(tmp_path, *words)
    assert status == 0, output
    assert contents(tmp_path) == uninterrupted
    logs = "".join(path.read_text() for path in (tmp_path / "small/submitit-jobs").glob("*_log.out"))
    assert logs.count("Requeued job") == 3


def test_failed_jobs_are_named_with_their_reason(tmp_path: Path) -> None:
    """The command ends with status 1 after the other runs, and names the run, the reason and the log."""
    words = ["--trouble.raises", "0", "--trouble.kills", "2", "--on", "local", "--jobs", "3"]
    status, output = finished(tmp_path, *words)
    last = output.splitlines()[-1]
    assert status == 1
    assert last.startswith("loopscope: 2 of 3 runs did not complete; the same command resumes them. plain seed-")
    assert f"plain seed-0, in {tmp_path}/small/plain/seed-0: Hook 'trouble' raised at POST_EPOCH" in last
    assert f"plain seed-2, in {tmp_path}/small/plain/seed-2: job " in last
