"""A run as a job: what happens in the process that a scheduler starts, also after it was preempted.

The process unpickles a job before it has done anything else, so this module does not import torch.
"""

import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from ..checkpoints import Signals
from ..durable_files import path_exists
from ..errors import LoopscopeError
from ..interruption import ignore_signal
from ..runs import SUMMARY, TRAINED, read_status
from .job_records import JobRecord, read_job


class JobFailedError(LoopscopeError):
    """The program of a job ended with another status than 0."""


@dataclass(frozen=True)
class ProgramJob:
    """A program that trains one run in the process of the job, and can be requeued.

    At the signal of the scheduler the run writes a checkpoint after the step in progress, and ends; the requeued job
    calls the program again, with the words that resume the run.

    Args:
        program: the words after ``python`` that select the program: ``-m NAME``, or its file.
        words: the words of the program in the first process of the job.
        words_again: those in the others.
        folder: the folder of the run.
        environment: variables to set; ``None`` removes one.
    """

    program: Sequence[str]
    words: Sequence[str]
    words_again: Sequence[str]
    folder: Path
    environment: Mapping[str, str | None] = field(default_factory=dict)

    def __call__(self) -> str:
        """Train the run, and return the status with which it ended; a completed run is not trained again.

        Raises:
            JobFailedError: if the program ends with another status than 0.
            SystemExit: after the signal of the scheduler, which has been asked to start the job again.
        """
        import submitit

        here = submitit.JobEnvironment()
        requeue_signal = here._usr_sig()  # the environment variable SUBMITIT_PREEMPT_SIGNAL decides it
        requeue = signal.getsignal(requeue_signal)
        is_again = noted_start(self.folder, here)
        if not (is_again and self._is_complete()):
            self._prepare(is_local=here.cluster == "local")
            signal.signal(requeue_signal, _end_program)  # until the run handles it, and after that
            status = self._run(self.words_again if is_again else self.words)
            if status == 128 + requeue_signal and callable(requeue):
                requeue(requeue_signal, None)
            if status:
                raise JobFailedError(f"The run in {self.folder} ended with status {status}.")
        return read_status(self.folder) or ""

    def checkpoint(self, *arguments: Any, **options: Any) -> Any:
        """Return what the requeued job calls, when submitit asks for it: the run is in its folder."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)

    def _is_complete(self) -> bool:
        return path_exists(self.folder / SUMMARY) and read_status(self.folder) in TRAINED

    def _prepare(self, *, is_local: bool) -> None:
        """Set variables and signals; a local job, which has no scheduler to cancel it, ends at SIGTERM."""
        for name, value in self.environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        signal.signal(signal.SIGUSR1, ignore_signal)  # outside a step, a checkpoint request must not end the process
        signal.signal(signal.SIGCONT, signal.SIG_DFL)
        if is_local:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _run(self, words: Sequence[str]) -> int:
        """Run the program in this process, and return its exit status."""
        *_, option, name = ["", *self.program]
        sys.argv = [name, *words]
        try:
            if option == "-m":
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                sys.path[0] = str(Path(name).parent)  # as Python does for a program, where it would be the folder
                runpy.run_path(name, run_name="__main__")
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        return 0


def _end_program(number: int, frame: FrameType | None) -> None:
    """End the program with the status of the signal, after which the job is requeued."""
    raise SystemExit(128 + number)


def noted_start(folder: Path, here: Any) -> bool:
    """Note in the record of a job that it has started, and return whether it had started before.

    ``here`` is the environment of the job, as submitit describes it.
    """
    earlier = read_job(folder)
    is_again = earlier is not None and earlier.id == here.job_id and earlier.started
    if earlier is None or earlier.id != here.job_id:  # the command that submits has not written it yet
        earlier = JobRecord.of_submission(here.job_id, here.cluster, Path(here.paths.folder))
    folder.mkdir(parents=True, exist_ok=True)
    replace(earlier, started=True).write(folder)
    return is_again


def job_signals() -> Signals:
    """Return the signals of a run in the process of a job: those of the scheduler end it, to be requeued.

    SLURM sends SIGTERM before it ends a job, with time for a checkpoint but not always for a requeue. A local job has
    no scheduler that could cancel it, so SIGTERM ends it.
    """
    import submitit

    here = submitit.JobEnvironment()
    is_local = here.cluster == "local"
    ending = (signal.SIGINT, *((signal.SIGTERM,) if is_local else ()), here._usr_sig())
    return Signals(ending, (signal.SIGUSR1, *(() if is_local else (signal.SIGTERM,))))
