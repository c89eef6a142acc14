"""Metrics as a W&B run, sent by a process of its own."""

import os
import shlex
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from loopscope.errors import LoopscopeError, RunNotice, UsageError, require_package
from loopscope.hooks import HookPoint, RunInfo, SinkRegistry
from loopscope.runs import ReplaySink, RunRecord
from loopscope.sinks import wandb_client

from .jsonl import JSONLSink
from .recorded_run import RecordedRun
from .wandb_client import Client, job_of
from .wandb_process import Ending, new_run_id

FORBIDDEN = "/\\#?%:"
LONGEST_NAME = 128


@SinkRegistry.register
class WandbSink(ReplaySink):
    """Send every metric to a W&B project, and write STRATEGY.jsonl.

    The record is written as :class:`JSONLSink` does, which need not be switched on beside; another process, which only
    reads that file, sends it. So a client that fails, hangs or has no network costs the run less than a second, and
    changes nothing in it: ``loopscope replay`` sends the record later. Where no W&B login is present the client works
    offline; WANDB_MODE is respected, and with ``disabled`` no client is started.

    A resumed run goes on in its W&B run: the client sends those rows of the record that W&B does not have yet.

    One W&B run per strategy, in the group of the experiment, with its configuration, the treatments in ``config`` and
    as tags, and ``step`` as the axis of every metric. Dicts are ``metric/key``, lists histograms; a series has every
    value at its step and is summed up as ``metric/mean`` and ``metric/histogram``.

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
        self._run_id = new_run_id()
        self._start_client(run, resumed=False)

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
        self._run_id = position.get("run_id") or new_run_id()
        self._start_client(run, resumed=True)

    def _start_client(self, run: RunInfo, *, resumed: bool) -> None:
        self._path = run.output_dir / f"{run.strategy}.jsonl"
        if _is_disabled():
            return
        try:
            job = job_of(RunRecord.of_run(run), self._path, self._project, patience=wandb_client.PATIENCE)
            self._client = Client(replace(job, run_id=self._run_id, resumed=resumed))
        except OSError as error:
            self._warn(f"The W&B client could not be started: {error}.")

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: HookPoint, *, step: int) -> None:
        """Append one line to the record."""
        self._record.emit(metrics, epoch, hook_point, step=step)
        if self._client is not None and self._client.exit_status is not None:
            self._part("failed")

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
        if not client.end(Ending(status, size), wait=wandb_client.LONGEST_WAIT):
            self._notice(f"W&B is still taking the metrics of {self._path.parent}; if it fails, {self._remedy()}.")
            return
        outcome = client.outcome()
        if client.exit_status:
            reason = outcome.rstrip(".") or f"exit status {client.exit_status}"
            self._warn(f"The W&B client failed: {reason}; {client.log} has more.")
        else:
            self._notice(outcome)

    def _remedy(self) -> str:
        assert self._path is not None
        project = "" if self._project is None else f" --project {shlex.quote(self._project)}"
        return f"send them with: loopscope replay {shlex.quote(str(self._path.parent))} --to wandb{project}"

    def _notice(self, sentence: str) -> None:
        warnings.warn(sentence, RunNotice, stacklevel=3)

    def _warn(self, sentence: str) -> None:
        remedy = self._remedy()
        warnings.warn(f"{sentence} No metric is lost; {remedy}.", stacklevel=3)

    @classmethod
    def replay(cls, folder: Path, **options: str) -> Callable[[], str]:
        """Send the record of a run that is over as a new W&B run."""
        project = checked_project(options.get("project"))
        recorded = RecordedRun.read(folder)
        if _is_disabled():
            raise UsageError("WANDB_MODE is disabled, so nothing would be sent; unset it, or set it to offline.")

        def send() -> str:
            client = Client(job_of(recorded.run, recorded.record, project, patience=None))
            client.end(Ending(recorded.status, recorded.record.stat().st_size), wait=None)
            outcome = client.outcome()
            if client.exit_status:
                raise LoopscopeError(f"{folder} was not sent: {outcome.rstrip('.')}; {client.log} has more.")
            return outcome

        return send


def _is_disabled() -> bool:
    return os.environ.get("WANDB_MODE") == "disabled"


def checked_project(project: str | None) -> str | None:
    """Return the name of a project; raises :class:`UsageError` for one that W&B does not take."""
    if project is not None and (not project or len(project) > LONGEST_NAME or set(FORBIDDEN) & set(project)):
        raise UsageError(
            f"{project!r} cannot be the name of a W&B project: 1 to {LONGEST_NAME} characters, none of {FORBIDDEN}; "
            "the entity is set with WANDB_ENTITY."
        )
    return project
