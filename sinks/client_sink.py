"""Sinks of tracking services: a separate process sends the metrics, and training never waits for it."""

import atexit
import json
import os
import shlex
import subprocess
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from loopscope.errors import LoopscopeError, RunNotice, warn
from loopscope.hooks import STEP_POINTS, Alert, HookPoint, MetricSink
from loopscope.optional_packages import require_package
from loopscope.runs import ReplaySink, RunRecord

from . import client_process
from .client_process import ClientTask, Ending, new_run_id
from .jsonl import JSONLSink, recorded_run
from .record import plain

if TYPE_CHECKING:
    from loopscope.hooks import RunInfo

LONGEST_WAIT = 0.8  # seconds that a run waits at its end for the client
PATIENCE = 600.0  # seconds after which an abandoned client gives up
_abandoned: list[subprocess.Popen[bytes]] = []


class Client:
    """A client process; its failures never affect the training process."""

    def __init__(self, run: RunRecord, record: Path, **options: Any) -> None:
        """Start the process with the given ``options`` of its :class:`ClientTask`; raises ``OSError`` on failure."""
        _abandoned[:] = [process for process in _abandoned if process.poll() is None]
        task = ClientTask(
            record=str(record.absolute()),
            folder=str(record.parent.absolute()),
            experiment=run.experiment,
            strategy=run.strategy,
            config=plain(run.config),
            treatments=plain(run.treatments),
            step_points=[point.name for point in STEP_POINTS],
            **options,
        )
        task.files.mkdir(exist_ok=True)
        self.log = task.files / "client.log"
        description = task.files / "client.json"
        description.write_text(json.dumps(asdict(task), indent=2), encoding="utf-8")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                # Without -P, sinks/csv.py would hide the csv module of the standard library.
                [sys.executable, "-P", client_process.__file__, str(description)],
                stdin=subprocess.PIPE,  # receives the end of the run; its end-of-file means that this process ended
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal stops the run, but not the client
            )

    def end(self, ending: Ending, *, wait: float | None) -> str | None:
        """Send the client the status of the run, wait up to ``wait`` seconds, and return its sentence.

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
            os.set_blocking(pipe.fileno(), False)  # a process of the service may keep the other end open
            return (pipe.read() or b"").decode(errors="replace").strip()


class ClientSink(ReplaySink):
    """A sink that writes STRATEGY.jsonl, which a client process reads and sends to a tracking service."""

    includes: ClassVar[tuple[str, ...]] = (JSONLSink.name,)
    title: ClassVar[str]
    """Name of the service in messages."""
    package: ClassVar[str]
    """The service's package."""
    program: ClassVar[str]
    """Path of the file with the client's function ``send(task, feed)``."""

    def __init__(self, project: str | None) -> None:
        """Create a sink for a project; ``None`` leaves the choice to the service's variables and the default."""
        self.check_installed()
        if project is not None:
            self.check_project(project)
        self._project = project
        self._record = JSONLSink()
        self._writes = True
        self._path: Path | None = None
        self._client: Client | None = None
        self._run_id = ""

    @classmethod
    @abstractmethod
    def check_project(cls, project: str) -> None:
        """Raise :class:`UsageError` for a name that the service does not accept."""

    @classmethod
    def check_enabled(cls) -> bool:
        """Return whether the service's variables allow a client."""
        return True

    @classmethod
    def new_run_id(cls) -> str:
        """Return the id of a new run."""
        return new_run_id()

    @classmethod
    def check_installed(cls) -> None:
        """Raise :class:`UsageError` if the package of the service is missing."""
        require_package(cls.package, f"Sink {cls.name!r}")

    @classmethod
    def file_names(cls, strategy: str) -> Sequence[str]:
        """Return the names of the record and of the folder for the service's files."""
        return [*JSONLSink.file_names(strategy), cls.name]

    def share_files(self, writer: MetricSink) -> None:
        """Read the record of another such sink, which comes before this one."""
        if isinstance(writer, ClientSink):
            self._record, self._writes = writer._record, False

    def set_run_context(self, run: "RunInfo") -> None:
        """Start the strategy's record and its client."""
        self._release_client("failed")
        if self._writes:
            self._record.set_run_context(run)
        self._start_client(run, self.new_run_id(), resumed=False)

    def position(self) -> dict[str, Any]:
        """Return the position of the record and the id of the service's run."""
        return {**self._record.position(), "run_id": self._run_id}

    def files(self) -> Sequence[Path]:
        """Return the path of the record."""
        return self._record.files()

    def resume(self, run: "RunInfo", position: Mapping[str, Any]) -> None:
        """Continue the record at the position, and the service's run, or start one if the position has no id."""
        self._release_client("failed")
        if self._writes:
            self._record.resume(run, position)
            self._record.flush()  # truncates the file before the client reads it
        self._start_client(run, position.get("run_id") or self.new_run_id(), resumed=True)

    def _start_client(self, run: "RunInfo", run_id: str, *, resumed: bool) -> None:
        self._run_id = run_id
        self._path = run.output_dir / f"{run.strategy}.jsonl"
        if not self.check_enabled():
            return
        options = self._options(self._project) | {"patience": PATIENCE, "run_id": run_id, "resumed": resumed}
        try:
            self._client = Client(RunRecord.of_run(run), self._path, **options)
        except OSError as error:
            self._warn(f"The {self.title} client could not be started: {error}.")

    @classmethod
    def _options(cls, project: str | None) -> dict[str, Any]:
        return {"project": project, "program": cls.program, "service": cls.name, "title": cls.title}

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: HookPoint, *, step: int) -> None:
        """Append one line to the record."""
        if self._writes:
            self._record.emit(metrics, epoch, hook_point, step=step)
        if self._client is not None and self._client.process.poll() is not None:
            self._release_client("failed")

    def alert(self, alerts: Sequence[Alert]) -> None:
        """Append the alerts to the file of alerts."""
        if self._writes:
            self._record.alert(alerts)

    def flush(self) -> None:
        """Force the record onto the disk."""
        self._record.flush()

    def close(self, status: str) -> None:
        """Close the record and release the client within a second."""
        try:
            if self._writes:
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
                f"The {self.title} client is still sending the metrics of {self._path.parent}; "
                f"if it fails, {self._remedy()}."
            )
        elif client.process.returncode:
            reason = outcome.rstrip(".") or f"exit status {client.process.returncode}"
            self._warn(f"The {self.title} client failed: {reason}; see {client.log}.")
            return
        warn(outcome, RunNotice, stacklevel=2)

    def _remedy(self) -> str:
        assert self._path is not None
        project = "" if self._project is None else f" --{self.option} {shlex.quote(self._project)}"
        folder = shlex.quote(str(self._path.parent))
        return f"send them with: loopscope replay {folder} --to {self.name}{project}"

    def _warn(self, sentence: str) -> None:
        warn(f"{sentence} No metric is lost; {self._remedy()}.", stacklevel=3)

    @classmethod
    def replay(cls, folder: Path, **options: str) -> Callable[[], str]:
        """Send the record of a finished run as a new run of the service."""
        project = options.get(cls.option or "")
        if project is not None:
            cls.check_project(project)
        run, record, status = recorded_run(folder)

        def send() -> str:
            client = Client(run, record, **cls._options(project), run_id=cls.new_run_id(), patience=None)
            outcome = client.end(Ending(status, record.stat().st_size), wait=None) or ""
            if client.process.returncode:
                raise LoopscopeError(f"{folder} was not sent: {outcome.rstrip('.')}; see {client.log}.")
            return outcome

        return send
