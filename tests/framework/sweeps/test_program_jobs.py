"""The process of a job: first and later starts, completed runs, and the signal of the scheduler."""

import signal
import socket
import sys
from pathlib import Path

import pytest
from loopscope.checkpoints import Signals, StoppedError
from loopscope.sweeps import CommandJob, JobRecord, ProgramJob, read_job

PROGRAM = """
import json, os, sys
from pathlib import Path
folder, status = Path(sys.argv[1]), int(sys.argv[2])
with (folder / "calls").open("a") as file:
    file.write(f"{sys.argv[3]} {os.environ.get('MARK')}\\n")
if status == 0:
    (folder / "summary.json").write_text(json.dumps({"status": "completed"}))
sys.exit(status)
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that makes a job of a program which ends with a status."""
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "local")
    monkeypatch.setenv("SUBMITIT_LOCAL_JOB_ID", "12")
    monkeypatch.setenv("SUBMITIT_FOLDER", str(tmp_path / "logs"))
    monkeypatch.setattr(sys, "argv", ["submitit"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    handlers = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
    }
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    folder = tmp_path / "run"

    def make(status: int) -> ProgramJob:
        words = [str(folder), str(status)]
        return ProgramJob([str(program)], [*words, "first"], [*words, "again"], folder, {"MARK": "set"})

    monkeypatch.setenv("MARK", "")
    yield make
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_signals_before_the_run_requeue_the_job(job) -> None:
    """A program that has not started its run, for example while torch is imported, is ended and requeued."""
    received = []
    signal.signal(signal.SIGUSR2, lambda number, frame: received.append(number))
    early = job(0)
    Path(early.program[0]).write_text("import signal\nsignal.raise_signal(signal.SIGUSR2)")
    with pytest.raises(Exception, match="ended with status 140"):
        early()
    assert received == [signal.SIGUSR2]


@pytest.mark.process
def test_commands_end_before_their_job_is_requeued(job, tmp_path: Path) -> None:
    """The command gets SIGTERM, and the requeued job starts it again with the other words; variables are set."""
    received = []
    signal.signal(signal.SIGUSR2, lambda number, frame: received.append(number))
    folder = tmp_path / "run"
    first = ["sh", "-c", f"echo first $MARK >> {folder}/calls; kill -USR2 $PPID; exec sleep 60"]
    again = ["sh", "-c", f"echo again $MARK >> {folder}/calls"]
    command = CommandJob(first, again, folder, {"MARK": "set", "OTHER": None})
    with pytest.raises(Exception, match="ended with status -15"):
        command()
    assert received == [signal.SIGUSR2]
    command.checkpoint().function()
    assert calls(job(0)) == ["first set", "again set"]


def calls(job: ProgramJob) -> list[str]:
    return (job.folder / "calls").read_text().splitlines()


def test_requeued_jobs_resume_until_complete(job) -> None:
    """A job that was started before uses the words that resume, and never trains a completed run."""
    with pytest.raises(Exception, match="ended with status 3"):
        job(3)()
    assert read_job(job(3).folder) == JobRecord("12", "local", socket.gethostname(), read_job(job(3).folder).logs, True)
    assert job(0)() == "completed"
    assert job(0)() == "completed"
    assert calls(job(0)) == ["first set", "again set"]


def test_another_job_starts_with_its_first_words(job) -> None:
    """The record of an earlier job in the folder is replaced."""
    job(0).folder.mkdir()
    JobRecord("11", "local", "host", "logs", started=True).write(job(0).folder)
    job(0)()
    assert calls(job(0)) == ["first set"]
    assert read_job(job(0).folder).id == "12"


def test_signals_of_the_scheduler_requeue_the_job(job) -> None:
    """After the status of the signal, the handler of submitit gets the signal."""
    received = []
    signal.signal(signal.SIGUSR2, lambda number, frame: received.append(number))
    with pytest.raises(Exception, match="ended with status 140"):
        job(128 + signal.SIGUSR2)()
    assert received == [signal.SIGUSR2]
    assert job(0).checkpoint().function == job(0)


def ended(signals: Signals) -> None:
    """Send signals while a step is in progress, and then once more."""
    with signals.interruptible():
        with signals.deferred():
            for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGUSR2):
                signal.raise_signal(number)
        signal.raise_signal(signal.SIGUSR2)


def test_jobs_choose_what_signals_do() -> None:
    """A signal may request a checkpoint where another one ends the run, also while no step is in progress."""
    signals = Signals((signal.SIGUSR2,), (signal.SIGTERM,))
    with pytest.raises(StoppedError) as error:
        ended(signals)
    assert signals.checkpoint_requested
    assert (signals.stop, error.value.number) == (signal.SIGUSR2, signal.SIGUSR2)
