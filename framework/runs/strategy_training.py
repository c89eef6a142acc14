"""Training of one strategy of an experiment: a run with evaluations, checkpoints and final weights."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
)
from ..data import Batch, Loader, RowNumbers, fingerprint, first_batch, global_batches
from ..errors import (
    HookError,
    LoopscopeError,
    StateMutationError,
    UsageError,
    notice,
    short_path,
    this_command,
    with_lines,
)
from ..isolation import borrowed_extras
from ..loops import Pauses, epoch_loop, step_loop
from ..option_words import option_text
from ..state.settings import explain_nondeterminism
from ..training import check_metric
from .checks import as_experiment_fault, check_numbers
from .records import RunRecord
from .resume import ResumedRun, checkpoint_errors, refuse_other_data
from .run import Run, attempt
from .runner import ExperimentRunner
from .summaries import status_after


@dataclass
class StrategyTraining:
    """Trains one strategy in the loop of its experiment; the :class:`.Run` holds folder, record and hooks."""

    run: Run
    runner: ExperimentRunner[Any]
    plan: CheckpointPlan
    signals: Signals
    """The signals received since the session started."""
    resumed: Checkpoint | None = None
    """The checkpoint that the run resumes from."""
    reference: Path | None = None
    """The file of the weights that its hooks measure against."""
    _is_trained: bool = False

    def __post_init__(self) -> None:
        """Create the checkpoint writer; all ranks write into the folder of the main one."""
        run = self.run
        self.manager, self.folder = manager, folder = run.manager, run.folder
        self.task, self.state, ranks = manager.task, manager.state, manager.task.ranks
        self._shared_folder = shared = Path(ranks.gather(str(folder.checkpoints.absolute()))[0])
        self._arrangement = {"ranks": ranks.arrangement(self.task.model)} if ranks.are_many else {}
        numbers = RowNumbers(global_batches(self.task.loader))
        self._digests = DigestLog(folder.path, manager, self.plan.digest_every, numbers)
        self._rows = RowLog(folder.path, manager, numbers)
        writer = CheckpointWriter(shared if ranks.are_many else folder.checkpoints, self.plan.keep, ranks)
        self._checkpointing = Checkpointing(
            manager, writer, self.plan, self.signals, describe=self._describe, digests=self._digests, rows=self._rows
        )
        if self.resumed is not None:
            self.resume_from(self.resumed)

    def resume_from(self, checkpoint: Checkpoint) -> None:
        """Start from a checkpoint; called before the training."""
        self.resumed, self.run.earlier = checkpoint, ResumedRun(checkpoint)

    def train(self) -> dict[str, Any]:
        """Train, write final weights and summary, and return the summary.

        After an error sinks are closed and the summary is written before the error is raised again. An error at the
        start, such as that of a hook that refuses the model, leaves the folder unchanged.
        """
        run, manager = self.run, self.manager
        try:
            self._start()
            try:
                if self.resumed is None:
                    run.start_sinks()
                    run.initial = self._evaluate()
                    check_numbers(self.runner, run.initial)
                self._train()
                manager.end("completed")
                final = self._evaluate()
                sample = manager.in_eval_mode("sample", self.runner.sample)
                self._write_weights()
            except StateMutationError as error:
                manager.hooks.disable_all()
                fatal = StateMutationError(f"{error} {self._last_checkpoint()}").with_traceback(error.__traceback__)
                self._fail("failed", fatal)
                raise fatal from error
            except HookError as error:
                if self._is_trained:
                    attempt(partial(self._checkpointing.take, wait=True))
                self._fail("failed", error)
                raise
            except BaseException as error:
                if (fault := as_experiment_fault(error)) and self._has_just_begun():
                    self._discard()
                    raise fault from error.__cause__ if fault is error else error
                self._fail(status_after(error), error)
                if isinstance(error, SystemExit):  # otherwise the command would end with its status, which may be 0
                    sentence = f"The experiment's code called sys.exit({error.code!r}) at step {self.state.loop.step}"
                    advice = "to end a run early, return True from should_stop"
                    raise LoopscopeError(f"{sentence} ({with_lines(error)}); {advice}.") from error
                raise
            return run.summarise("completed", None, final, sample)
        finally:
            run.release()

    def _start(self) -> None:
        """Lock the folder, and start or resume the hooks."""
        run = self.run
        with run.undone_after_errors():
            for check in (run.enter_folder, self._require_shared_folder, self._refuse_other_data):
                self.task.ranks.call_on_all(check)
            with checkpoint_errors(self.resumed, self.state.loop):
                check_evaluation = partial(check_metric, self.task, self._evaluate)
                run.start_hooks(self._check_storable, check_evaluation, self._check_first_batch)
                if self.resumed is not None:
                    self.manager.disable_dropped_hooks()
                    run.start_sinks()
                    self._continue_files(self.resumed.manifest)
        if self.resumed is None:
            self.claim()

    def _continue_files(self, manifest: Mapping[str, Any]) -> None:
        """Remove what the interrupted run wrote after its checkpoint."""
        self._rows.truncate_to(self.state.loop)
        if position := manifest.get("digests"):
            self._digests.truncate_to(position)
        self.run.initial = dict(manifest["initial"])

    def record_rows(self) -> RunRecord:
        """Add the description of the data's rows to the record, and return the record."""
        loader = global_batches(self.task.loader)
        with self.state.streams.preserved():
            rows = fingerprint(loader, partial(self._first_batch, loader)) if isinstance(loader, Loader) else {}
        self.run.record = replace(self.run.record, rows=rows)
        return self.run.record

    def _refuse_other_data(self) -> None:
        """Raise :class:`UsageError` if a run would resume with other data."""
        current = self.record_rows()
        if self.resumed is not None:
            earlier = RunRecord.of(self.resumed.manifest, self.resumed.folder / MANIFEST)
            refuse_other_data(self.folder.path, earlier, current)

    def claim(self) -> None:
        """Remove an earlier run from the folder, and write the record."""
        self.run.claim(self.reference, self.runner.describe_data())

    def retrain(self, pauses: Pauses, *, recorded: bool = False) -> None:
        """Train an earlier run again, from its start or a checkpoint, without writing checkpoints.

        If ``recorded``, sinks receive the metrics, and a summary is written.
        """
        run = self.run
        run.start_hooks()
        if recorded:
            self.manager.delivery.start(run.info)
        error: BaseException | None = None
        status = "completed"
        try:
            self._loop(pauses)
        except BaseException as raised:
            status, error = status_after(raised), explain_nondeterminism(raised)
            raise
        finally:
            if recorded:
                run.end(status, error)
            else:
                self.manager.end(status)

    def _require_shared_folder(self) -> None:
        """Raise :class:`UsageError` if checkpoints are scheduled and this rank cannot write to their folder."""
        folder = self._shared_folder.parent
        if self.plan.writes and not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            raise UsageError(
                f"Process {self.task.ranks.rank_and_count[0]} cannot write to {folder}, the folder of the first "
                "process; checkpoints of several processes need an output folder that all of them share."
            )

    def _check_first_batch(self) -> None:
        """Raise an error if a hook of a new run that is rolled back refuses the first batch."""
        if self.resumed is None and self.manager.hooks.rolled_back_hook:
            loader = self.task.loader
            batch = self.manager.in_eval_mode("first batch", lambda _: self._first_batch(loader))
            self.manager.hooks.check_first_batch(batch)

    def _check_storable(self) -> None:
        """Raise :class:`UsageError` if scheduled checkpoints cannot store the state; without a schedule only warn."""
        sentences = RunState(self.manager).storage_errors()
        if sentences and self.plan.writes:
            raise UsageError(sentences[0])
        if sentences:
            notice(f"No checkpoint can be written when a signal or a failing hook requests one. {sentences[0]}")

    def _train(self) -> None:
        self.run.begin_training()
        try:
            with self.signals.deferred(), checkpoint_errors(self.resumed, self.state.loop):
                self._loop(self._checkpointing)
                self._is_trained = True
        finally:
            self.run.training_ended_at = perf_counter()
            self._checkpointing.finish()

    def _loop(self, pauses: Pauses) -> None:
        loop = epoch_loop if self.manager.counts_epochs else step_loop
        loop(self.task, self.manager, progress=self.run.show_progress(), pauses=pauses)

    def _describe(self) -> dict[str, Any]:
        """Return the manifest entries of a checkpoint that is written now."""
        record = self.run.record
        if self.task.ranks.is_main:
            attempt(partial(self.folder.write_missing_record, record))
        loop = self.state.loop
        return {
            **vars(record),
            **self._arrangement,
            "epoch": loop.epoch,
            "step": loop.step,
            "evaluation": loop.evaluation,
            "score": loop.evaluation.get(self.runner.best_metric),
            "initial": self.run.initial,
        }

    def _evaluate(self) -> dict[str, float]:
        return self.manager.in_eval_mode("evaluation", self.task.evaluate)

    def _first_batch(self, loader: Loader) -> Batch:
        with borrowed_extras(self.state):  # an experiment's loader may change the experiment's state
            return first_batch(loader)

    def _has_just_begun(self) -> bool:
        """Return whether the run has no checkpoint and has not trained beyond its first evaluation."""
        done = self.state.loop.epoch + 1 if self.manager.counts_epochs else self.state.loop.step
        return done <= max(1, self.task.eval_every) and self.folder.newest_checkpoint() is None

    def _discard(self) -> None:
        """Remove the files of a run that has just begun, after a fault of its experiment."""
        attempt(partial(self.manager.end, "failed"))
        attempt(partial(self.folder.claim, self.folder.reference))
        self.run.release()
        self.folder.remove_created()

    def _write_weights(self) -> None:
        """Write the final weights; raise :class:`LoopscopeError`, with advice, if the disk refuses them."""
        try:
            self.folder.write_weights(self.task.model)
        except LoopscopeError as error:
            lost = "Training was completed, but the final weights were not written."
            raise LoopscopeError(f"{error} {lost} {self._last_checkpoint()} {self._resume_advice()}") from error

    def _fail(self, status: str, error: BaseException) -> None:
        """End the run after an error, and say from where it can be resumed."""
        attempt(partial(self.run.end, status, explain_nondeterminism(error)))
        if self.folder.newest_checkpoint() is not None:
            notice(f"{self._last_checkpoint()} {self._resume_advice()}")

    def _resume_advice(self) -> str:
        if self.folder.newest_checkpoint() is None:
            return f"Restart the run with {option_text('overwrite', True)}, or in another {option_text('output_dir')}."
        if not self.run.record.options:
            return "To resume from it, start the same program with resume=True in its RunOptions."
        return f"To resume from it: {this_command('resume', short_path(self.folder.path))}"

    def _last_checkpoint(self) -> str:
        newest = self.folder.newest_checkpoint()
        return f"The last intact checkpoint is {newest}." if newest else "No checkpoint was written."
