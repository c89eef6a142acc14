"""The life cycle of a run in any loop: the lock of its folder, the start of its hooks, its record and its summary."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from traceback import format_exception
from typing import Any, Protocol

from torch import Tensor

from ..doctor import LiveDiagnosis, diagnose, start_facts
from ..doctor.senses import EvaluationDropout
from ..durable_files import plain_json
from ..engine import HookManager
from ..errors import LoopscopeError, RunNotice, UsageError, warn, with_lines
from ..hooks import ENDLESS, MetricSink, RunInfo, TrainingHook
from ..hooks.selection import ConfiguredHook
from ..loops import NoProgress, Progress
from ..state import TrainingState, optimizers_of
from ..training import TrainingTask, peak_memory
from .budgets import budget_settings
from .checks import check_device
from .config import RunSettings
from .records import INCOMPLETE, RunRecord
from .run_folder import RunFolder
from .run_history import read_history
from .summaries import deltas, model_size


class Display:
    """The display of a run; this one shows nothing."""

    def strategy_started(self, run: RunInfo, task: TrainingTask, hooks: Sequence[TrainingHook]) -> Progress:
        """Announce a run and return the display of its progress."""
        return NoProgress()

    def strategy_ended(self, summary: Mapping[str, Any]) -> None:
        """Show how a run ended."""

    def ended(self, summaries: Sequence[Mapping[str, Any]]) -> None:
        """Compare the runs of a session."""


class EarlierState(Protocol):
    """What an interrupted run has stored, for the run that continues it."""

    @property
    def sinks(self) -> Mapping[str, Any]:
        """The positions of the sinks in their files, by name."""

    def restore(self, manager: HookManager) -> None:
        """Restore training state, hooks and metrics in a manager that has not started."""


@dataclass
class Run:
    """A run of hooks in a loop, which may be that of an experiment, a custom one or a Trainer's.

    Its owner, which trains, calls :meth:`enter_folder` and :meth:`start_hooks` within :meth:`undone_after_errors`, then
    :meth:`claim` unless the run continues an earlier one, :meth:`start_sinks`, and after the last step :meth:`end` and
    :meth:`release`.
    """

    manager: HookManager
    folder: RunFolder
    """The folder of the run; a temporary one on all ranks but the main one."""
    record: RunRecord
    info: RunInfo
    display: Display
    earlier: EarlierState | None = None
    """The state of the run that this one continues, if any."""
    continues_record: bool = True
    """Whether the folder has the record of the run whose state is restored."""
    initial: Mapping[str, float] = field(default_factory=dict)
    """The evaluation before the first step."""
    compared_metrics: Sequence[str] = ()
    """Full names of the metrics in which runs of an experiment are compared."""
    summary: dict[str, Any] = field(default_factory=dict)
    """The summary, once the run has ended."""
    diagnosis: LiveDiagnosis = field(default_factory=LiveDiagnosis)
    """Collects the history of the run, and reports findings."""
    training_started_at: float | None = None
    """The moment before the first step; without ``training_ended_at`` the training lasts until the summary."""
    training_ended_at: float | None = None
    _contexts: ExitStack = field(default_factory=ExitStack)
    """Holds the lock of the folder."""
    _created_at: float = field(default_factory=perf_counter)

    @contextmanager
    def undone_after_errors(self) -> Iterator[None]:
        """Start the run in the body; after an error, end the started hooks and leave the folder as it was."""
        try:
            yield
        except BaseException:
            attempt(partial(self.manager.end, "failed"))
            self.release()
            self.folder.remove_created()
            raise

    def enter_folder(self) -> None:
        """Create the folder, and lock it until :meth:`release`; refuse files that another process has written."""
        self.folder.enter(self._contexts)

    def start_hooks(self, *checks: Callable[[], object], first: Any = None) -> None:
        """Restore the earlier state, if any, start the hooks, and make further checks, which may leave out hooks.

        ``first`` is the first batch, for loops whose loader must not be read here.
        """
        if self.earlier is not None:
            self.earlier.restore(self.manager)
        self.manager.start_hooks(self.info, first)
        for check in checks:
            check()
        self.info = replace(self.info, metric_infos=self.manager.hooks.metric_infos())
        self.record = replace(self.record, facts=self._facts())

    def _facts(self) -> Mapping[str, Any]:
        """Return the start-up facts of the training as plain JSON values; those of the run that this one continues."""
        if self.earlier is not None:
            with suppress(UsageError):  # a rewind has a new folder, without a record
                return RunRecord.read(self.folder.path).facts
            return {}
        state, task, info = self.manager.state, self.manager.task, self.info
        try:
            facts = start_facts(state.model, optimizers_of(state), state.also.values())
        except Exception as error:  # an unusual tensor must not end the training
            warn(f"The start-up facts for the doctor could not be read: {with_lines(error)}.", RunNotice)
            facts = {}
        planned = {} if info.steps >= ENDLESS else {"planned_steps": info.steps}
        facts |= {"accumulation": task.accumulation_steps, "scaler": task.scaler is not None, **planned}
        return dict(plain_json(facts))

    def claim(self, reference: Path | None = None, data: Mapping[str, Any] = {}) -> None:
        """Remove an earlier run from the folder, and write the record.

        ``reference`` is the file of the weights that hooks measure against, ``data`` the description of the data.
        """
        reference = self.folder.claim(reference)
        settings = {**self.record.run, "reference": None if reference is None else str(reference)}
        self.record = replace(self.record, data=plain_json(data), run=settings)
        self.folder.write_record(self.record)

    def start_sinks(self) -> None:
        """Start the sinks, which append to the files of the earlier run, if any, and the diagnosis."""
        if self.manager.task.ranks.is_main:
            self._start_diagnosis()
        positions = self.earlier.sinks if self.earlier is not None and self.continues_record else None
        self.manager.delivery.start(self.info, positions)
        self.folder.remove_manifest()

    def _start_diagnosis(self) -> None:
        """Add the diagnosis to the sinks, with the history of the run up to now if it continues an earlier one."""
        if self.earlier is not None and self.continues_record:
            self.diagnosis.history = read_history(self.folder.path, until=self.manager.state.loop.step)
        history = self.diagnosis.history
        history.facts = self.record.facts
        history.settings = self.record.training or self.record.config
        history.hooks = [*self.record.hooks]
        history.left_out = self.manager.hooks.failures.left_out  # which grows during the run
        history.status = "running"
        self.manager.delivery.include(self.diagnosis)

    def show_progress(self) -> Progress:
        """Show that training starts, and return the display of its progress."""
        return self.display.strategy_started(self.info, self.manager.task, [*self.manager.hooks])

    def begin_training(self) -> None:
        """Start to measure time: the first step follows."""
        self.training_started_at = perf_counter()
        self.manager.profiler.clock.restart(next(self.manager.task.model.parameters()).device.type)

    def end(self, status: str, error: BaseException | None = None) -> None:
        """End hooks and sinks, and write the summary, with the newest evaluation as the final one.

        The summary is also written if a hook or a sink raises at its end; a run without another ``error`` then failed.
        """
        try:
            self.manager.end(status)
        except BaseException as raised:
            if error is None:
                status, error = "failed", raised
            raise
        finally:
            self.summarise(status, error, dict(self.manager.state.loop.evaluation))

    def summarise(
        self, status: str, error: BaseException | None, final: Mapping[str, float], sample: str | None = None
    ) -> dict[str, Any]:
        """Write the summary, show it, and return it."""
        now = perf_counter()
        began, ended = self.training_started_at, self.training_ended_at
        training = 0.0 if began is None else (now if ended is None else ended) - began
        seconds = {"total": now - self._created_at, "training": training}
        self.summary = self._content(status, error, seconds, final)
        self.summary["sample"] = None if sample is None else str(sample)
        self.diagnosis.history.status = status
        diagnosis = diagnose(self.diagnosis.history)
        self.summary["findings"] = diagnosis.as_dict()["findings"]
        self.summary["not_checked"] = {"reason": diagnosis.unchecked, "sentences": list(diagnosis.missing)}
        try:
            self.folder.write_summary(self.summary)
        finally:
            self.display.strategy_ended(self.summary)
        return self.summary

    def _content(
        self, status: str, error: BaseException | None, seconds: Mapping[str, float], final: Mapping[str, float]
    ) -> dict[str, Any]:
        """Return the summary of the run up to now, without its sample and its findings."""
        manager, record = self.manager, self.record
        loop, metrics = manager.state.loop, manager.delivery.last()
        sink_errors = manager.delivery.sink_errors
        rate = None if loop.step_lr is None else float(loop.step_lr)
        is_incomplete = status == "completed" and any(error["lost_rows"] for error in sink_errors)
        summary: dict[str, Any] = {
            "experiment": record.experiment,
            "strategy": record.strategy,
            "status": INCOMPLETE if is_incomplete else status,
            "error": None if error is None else with_lines(error),
            "traceback": None if error is None else "".join(format_exception(error)),
            "seed": manager.state.streams.seed,
            "epochs": loop.epoch,
            "steps": loop.step,
            "skipped_steps": loop.skipped_steps,
            "target_reached": loop.reached,
            "seconds": seconds,
            "steps_per_second": loop.step / seconds["training"] if seconds["training"] else None,
            "budget": {} if manager.budget is None else manager.budget.report(),
            "step_time": manager.profiler.clock.report(),
            # A profile resets the peaks for every hook.
            "peak_memory": {} if manager.profiler.enabled else peak_memory(),
            "model": model_size(manager.task.model),
            **self._final_loss(status),
            "last_lr": None if rate is None or math.isnan(rate) else rate,
            "initial": dict(self.initial),
            "final": dict(final),
            "deltas": deltas(self.initial, final),
            "metrics": {name: float(metrics[name]) for name in self.compared_metrics if name in metrics},
            "sample": None,
            "treatments": {name: tuple(parts) for name, parts in record.treatments.items()},
            "hook_errors": manager.hooks.failures.errors,
            "sink_errors": sink_errors,
            "hooks_left_out": manager.hooks.failures.left_out,
            "compiled_graphs": manager.taps.graphs,
            "hook_tables": manager.hooks.tables,
            "hook_samples": manager.profiler.samples,
            "output_dir": str(self.folder.path),
        }
        return summary | ({"hook_profile": manager.profiler.report()} if manager.profiler.enabled else {})

    def _final_loss(self, status: str) -> dict[str, Any]:
        """Return the final loss, over how many steps it is a mean, and the last loss."""
        loop, losses = self.manager.state.loop, self.diagnosis.history.recent_losses
        epochs = max(1, loop.epoch) if self.manager.counts_epochs else 0
        # An error may end a run within a step, whose loss is not known.
        last = loop.step if status == "completed" else losses.newest_step or loop.step
        return losses.final_loss(last, loop.epoch_loss, epochs, is_partial=loop.running_loss is not None)

    def release(self) -> None:
        """Unlock the folder."""
        self._contexts.close()


def create_manager(
    settings: RunSettings,
    hooks: Sequence[ConfiguredHook],
    task: TrainingTask,
    state: TrainingState,
    *,
    loop: str,
    required: Sequence[str],
    left_out: Mapping[str, str],
    sinks: Sequence[MetricSink],
    reference_weights: Mapping[str, Tensor] | None,
    scheduled: Collection[str] = (),
) -> HookManager:
    """Create the manager of a run's hooks with the settings of the run; the caller has chosen schedules for some."""
    device = check_device(settings.guardian_device) if settings.guardian_device else None
    return HookManager(
        [item.hook for item in hooks],
        task,
        state,
        loop=loop,
        required=required,
        left_out=left_out,
        sinks=sinks,
        on_error=settings.on_hook_error,
        audit=settings.audit_hooks,
        check_every_call=settings.check_every_call,
        guardian_device=device,
        profile=settings.profile_hooks,
        offload_state=settings.hook_offload_state,
        reference_weights=reference_weights,
        evaluation_listeners=[EvaluationDropout(task.model)],
        budget=budget_settings(settings.budget, hooks, {*required, *scheduled}),
        compiled=settings.compiled,
    )


def attempt(action: Callable[[], object]) -> None:
    """Run a cleanup action after an error; its own error becomes a warning, so that the first error is reported."""
    try:
        action()
    except Exception as error:
        text = str(error) if isinstance(error, LoopscopeError) else f"{type(error).__name__}: {error}"
        warn(text, stacklevel=2)
