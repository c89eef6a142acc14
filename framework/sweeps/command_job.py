"""A command of others as a job: a child process that gets the signals of the scheduler."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from .job import JobFailedError, noted_start

PATIENCE = 60  # seconds that a command has to end after SIGTERM
INTERVAL = 0.5  # seconds between two looks at the command


@dataclass(frozen=True)
class CommandJob:
    """A command whose record is in a folder.

    At the signal of the scheduler the command gets SIGTERM, and the requeued job starts it again: what it has not saved
    itself is lost.

    Args:
        words: the command in the first process of the job.
        words_again: the command in the others.
        folder: the folder of the record.
        environment: variables to set; ``None`` removes one.
    """

    words: Sequence[str]
    words_again: Sequence[str]
    folder: Path
    environment: Mapping[str, str | None] = field(default_factory=dict)

    def __call__(self) -> None:
        """Run the command.

        Raises:
            JobFailedError: if it ends with another status than 0.
            SystemExit: after the signal of the scheduler, which has been asked to start the job again.
        """
        import submitit

        here = submitit.JobEnvironment()
        is_again = noted_start(self.folder, here)
        given = {**os.environ, **self.environment}
        variables = {name: value for name, value in given.items() if value is not None}
        requeue_signal = here._usr_sig()
        requeue, stops = signal.getsignal(requeue_signal), list[int]()
        stopped_at: float | None = None

        def stop(number: int, frame: FrameType | None) -> None:
            stops.append(number)

        for number in (requeue_signal, signal.SIGTERM):  # before the command starts, so that no signal is missed
            signal.signal(number, stop)
        with subprocess.Popen(self.words_again if is_again else self.words, env=variables) as process:
            try:
                while process.poll() is None:
                    if stops and stopped_at is None:
                        process.terminate()
                        stopped_at = time.monotonic()
                    if stopped_at is not None and time.monotonic() > stopped_at + PATIENCE:
                        process.kill()
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(INTERVAL)
            finally:
                process.kill()  # so that it never outlives the job
        if requeue_signal in stops and callable(requeue):
            requeue(requeue_signal, None)
        if process.returncode:
            raise JobFailedError(f"The command of {self.folder} ended with status {process.returncode}.")

    def checkpoint(self, *arguments: Any, **options: Any) -> Any:
        """Return what the requeued job calls, when submitit asks for it."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)
