"""``--jobs``: parallel runs in separate processes, each equal to a single run and independent of failures."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from loopscope import sinks, training_hooks
from loopscope.checkpoints import checkpoint_folders, is_locked
from loopscope.cli import main

from tests.docs.markdown import ROOT
from tests.framework.cli.troubled import Trouble
from tests.framework.runs.small_experiment import Small, contents, read_json, registered

assert sinks.__all__
assert training_hooks.__all__
PATIENCE = 240  # seconds; on a busy machine the import of torch alone takes many
PROGRAM = [sys.executable, "-m", "tests.framework.cli.troubled", "run", "small", "--hooks", "trouble", "norms"]


def begun(folder: Path, *words: str) -> "subprocess.Popen[str]":
    """Start parallel runs in a process with captured output."""
    words = (*words, "--strategy", "plain", "--output-dir", str(folder))
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*PROGRAM, *words], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, **piped)


def training(folder: Path, *words: str) -> "subprocess.Popen[str]":
    """Start two slow runs, and return when both have trained an epoch."""
    process = begun(folder, *words, "--seed", "0", "1", "--jobs", "2", "--epochs", "40", "--trouble.seconds", "0.5")
    files, end = [folder / f"small/plain/seed-{seed}/plain.jsonl" for seed in (0, 1)], time.monotonic() + PATIENCE
    while not all(file.exists() and file.stat().st_size for file in files) and time.monotonic() < end:
        time.sleep(0.1)
    return process


def alone(folder: Path, *words: str) -> Path:
    with registered(Small, Trouble):
        command = ["run", "small", "--strategy", "plain", "--hooks", "trouble", "norms", "--no-console-output"]
        assert main([*command, *words, "--output-dir", str(folder)]) == 0
    return folder / "small/plain"


def rows_and_weights(run: Path) -> tuple[bytes, bytes]:
    return (run / "plain.jsonl").read_bytes(), (run / "plain_final.pt").read_bytes()


@pytest.mark.slow
@pytest.mark.process
def test_failed_runs_do_not_affect_others(tmp_path: Path) -> None:
    """The command reports the raising and the killed run, and the third run equals a single run."""
    seeds = ["--seed", "0", "1", "2", "--jobs", "3"]
    process = begun(tmp_path, *seeds, "--trouble.raises", "0", "--trouble.kills", "2")
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    runs = tmp_path / "small/plain"
    *lines, last = output.splitlines()
    assert last.startswith("loopscope: 2 of 3 runs failed. plain seed-")
    assert f"plain seed-0, in {runs}/seed-0: Hook 'trouble' raised at POST_EPOCH" in last
    assert f"plain seed-2, in {runs}/seed-2: killed by SIGKILL." in last
    assert {f"plain seed-{seed}: printed by {seed}" for seed in range(3)} <= {*lines}
    assert sum(line.startswith("plain seed-1: stopped at the limit") for line in lines) == 1
    assert read_json(runs / "seed-0/summary.json")["status"] == "failed"
    assert rows_and_weights(runs / "seed-1") == rows_and_weights(alone(tmp_path / "alone", "--seed", "1"))


@pytest.mark.slow
@pytest.mark.process
def test_ctrl_c_checkpoints_all_runs_for_resume(tmp_path, monkeypatch) -> None:
    """Each run is marked as interrupted, and a resumed one ends like an uninterrupted run."""
    process = training(tmp_path)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=PATIENCE)
    assert (process.returncode, output.splitlines()[-1]) == (130, "loopscope: Stopped by SIGINT.")
    runs = [tmp_path / f"small/plain/seed-{seed}" for seed in (0, 1)]
    assert [read_json(run / "summary.json")["status"] for run in runs] == ["interrupted"] * 2
    assert all(len([*checkpoint_folders(run / "checkpoints")]) == 1 for run in runs)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with registered(Small, Trouble):
        assert main(["resume", str(runs[1]), "--no-console-output"]) == 0
    assert rows_and_weights(runs[1]) == rows_and_weights(alone(tmp_path / "alone", "--seed", "1", "--epochs", "40"))


@pytest.mark.slow
def test_killed_command_stops_its_runs(tmp_path: Path) -> None:
    process = training(tmp_path)
    process.kill()
    process.communicate(timeout=PATIENCE)
    runs, end = [tmp_path / f"small/plain/seed-{seed}" for seed in (0, 1)], time.monotonic() + PATIENCE
    while any(map(is_locked, runs)) and time.monotonic() < end:
        time.sleep(0.1)
    assert [read_json(run / "summary.json")["status"] for run in runs] == ["interrupted"] * 2


@pytest.mark.slow
def test_refusal_of_every_run_is_reported_once(tmp_path: Path) -> None:
    """A hook that refuses every run yields one line of output and leaves no files."""
    process = begun(tmp_path, "--hooks", "fourier", "--seed", "0", "1", "--jobs", "2")
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    # A status line is printed every half minute, so on a busy machine there may be some.
    (line,) = [line for line in output.splitlines() if " of 2 runs done, " not in line]
    assert line.startswith("loopscope: Hook 'fourier'")
    assert contents(tmp_path) == {}


@pytest.mark.slow
def test_checkpoint_request_reaches_every_run(tmp_path: Path) -> None:
    """Each run writes a checkpoint on SIGUSR1, and a note explains why --live is not available."""
    process = training(tmp_path, "--live")
    runs, end = [tmp_path / f"small/plain/seed-{seed}" for seed in (0, 1)], time.monotonic() + PATIENCE
    process.send_signal(signal.SIGUSR1)
    while not all([*checkpoint_folders(run / "checkpoints")] for run in runs) and time.monotonic() < end:
        time.sleep(0.1)
    assert process.poll() is None
    assert all(map(is_locked, runs))
    assert all(len([*checkpoint_folders(run / "checkpoints")]) == 1 for run in runs)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "note: --live shows one run only; with --jobs, one line shows all runs." in output
