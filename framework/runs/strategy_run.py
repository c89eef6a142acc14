"""The run of one strategy, from the start of its hooks to its summary."""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from ..checkpoints import (
    MANIFEST,
    Checkpoint,
    Checkpointing,
    CheckpointPlan,
    CheckpointWriter,
    DigestLog,
    RowLog,
    RunState,
    Signals,
    StoppedError,
)
from ..data import Batch, Loader, RowNumbers, fingerprint, first_batch, global_batches
from ..durable_files import plain_json
from ..engine import HookManager
from ..errors import HookError, LoopscopeError, StateMutationError, UsageError, notice, this_command, with_lines
from ..hooks import RunInfo, TrainingHook
from ..isolation import borrowed_extras
from ..loops import NoProgress, Pauses, Progress, epoch_loop, step_loop
from ..state import explain_nondeterminism
from ..training import TrainingTask, check_metric
from .checks import as_experiment_fault, check_numbers
from .records import RunRecord
from .resume import checkpoint_errors, refuse_other_data, resume_run
from .run_folder import RunFolder
from .runner import ExperimentRunner
from .summaries import build_summary


class Display:
    """The display of a session; this one shows nothing."""

    def strategy_started(self, run: RunInfo, task: TrainingTask, hooks: Sequence[TrainingHook]) -> Progress:
        """Announce a strategy and return the display of its progress."""
        return NoProgress()

    def strategy_ended(self, summary: Mapping[str, Any]) -> None:
        """Show how a strategy ended."""

    def ended(self, summaries: Sequence[Mapping[str, Any]]) -> None:
        """Compare the strategies."""


