"""Metrics as a W&B run, sent by a process of its own that nothing waits for."""

import atexit
import json
import os
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from loopscope.errors import LoopscopeError, RunNotice, UsageError, require_package
from loopscope.hooks import STEP_POINTS, Alert, HookPoint, RunInfo, SinkRegistry
from loopscope.runs import ReplaySink, RunRecord
from loopscope.sinks import wandb_process

from .jsonl import JSONLSink, recorded_run
from .record import plain
from .wandb_process import Ending, Job, new_run_id

FORBIDDEN = "/\\#?%:"
LONGEST_NAME = 128
LONGEST_WAIT = 0.8  # seconds that a run waits at its end for the client
PATIENCE = 600.0  # seconds after which a client that was left alone gives up
_left_alone: list[subprocess.Popen[bytes]] = []


class Client:
    """A client process; nothing that it does or fails to do reaches the process that trains."""

    def __init__(self, run: RunRecord, record: Path, project: str | None, **options: Any) -> None:
        """Start the process, whose :class:`Job` has further ``options``; raises ``OSError`` where that fails."""
        _left_alone[:] = [process for process in _left_alone if process.poll() is None]
        folder = record.parent.absolute() / "wandb"
        folder.mkdir(exist_ok=True)
        self.log = folder / "client.log"
        job = Job(
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
        description.write_text(json.dumps(asdict(job), indent=2), encoding="utf-8")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                # -P, or sinks/csv.py would stand for the module of the standard library
                [sys.executable, "-P", wandb_process.__file__, str(description)],
                stdin=subprocess.PIPE,  # tells the end of the run, or by its own end that of this process
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal ends the run and not the sending
            )

    def end(self, ending: Ending, *, wait: float | None) -> str | None:
        """Tell the client how the run ended, wait so many seconds for it, and return the sentence that it left.

        The sentence may be empty, and is ``None`` as long as the client is not done.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        # The client may be dead; a line is far less than a pipe holds, so writing it never blocks.
        with suppress(BrokenPipeError), self.process.stdin as pipe:
            pipe.write(json.dumps(asdict(ending)).encode() + b"\n")
        try:
            self.process.wait(wait)
        except subprocess.TimeoutExpired:
            self.process.stdout.close()
            _left_alone.append(self.process)
            atexit.register(setattr, self.process, "returncode", 0)  # or Popen warns that it goes on, as it shall
            return None
        with self.process.stdout as pipe:
            os.set_blocking(pipe.fileno(), False)  # a process of W&B may still hold the other end
            return (pipe.read() or b"").decode(errors="replace").strip()


@SinkRegistry.register
class WandbSink(ReplaySink):
    """Send every metric to a W&B project, and write STRATEGY.jsonl.

    The record is the one of :class:`JSONLSink`, which need not be switched on beside; another process, which only reads
    that file, sends it. So a client that fails, hangs or has no network costs the run less than a second, and changes
    nothing in it: ``loopscope replay`` sends the record later. A resumed run goes on in its W&B run: the client sends
    those rows that W&B does not have yet. Where no W&B login is present the client works offline; WANDB_MODE is
    respected, and with ``disabled`` no client is started. The page on sinks says what W&B shows of a metric.

    Args:
        project: the project; by default it is named after the experiment.
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
        require_package("wandb", f"Sink {cls.name!r}", "wandb")

    @classmethod
    def leaves(cls, strategy: str) -> Sequence[str]:
        """Name the record and the folder of W&B."""
        return [*JSONLSink.leaves(strategy), "wandb"]

    def set_run_context(self, run: RunInfo) -> None:
        """Start the strategy's record and its client."""
        self._part("failed")
        self._record.set_run_context(run)
        self._start_client(run, new_run_id(), resumed=False)

    def position(self) -> dict[str, Any]:
        """Return the position of the record and the name by which W&B knows the run."""
        return {**self._record.position(), "run_id": self._run_id}

    def files(self) -> Sequence[Path]:
        """Name the record."""
        return self._record.files()

    def resume(self, run: RunInfo, position: Mapping[str, Any]) -> None:
        """Go on in the record, cut back to the position, and in the W&B run; without one, as before, in a new one."""
        self._part("failed")
        self._record.resume(run, position)
        self._record.flush()  # which cuts the file back, before the client reads it
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
            self._part("failed")

    def alert(self, alerts: Sequence[Alert]) -> None:
        """Append the alerts to the record of them."""
        self._record.alert(alerts)

    def flush(self) -> None:
        """Force the record onto the disk."""
        self._record.flush()

    def close(self, status: str) -> None:
        """Close the record and part from the client, after less than a second."""
        try:
            self._record.close(status)
        finally:
            self._part(status)

    def _part(self, status: str) -> None:
        """Tell the client that the run is over and the user what became of it."""
        client, self._client = self._client, None
        if client is None or self._path is None:
            return
        size = self._path.stat().st_size if self._path.exists() else None
        outcome = client.end(Ending(status, size), wait=LONGEST_WAIT)
        if outcome is None:
            outcome = f"W&B is still taking the metrics of {self._path.parent}; if it fails, {self._remedy()}."
        elif client.process.returncode:
            reason = outcome.rstrip(".") or f"exit status {client.process.returncode}"
            self._warn(f"The W&B client failed: {reason}; {client.log} has more.")
            return
        warnings.warn(outcome, RunNotice, stacklevel=2)

    def _remedy(self) -> str:
        assert self._path is not None
        project = "" if self._project is None else f" --project {shlex.quote(self._project)}"
        return f"send them with: loopscope replay {shlex.quote(str(self._path.parent))} --to wandb{project}"

    def _warn(self, sentence: str) -> None:
        warnings.warn(f"{sentence} No metric is lost; {self._remedy()}.", stacklevel=3)

    @classmethod
    def replay(cls, folder: Path, **options: str) -> Callable[[], str]:
        """Send the record of a run that is over as a new W&B run."""
        project = checked_project(options.get("project"))
        run, record, status = recorded_run(folder)
        if os.environ.get("WANDB_MODE") == "disabled":
            raise UsageError("WANDB_MODE is disabled, so nothing would be sent; unset it, or set it to offline.")

        def send() -> str:
            client = Client(run, record, project, patience=None)
            outcome = client.end(Ending(status, record.stat().st_size), wait=None) or ""
            if client.process.returncode:
                raise LoopscopeError(f"{folder} was not sent: {outcome.rstrip('.')}; {client.log} has more.")
            return outcome

        return send


def checked_project(project: str | None) -> str | None:
    """Return the name of a project; raises :class:`UsageError` for one that W&B does not take."""
    if project is not None and (not project or len(project) > LONGEST_NAME or set(FORBIDDEN) & set(project)):
        raise UsageError(
            f"{project!r} cannot be the name of a W&B project: 1 to {LONGEST_NAME} characters, none of {FORBIDDEN}; "
            "the entity is set with WANDB_ENTITY."
        )
    return project
