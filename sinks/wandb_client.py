"""Starts the W&B client process and parts from it, whatever it does."""

import atexit
import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from loopscope.hooks import STEP_POINTS
from loopscope.runs import RunRecord
from loopscope.sinks import wandb_process

from .record import plain
from .wandb_process import Ending, Job

LONGEST_WAIT = 0.8
"""Seconds that a run waits at its end for the client."""
PATIENCE = 600.0
"""Seconds after which a client that was left alone gives up."""
_left_alone: list[subprocess.Popen[bytes]] = []


def job_of(run: RunRecord, record: Path, project: str | None, *, patience: float | None) -> Job:
    """Describe what the client is to send; without a project it is the experiment."""
    return Job(
        record=str(record.absolute()),
        folder=str(record.parent.absolute()),
        project=project or run.experiment,
        experiment=run.experiment,
        strategy=run.strategy,
        config=plain(run.config),
        treatments=plain(run.treatments),
        step_points=[point.name for point in STEP_POINTS],
        patience=patience,
    )


class Client:
    """A client process; nothing that it does or fails to do reaches the process that trains.

    It has a session of its own, so that Ctrl-C in the terminal ends the run and not the sending, and reads the end of
    the run, or of this process, from its standard input.
    """

    def __init__(self, job: Job) -> None:
        """Start the process; raises ``OSError`` where that fails."""
        for process in list(_left_alone):
            if process.poll() is not None:
                _left_alone.remove(process)
        folder = Path(job.folder) / "wandb"
        folder.mkdir(exist_ok=True)
        self.log = folder / "client.log"
        description = folder / "client.json"
        description.write_text(json.dumps(asdict(job), indent=2), encoding="utf-8")
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", wandb_process.__file__, str(description)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )

    @property
    def exit_status(self) -> int | None:
        """The exit status of the process, ``None`` as long as it runs."""
        return self._process.poll()

    def end(self, ending: Ending, *, wait: float | None) -> bool:
        """Tell the client how the run ended, wait so many seconds for it, and return whether it is done.

        One that is not goes on alone.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # The client may be dead; a line is far less than a pipe holds, so writing it never blocks.
        with suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(json.dumps(asdict(ending)).encode() + b"\n")
        try:
            self._process.wait(wait)
        except subprocess.TimeoutExpired:
            self._process.stdout.close()
            _left_alone.append(self._process)
            atexit.register(setattr, self._process, "returncode", 0)  # or Popen warns that it goes on, as it shall
            return False
        return True

    def outcome(self) -> str:
        """Return the sentence that the client, which is done, left; empty if it left none."""
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            os.set_blocking(pipe.fileno(), False)  # a process of W&B may still hold the other end
            return (pipe.read() or b"").decode(errors="replace").strip()