@dataclass
class StrategyRun:
    """A run of one strategy, which writes to its folder after its hooks have started."""

    run_info: RunInfo
    runner: ExperimentRunner[Any]
    manager: HookManager
    folder: RunFolder
    record: RunRecord
    display: Display
    plan: CheckpointPlan
    signals: Signals
    """The signals received since the session started."""
    resumed: Checkpoint | None = None
    """The checkpoint that the run resumes from."""
    reference: Path | None = None
    """The file of the weights that its hooks measure against."""
    _started_at: float = field(default_factory=perf_counter)
    _training_seconds: float = 0.0
    _is_trained: bool = False
    _initial: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Create the checkpoint writer; all ranks write into the folder of the main one."""
        manager = self.manager
        self.task, self.state, ranks = manager.task, manager.state, manager.task.ranks
        self._shared_folder = folder = Path(ranks.gather(str(self.folder.checkpoints.absolute()))[0])
        self._arrangement = {"ranks": ranks.arrangement(self.task.model)} if ranks.are_many else {}
        numbers = RowNumbers(global_batches(self.task.loader))
        self._digests = DigestLog(self.folder.path, manager, self.plan.digest_every, numbers)
        self._rows = RowLog(self.folder.path, manager, numbers)
        writer = CheckpointWriter(folder if ranks.are_many else self.folder.checkpoints, self.plan.keep, ranks)
        self._checkpointing = Checkpointing(
            manager, writer, self.plan, self.signals, describe=self._describe, digests=self._digests, rows=self._rows
        )

    def run(self) -> dict[str, Any]:
        """Train, write final weights and summary, and return the summary.

        After an error sinks are closed and the summary is written before the error is raised again. An error at the
        start, such as that of a hook that refuses the model, leaves the folder unchanged.
        """
        with ExitStack() as contexts:
            self._start(contexts)
            try:
                if self.resumed is None:
                    self.manager.dispatch.start(self.run_info)
                    self._initial = self._evaluate()
                    check_numbers(self.runner, self._initial)
                self._train()
                self.manager.end("completed")
                final = self._evaluate()
                sample = self.manager.in_eval_mode("sample", self.runner.sample)
                self._write_weights()
            except StateMutationError as error:
                self.manager.hooks.disable_all()
                fatal = StateMutationError(f"{error} {self._last_checkpoint()}").with_traceback(error.__traceback__)
                self._fail("failed", fatal)
                raise fatal from error
            except HookError as error:
                if self._is_trained:
                    _attempt(lambda: self._checkpointing.take(wait=True))
                self._fail("failed", error)
                raise
            except BaseException as error:
                if (fault := as_experiment_fault(error)) and self._has_just_begun():
                    self._discard(contexts)
                    raise fault from error.__cause__ if fault is error else error
                self._fail(_status_after(error), error)
                if isinstance(error, SystemExit):  # otherwise the command would end with its status, which may be 0
                    sentence = f"The experiment's code called sys.exit({error.code!r}) at step {self.state.loop.step}"
                    advice = "to end a run early, return True from should_stop"
                    raise LoopscopeError(f"{sentence} ({with_lines(error)}); {advice}.") from error
                raise
            return self._summarise("completed", None, final, sample)

    def _start(self, contexts: ExitStack) -> None:
        """Lock the folder, and start or resume the hooks."""
        try:
            for check in (partial(self.folder.enter, contexts), self._require_shared_folder, self._refuse_other_data):
                self.task.ranks.call_on_all(check)
            with checkpoint_errors(self.resumed, self.state.loop):
                self._start_hooks()
        except BaseException:
            contexts.close()
            _attempt(lambda: self.manager.end("failed"))
            self.folder.remove_created()
            raise
        if self.resumed is None:
            self._claim()

    def record_rows(self) -> RunRecord:
        """Add the description of the data's rows to the record, and return the record."""
        loader = global_batches(self.task.loader)
        with self.state.streams.preserved():
            rows = fingerprint(loader, partial(self._first_batch, loader)) if isinstance(loader, Loader) else {}
        self.record = replace(self.record, rows=rows)
        return self.record

    def _refuse_other_data(self) -> None:
        """Raise :class:`UsageError` if a run would resume with other data."""
        current = self.record_rows()
        if self.resumed is not None:
            earlier = RunRecord.of(self.resumed.manifest, self.resumed.folder / MANIFEST)
            refuse_other_data(self.folder.path, earlier, current)

    def enter_new(self, contexts: ExitStack) -> None:
        """Create and lock the folder of a rewind, and write the record into it."""
        self.folder.enter(contexts)
        self._claim()

    def retrain(self, pauses: Pauses, *, recorded: bool = False) -> None:
        """Train an earlier run again, from its start or a checkpoint, without writing checkpoints.

        If ``recorded``, sinks receive the metrics, and a summary is written.
        """
        manager = self.manager
        if self.resumed is not None:
            resume_run(manager, self.resumed)
        manager.start_hooks(self.run_info)
        info = replace(self.run_info, metric_infos=manager.hooks.metric_infos())
        if recorded:
            manager.dispatch.start(info)
        error: BaseException | None = None
        status = "completed"
        try:
            self._loop(pauses)
        except BaseException as raised:
            status, error = _status_after(raised), explain_nondeterminism(raised)
            raise
        finally:
            manager.end(status)
            if recorded:
                self._summarise(status, error, dict(self.state.loop.evaluation))

    def _require_shared_folder(self) -> None:
        """Raise :class:`UsageError` if checkpoints are scheduled and this rank cannot write to their folder."""
        folder = self._shared_folder.parent
        if self.plan.writes and not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            raise UsageError(
                f"Process {self.task.ranks.rank_and_count[0]} cannot write to {folder}, the folder of the first "
                "process; checkpoints of several processes need an --output-dir that all of them share."
            )

    def _start_hooks(self) -> None:
        """Start the hooks; in a resumed run, restore the state before them and the sinks after them."""
        if self.resumed is not None:
            resume_run(self.manager, self.resumed)
        self.manager.start_hooks(self.run_info)
        self._check_storable()
        check_metric(self.task, self._evaluate)
        if self.resumed is None and self.manager.hooks.rolled_back_hook:
            loader = self.task.loader
            self.manager.hooks.check_first_batch(
                self.manager.in_eval_mode("first batch", lambda _: self._first_batch(loader))
            )
        self.run_info = replace(self.run_info, metric_infos=self.manager.hooks.metric_infos())
        if self.resumed is not None:
            self.manager.disable_dropped_hooks()
            self.manager.dispatch.start(self.run_info, self.resumed.manifest["sinks"])
            self._rows.truncate_to(self.state.loop)
            if position := self.resumed.manifest.get("digests"):
                self._digests.truncate_to(position)
            self._initial = dict(self.resumed.manifest["initial"])

    def _claim(self) -> None:
        """Remove an earlier run from the folder, and write the record."""
        reference = self.folder.claim(self.reference)
        settings = {**self.record.run, "reference": None if reference is None else str(reference)}
        self.record = replace(self.record, data=plain_json(self.runner.describe_data()), run=settings)
        self.folder.write_record(self.record)

    def _check_storable(self) -> None:
        """Raise :class:`UsageError` if scheduled checkpoints cannot store the state; without a schedule only warn."""
        sentences = RunState(self.manager).storage_errors()
        if sentences and self.plan.writes:
            raise UsageError(sentences[0])
        if sentences:
            notice(f"No checkpoint can be written when a signal or a failing hook requests one. {sentences[0]}")

    def _train(self) -> None:
        started_at = perf_counter()
        try:
            with self.signals.deferred(), checkpoint_errors(self.resumed, self.state.loop):
                self._loop(self._checkpointing)
                self._is_trained = True
        finally:
            self._training_seconds = perf_counter() - started_at
            self._checkpointing.finish()

    def _loop(self, pauses: Pauses) -> None:
        progress = self.display.strategy_started(self.run_info, self.task, [*self.manager.hooks])
        loop = epoch_loop if self.run_info.loop == "epoch" else step_loop
        loop(self.task, self.manager, progress=progress, pauses=pauses)

    def _describe(self) -> dict[str, Any]:
        """Return the manifest entries of a checkpoint that is written now."""
        if self.task.ranks.is_main:
            _attempt(lambda: self.folder.write_missing_record(self.record))
        loop = self.state.loop
        return {
            **vars(self.record),
            **self._arrangement,
            "epoch": loop.epoch,
            "step": loop.step,
            "evaluation": loop.evaluation,
            "score": loop.evaluation.get(self.runner.best_metric),
            "initial": self._initial,
        }

    def _evaluate(self) -> dict[str, float]:
        return self.manager.in_eval_mode("evaluation", self.task.evaluate)

    def _first_batch(self, loader: Loader) -> Batch:
        with borrowed_extras(self.state):  # an experiment's loader may change the experiment's state
            return first_batch(loader)

    def _has_just_begun(self) -> bool:
        """Return whether the run has no checkpoint and has not trained beyond its first evaluation."""
        done = self.state.loop.epoch + 1 if self.run_info.loop == "epoch" else self.state.loop.step
        return done <= max(1, self.task.eval_every) and self.folder.newest_checkpoint() is None

    def _discard(self, contexts: ExitStack) -> None:
        """Remove the files of a run that has just begun, after a fault of its experiment."""
        _attempt(lambda: self.manager.end("failed"))
        _attempt(lambda: self.folder.claim(self.folder.reference))
        contexts.close()
        self.folder.remove_created()

    def _write_weights(self) -> None:
        """Write the final weights; raise :class:`LoopscopeError`, with advice, if the disk refuses them."""
        try:
            self.folder.write_weights(self.task.model)
        except LoopscopeError as error:
            lost = "Training was completed, but the final weights were not written."
            raise LoopscopeError(f"{error} {lost} {self._last_checkpoint()} {self._resume_advice()}") from error

    def _fail(self, status: str, error: BaseException) -> None:
        """End hooks and sinks, and write the summary with the newest evaluation as the final one."""
        _attempt(lambda: self.manager.end(status))
        _attempt(lambda: self._summarise(status, explain_nondeterminism(error), dict(self.state.loop.evaluation)))
        if self.folder.newest_checkpoint() is not None:
            notice(f"{self._last_checkpoint()} {self._resume_advice()}")

    def _summarise(
        self, status: str, error: BaseException | None, final: dict[str, float], sample: str | None = None
    ) -> dict[str, Any]:
        """Write the summary, show it, and return it."""
        seconds = {"total": perf_counter() - self._started_at, "training": self._training_seconds}
        compared = self.runner.compared_metrics
        summary = build_summary(
            self.manager, self.record, self.folder.path, status, error, seconds, final, self._initial, compared
        )
        summary["sample"] = None if sample is None else str(sample)
        self.folder.write_summary(summary)
        self.display.strategy_ended(summary)
        return summary

    def _resume_advice(self) -> str:
        if self.folder.newest_checkpoint() is None:
            return "Restart the run with --overwrite, or in another --output-dir."
        if not self.record.options:
            return "To resume from it, start the same program with resume=True in its RunOptions."
        return f"To resume from it: {this_command('resume', str(self.folder.path))}"

    def _last_checkpoint(self) -> str:
        newest = self.folder.newest_checkpoint()
        return f"The last intact checkpoint is {newest}." if newest else "No checkpoint was written."


def _status_after(error: BaseException) -> str:
    return "interrupted" if isinstance(error, (KeyboardInterrupt, StoppedError)) else "failed"


def _attempt(action: Callable[[], object]) -> None:
    """Run a cleanup action after an error; its own error becomes a warning, so that the first error is reported."""
    try:
        action()
    except Exception as error:
        text = str(error) if isinstance(error, LoopscopeError) else f"{type(error).__name__}: {error}"
        warnings.warn(text, stacklevel=2)
