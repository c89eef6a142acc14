"""Records of jobs, and their states: from the queue of SLURM, and from processes of this machine."""

import os
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from loopscope.sweeps import JOB, JobRecord, read_job, states_of, submitted_jobs

QUEUE = """#!/bin/sh
echo "7_0 RUNNING"
echo "7_1 PENDING"
echo "7_2 COMPLETING"
echo "7_3 COMPLETED"
"""


def record(number: str, cluster: str = "slurm", logs: str = "logs") -> JobRecord:
    return JobRecord(number, cluster, socket.gethostname(), logs)


def test_records_are_read_as_written(tmp_path: Path) -> None:
    (tmp_path / "a" / "deep").mkdir(parents=True)
    record("7_1").write(tmp_path / "a" / "deep")
    assert submitted_jobs(tmp_path) == {tmp_path / "a/deep": record("7_1")}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"id": 7}'])
def test_damaged_records_are_no_jobs(tmp_path: Path, text: str) -> None:
    (tmp_path / JOB).write_text(text)
    assert read_job(tmp_path) is None


@pytest.mark.process
def test_states_come_from_the_queue(tmp_path: Path, monkeypatch) -> None:
    """A job that squeue does not list has ended."""
    (tmp_path / "squeue").write_text(QUEUE)
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    states = states_of([record(f"7_{task}") for task in range(5)])
    assert [*states.values()] == ["running", "pending", "running", "ended", "ended"]


@pytest.mark.process
def test_states_without_a_queue_are_unknown(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert states_of([record("7_0")]) == {"7_0": "unknown"}


def test_local_jobs_are_processes_of_their_logs() -> None:
    """The number of an ended process may belong to another program."""
    mine = record(str(os.getpid()), "local", sys.orig_argv[-1])
    assert states_of([mine])[mine.id] == "running"
    assert states_of([replace(mine, logs="/other/logs")])[mine.id] == "ended"
    assert states_of([record("4194999", "local")]) == {"4194999": "ended"}
    assert states_of([replace(mine, host="elsewhere")])[mine.id] == "unknown"
