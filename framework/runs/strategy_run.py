"""One strategy from the start of its hooks to its summary, however it ends."""

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
from ..data import Batch, Loader, RowNumbers, fingerprint, first_batch, whole_batches
from ..durable_files import plain_json
from ..errors import HookError, LoopscopeError, StateMutationError, UsageError, notice, this_command, with_lines
from ..firing import HookManager
from ..hooks import RunInfo, TrainingHook
from ..isolation import borrowed_extras
from ..loops import NoProgress, Pauses, Progress, epoch_loop, step_loop
from ..state import explained
from ..training import TrainingTask, check_metric
from .checks import blamed, check_numbers
from .records import RunRecord
from .resuming import first_step_after, refuse_other_data, resume_run
from .run_folder import RunFolder
from .runner import ExperimentRunner
from .summaries import summary_of


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
    """A run of one strategy, which writes to its folder once its hooks have started."""

    run_info: RunInfo
    runner: ExperimentRunner[Any]
    manager: HookManager
    folder: RunFolder
    record: RunRecord
    display: Display
    plan: CheckpointPlan
    signals: Signals
    """What signals asked for since the session began."""
    resumed: Checkpoint | None = None
    """The checkpoint from which it goes on."""
    reference: Path | None = None
    """The weights that its hooks measure against."""
    _begin: float = field(default_factory=perf_counter)
    _trained: float = 0.0
    _is_trained: bool = False
    _initial: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make what writes the checkpoints: into the folder of the first of several processes."""
        manager = self.manager
        self.task, self.state, ranks = manager.task, manager.state, manager.task.ranks
        self._shared = folder = Path(ranks.gather(str(self.folder.checkpoints.absolute()))[0])
        self._arrangement = {"ranks": ranks.arrangement(self.task.model)} if ranks.are_many else {}
        numbers = RowNumbers(whole_batches(self.task.loader))
        self._digests = DigestLog(self.folder.path, manager, self.plan.digest_every, numbers)
        self._rows = RowLog(self.folder.path, manager, numbers)
        writer = CheckpointWriter(folder if ranks.are_many else self.folder.checkpoints, self.plan.keep, ranks)
        self._checkpointing = Checkpointing(
            manager, writer, self.plan, self.signals, describe=self._describe, digests=self._digests, rows=self._rows
        )

    def run(self) -> dict[str, Any]:
        """Train, write final weights and summary, and return the summary.

        However it ends, sinks are closed and the summary is written; an error is raised again after that. Only an
        error at the start, such as a hook that refuses the model, leaves the folder as it was.
        """
        with ExitStack() as held:
            self._start(held)
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
                self.manager.hooks.abandon()
                fatal = StateMutationError(f"{error} {self._last_checkpoint()}").with_traceback(error.__traceback__)
                self._fail("failed", fatal)
                raise fatal from error
            except HookError as error:
                if self._is_trained:
                    _attempt(lambda: self._checkpointing.take(wait=True))
                self._fail("failed", error)
                raise
            except BaseException as error:
                if (fault := blamed(error)) and self._is_unjudged():
                    self._take_back(held)
                    raise fault from error.__cause__ if fault is error else error
                self._fail(_status_after(error), error)
                if isinstance(error, SystemExit):  # or the command would end with its status, which may be 0
                    sentence = f"Code of the experiment called sys.exit({error.code!r}) at step {self.state.loop.step}"
                    remedy = "to end a run early return True from should_stop"
                    raise LoopscopeError(f"{sentence} ({with_lines(error)}); {remedy}.") from error
                raise
            return self._summarise("completed", None, final, sample)

    def _start(self, held: ExitStack) -> None:
        """Lock the folder, and start the hooks or go on with them."""
        try:
            for step in (partial(self.folder.enter, held), self._refuse_unshared, self._refuse_other_data):
                self.task.ranks.together(step)
            with first_step_after(self.resumed, self.state.loop):
                self._start_hooks()
        except BaseException:
            held.close()
            _attempt(lambda: self.manager.end("failed"))
            self.folder.give_back()
            raise
        if self.resumed is None:
            self._claim()

    def know_rows(self) -> RunRecord:
        """Note in the record what the data are, and return it."""
        loader = whole_batches(self.task.loader)
        with self.state.streams.isolated():
            rows = fingerprint(loader, partial(self._first_batch, loader)) if isinstance(loader, Loader) else {}
        self.record = replace(self.record, rows=rows)
        return self.record

    def _refuse_other_data(self) -> None:
        """Raise :class:`UsageError` where a run would go on with other data."""
        now = self.know_rows()
        if self.resumed is not None:
            before = RunRecord.of(self.resumed.manifest, self.resumed.folder / MANIFEST)
            refuse_other_data(self.folder.path, before, now)

    def enter_anew(self, held: ExitStack) -> None:
        """Make and lock the folder, whatever checkpoint the run goes on from, and write there what is run."""
        self.folder.enter(held)
        self._claim()

    def again(self, pauses: Pauses, *, recorded: bool = False) -> None:
        """Train what was trained before, from the start or a checkpoint, and write none; sinks get it if wanted."""
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
            status, error = _status_after(raised), explained(raised)
            raise
        finally:
            manager.end(status)
            if recorded:
                self._summarise(status, error, dict(self.state.loop.evaluation))

    def _refuse_unshared(self) -> None:
        """Raise :class:`UsageError` where checkpoints are to be written into a folder that not all ranks can write."""
        folder = self._shared.parent
        if self.plan.writes and not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            raise UsageError(
                f"Process {self.task.ranks.place[0]} cannot write to {folder}, the first one's folder; checkpoints of "
                "several processes need an --output-dir that all of them share."
            )

    def _start_hooks(self) -> None:
        """Start the hooks of a run that begins; of one that goes on, put back the state before, and the sinks after."""
        if self.resumed is not None:
            resume_run(self.manager, self.resumed)
        self.manager.start_hooks(self.run_info)
        self._refuse_what_no_checkpoint_holds()
        check_metric(self.task, self._evaluate)
        if self.resumed is None and self.manager.hooks.acting:
            loader = self.task.loader
            self.manager.hooks.see_first(self.manager.in_eval_mode("first batch", lambda _: self._first_batch(loader)))
        self.run_info = replace(self.run_info, metric_infos=self.manager.hooks.metric_infos())
        if self.resumed is not None:
            self.manager.goes_on()
            self.manager.dispatch.start(self.run_info, self.resumed.manifest["sinks"])
            self._rows.truncate_to(self.state.loop)
            if position := self.resumed.manifest.get("digests"):
                self._digests.truncate_to(position)
            self._initial = dict(self.resumed.manifest["initial"])

    def _claim(self) -> None:
        """Make room in the folder, and write what is run."""
        reference = self.folder.claim(self.reference)
        of_this_run = {**self.record.run, "reference": None if reference is None else str(reference)}
        self.record = replace(self.record, data=plain_json(self.runner.describe_data()), run=of_this_run)
        self.folder.write_record(self.record)

    def _refuse_what_no_checkpoint_holds(self) -> None:
        """Raise :class:`UsageError` if checkpoints are to be written; say it where only a signal may ask for one."""
        sentences = RunState(self.manager).storage_errors()
        if sentences and self.plan.writes:
            raise UsageError(sentences[0])
        if sentences:
            notice(f"No checkpoint is written where a signal or a failing hook asks for one. {sentences[0]}")

    def _train(self) -> None:
        begin = perf_counter()
        try:
            with self.signals.deferred(), first_step_after(self.resumed, self.state.loop):
                self._loop(self._checkpointing)
                self._is_trained = True
        finally:
            self._trained = perf_counter() - begin
            self._checkpointing.finish()

    def _loop(self, pauses: Pauses) -> None:
        progress = self.display.strategy_started(self.run_info, self.task, [*self.manager.hooks])
        loop = epoch_loop if self.run_info.loop == "epoch" else step_loop
        loop(self.task, self.manager, progress=progress, pauses=pauses)

    def _describe(self) -> dict[str, Any]:
        """Return what a checkpoint that is written now says of itself."""
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
        with borrowed_extras(self.state):  # to which an experiment's own loader may write
            return first_batch(loader)

    def _is_unjudged(self) -> bool:
        """Return whether the run has just begun: without a checkpoint, and at most its first evaluation behind it."""
        done = self.state.loop.epoch + 1 if self.run_info.loop == "epoch" else self.state.loop.step
        return done <= max(1, self.task.eval_every) and self.folder.newest_checkpoint() is None

    def _take_back(self, held: ExitStack) -> None:
        """Remove what was written of a run that has just begun, since its experiment turns out to be unfit."""
        _attempt(lambda: self.manager.end("failed"))
        _attempt(lambda: self.folder.claim(self.folder.reference))
        held.close()
        self.folder.give_back()

    def _write_weights(self) -> None:
        """Write the final weights; raises :class:`LoopscopeError` that says what is lost where the disk is full."""
        try:
            self.folder.write_weights(self.task.model)
        except LoopscopeError as error:
            lost = "The run was trained to its end, but its final weights are not written."
            raise LoopscopeError(f"{error} {lost} {self._last_checkpoint()} {self._way_on()}") from error

    def _fail(self, status: str, error: BaseException) -> None:
        """Close what is open and write the summary, with the newest evaluation as the final one."""
        _attempt(lambda: self.manager.end(status))
        _attempt(lambda: self._summarise(status, explained(error), dict(self.state.loop.evaluation)))
        if self.folder.newest_checkpoint() is not None:
            notice(f"{self._last_checkpoint()} {self._way_on()}")

    def _summarise(
        self, status: str, error: BaseException | None, final: dict[str, float], sample: str | None = None
    ) -> dict[str, Any]:
        """Write how it went, show it, and return it."""
        seconds = {"total": perf_counter() - self._begin, "training": self._trained}
        compared = self.runner.compared_metrics
        summary = summary_of(
            self.manager, self.record, self.folder.path, status, error, seconds, final, self._initial, compared
        )
        summary["sample"] = None if sample is None else str(sample)
        self.folder.write_summary(summary)
        self.display.strategy_ended(summary)
        return summary

    def _way_on(self) -> str:
        if self.folder.newest_checkpoint() is None:
            return "The run has to begin anew: with --overwrite, or in another --output-dir."
        if not self.record.options:
            return "Go on from it with the program that began it, and resume=True in its RunOptions."
        return f"Go on from it with: {this_command('resume', str(self.folder.path))}"

    def _last_checkpoint(self) -> str:
        newest = self.folder.newest_checkpoint()
        return f"The last intact checkpoint is {newest}." if newest else "No checkpoint had been written before."


def _status_after(error: BaseException) -> str:
    return "interrupted" if isinstance(error, (KeyboardInterrupt, StoppedError)) else "failed"


def _attempt(action: Callable[[], object]) -> None:
    """Do what can still be done after an error; a further one becomes a warning, since the first is what matters."""
    try:
        action()
    except Exception as error:
        text = str(error) if isinstance(error, LoopscopeError) else f"{type(error).__name__}: {error}"
        warnings.warn(text, stacklevel=2)
