"""W&B sink: a separate process sends the metrics, and training never waits for it."""

import atexit
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from loopscope.errors import LoopscopeError, RunNotice, UsageError, warn
from loopscope.hooks import STEP_POINTS, Alert, HookPoint, RunInfo, SinkRegistry
from loopscope.optional_packages import require_package
from loopscope.runs import ReplaySink, RunRecord
from loopscope.sinks import wandb_process

from .jsonl import JSONLSink, recorded_run
from .record import plain
from .wandb_process import Ending, WandbTask, new_run_id

FORBIDDEN = "/\\#?%:"
LONGEST_NAME = 128
LONGEST_WAIT = 0.8  # seconds that a run waits at its end for the client
PATIENCE = 600.0  # seconds after which an abandoned client gives up
_abandoned: list[subprocess.Popen[bytes]] = []


class Client:
    """A client process; its failures never affect the training process."""

    def __init__(self, run: RunRecord, record: Path, project: str | None, **options: Any) -> None:
        """Start the process with the given ``options`` of its :class:`WandbTask`; raises ``OSError`` on failure."""
        _abandoned[:] = [process for process in _abandoned if process.poll() is None]
        folder = record.parent.absolute() / "wandb"
        folder.mkdir(exist_ok=True)
        self.log = folder / "client.log"
        task = WandbTask(
            record=str(record.absolute()),
            folder=str(folder.parent),
            project=project or run.experiment,
            experiment=run.experiment,
            strategy=run.strategy,
            config=plain(run.config),
            treatments=plain(run.treatments),
            step_points=[point.name for point in STEP_POINTS],
            **options,
        )
        description = folder / "client.json"
        description.write_text(json.dumps(asdict(task), indent=2), encoding="utf-8")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                # Without -P, sinks/csv.py would hide the csv module of the standard library.
                [sys.executable, "-P", wandb_process.__file__, str(description)],
                stdin=subprocess.PIPE,  # receives the end of the run; its end-of-file means that this process ended
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal stops the run, but not the client
            )

    def end(self, ending: Ending, *, wait: float | None) -> str | None:
        """Send the client the status of the run, wait up to ``wait`` seconds, and return its last sentence.

        The result may be empty; it is ``None`` if the client has not finished.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        # The client may have ended; a line is far smaller than a pipe's buffer, so writing never blocks.
        with suppress(BrokenPipeError), self.process.stdin as pipe:
            pipe.write(json.dumps(asdict(ending)).encode() + b"\n")
        try:
            self.process.wait(wait)
        except subprocess.TimeoutExpired:
            self.process.stdout.close()
            _abandoned.append(self.process)
            atexit.register(setattr, self.process, "returncode", 0)  # otherwise Popen warns that the process still runs
            return None
        with self.process.stdout as pipe:
            os.set_blocking(pipe.fileno(), False)  # a process of W&B may keep the other end open
            return (pipe.read() or b"").decode(errors="replace").strip()


@SinkRegistry.register
class WandbSink(ReplaySink):
    """Send every metric to a W&B project, and write STRATEGY.jsonl.

    The sink includes :class:`JSONLSink`; another process reads that file and sends it. Therefore a client that fails,
    hangs or has no network costs the run less than a second and does not change it; ``loopscope replay`` can send the
    record later. A resumed run continues its W&B run: the client sends only the rows that W&B does not have yet.
    Without a W&B login the client works offline. WANDB_MODE is respected; with ``disabled`` no client is started. The
    page on sinks describes how W&B shows a metric.

    Args:
        project: the project; by default the name of the experiment.
    """

    name: ClassVar[str] = "wandb"
    flag: ClassVar[str | None] = "--hook-wandb"
    option: ClassVar[str | None] = "project"
    includes: ClassVar[tuple[str, ...]] = (JSONLSink.name,)

    def __init__(self, *, project: str | None = None) -> None:
        self.check_installed()
        self._project = checked_project(project)
        self._record = JSONLSink()
        self._path: Path | None = None
        self._client: Client | None = None
        self._run_id = ""

    @classmethod
    def check_installed(cls) -> None:
        """Raise :class:`UsageError` if wandb is missing."""
        require_package("wandb", f"Sink {cls.name!r}")

    @classmethod
    def leaves(cls, strategy: str) -> Sequence[str]:
        """Return the names of the record and of W&B's folder."""
        return [*JSONLSink.leaves(strategy), "wandb"]

    def set_run_context(self, run: RunInfo) -> None:
        """Start the strategy's record and its client."""
        self._release_client("failed")
        self._record.set_run_context(run)
        self._start_client(run, new_run_id(), resumed=False)

    def position(self) -> dict[str, Any]:
        """Return the position of the record and the id of the W&B run."""
        return {**self._record.position(), "run_id": self._run_id}

    def files(self) -> Sequence[Path]:
        """Return the path of the record."""
        return self._record.files()

    def resume(self, run: RunInfo, position: Mapping[str, Any]) -> None:
        """Continue the record at the position, and the W&B run; without an id in the position, start a new W&B run."""
        self._release_client("failed")
        self._record.resume(run, position)
        self._record.flush()  # truncates the file before the client reads it
        self._start_client(run, position.get("run_id") or new_run_id(), resumed=True)

    def _start_client(self, run: RunInfo, run_id: str, *, resumed: bool) -> None:
        self._run_id = run_id
        self._path = run.output_dir / f"{run.strategy}.jsonl"
        if os.environ.get("WANDB_MODE") == "disabled":
            return
        options = {"patience": PATIENCE, "run_id": run_id, "resumed": resumed}
        try:
            self._client = Client(RunRecord.of_run(run), self._path, self._project, **options)
        except OSError as error:
            self._warn(f"The W&B client could not be started: {error}.")

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: HookPoint, *, step: int) -> None:
        """Append one line to the record."""
        self._record.emit(metrics, epoch, hook_point, step=step)
        if self._client is not None and self._client.process.poll() is not None:
            self._release_client("failed")

    def alert(self, alerts: Sequence[Alert]) -> None:
        """Append the alerts to the file of alerts."""
        self._record.alert(alerts)

    def flush(self) -> None:
        """Force the record onto the disk."""
        self._record.flush()

    def close(self, status: str) -> None:
        """Close the record and release the client within a second."""
        try:
            self._record.close(status)
        finally:
            self._release_client(status)

    def _release_client(self, status: str) -> None:
        """Send the client the status of the run, and report the result to the user."""
        client, self._client = self._client, None
        if client is None or self._path is None:
            return
        size = self._path.stat().st_size if self._path.exists() else None
        outcome = client.end(Ending(status, size), wait=LONGEST_WAIT)
        if outcome is None:
            outcome = (
                f"The W&B client is still sending the metrics of {self._path.parent}; if it fails, {self._remedy()}."
            )
        elif client.process.returncode:
            reason = outcome.rstrip(".") or f"exit status {client.process.returncode}"
            self._warn(f"The W&B client failed: {reason}; see {client.log}.")
            return
        warn(outcome, RunNotice, stacklevel=2)

    def _remedy(self) -> str:
        assert self._path is not None
        project = "" if self._project is None else f" --project {shlex.quote(self._project)}"
        return f"send them with: loopscope replay {shlex.quote(str(self._path.parent))} --to wandb{project}"

    def _warn(self, sentence: str) -> None:
        warn(f"{sentence} No metric is lost; {self._remedy()}.", stacklevel=3)

    @classmethod
    def replay(cls, folder: Path, **options: str) -> Callable[[], str]:
        """Send the record of a finished run as a new W&B run."""
        project = checked_project(options.get("project"))
        run, record, status = recorded_run(folder)
        if os.environ.get("WANDB_MODE") == "disabled":
            raise UsageError("WANDB_MODE is disabled, so nothing would be sent; unset it or set it to offline.")

        def send() -> str:
            client = Client(run, record, project, patience=None)
            outcome = client.end(Ending(status, record.stat().st_size), wait=None) or ""
            if client.process.returncode:
                raise LoopscopeError(f"{folder} was not sent: {outcome.rstrip('.')}; see {client.log}.")
            return outcome

        return send


def checked_project(project: str | None) -> str | None:
    """Return the name of a project; raises :class:`UsageError` for a name that W&B does not accept."""
    if project is not None and (not project or len(project) > LONGEST_NAME or set(FORBIDDEN) & set(project)):
        raise UsageError(
            f"{project!r} is not a valid W&B project: use 1 to {LONGEST_NAME} characters without {FORBIDDEN}; "
            "set the entity with WANDB_ENTITY."
        )
    return project
