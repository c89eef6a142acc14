"""One strategy from the start of its hooks to its summary, however it ends."""

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, TypeVar

from torch import nn

from ..checkpoints import (
    Checkpoint,
    Checkpointing,
    CheckpointPlan,
    CheckpointWriter,
    RunState,
    Signals,
    StoppedError,
    run_lock,
)
from ..errors import HookError, LoopscopeError, RunNotice, StateMutationError
from ..firing import HookManager
from ..hooks import RunInfo
from ..isolation import borrowed_for_evaluation
from ..loops import epoch_loop, step_loop
from ..state import TrainingState, explained
from ..training import TrainingTask
from .display import Display
from .records import RunRecord, environment, versions

Result = TypeVar("Result")


@dataclass
class StrategyRun:
    """A run of one strategy; ``claim`` is called once the hooks have started, before anything of it is written.

    ``resumed`` is the checkpoint from which it goes on; ``best_metric`` names the number of the evaluation whose lowest
    value marks the best checkpoint.
    """

    run_info: RunInfo
    task: TrainingTask
    state: TrainingState
    manager: HookManager
    record: RunRecord
    display: Display
    claim: Callable[[], None]
    plan: CheckpointPlan = CheckpointPlan()  # noqa: RUF009 - it is frozen
    resumed: Checkpoint | None = None
    best_metric: str = "val_loss"
    described: Mapping[str, Any] = field(default_factory=dict)
    """What the manifests of checkpoints say of the run: configuration, hooks."""
    _begin: float = field(default_factory=perf_counter)
    _trained: float = 0.0
    _is_trained: bool = False
    _initial: dict[str, float] = field(default_factory=dict)
    _signals: Signals = field(default_factory=Signals)

    def __post_init__(self) -> None:
        """Make what writes the checkpoints."""
        self._checkpointing = Checkpointing(
            self.manager,
            CheckpointWriter(self.record.checkpoints, self.plan.keep),
            self.plan,
            self._signals,
            describe=self._describe,
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
                self._train()
                self.manager.end("completed")
                final = self._evaluate()
                sample = self._in_eval_mode("sample", self.task.sample)
                self.record.write_weights(self.task.model)
            except StateMutationError as error:
                self.manager.hooks.abandon()
                fatal = StateMutationError(f"{error} {self._last_checkpoint()}")
                self._fail("failed", fatal)
                raise fatal from error
            except HookError as error:
                if self._is_trained:
                    _attempt(lambda: self._checkpointing.take(wait=True))
                self._fail("failed", error)
                raise
            except BaseException as error:
                stopped = isinstance(error, (KeyboardInterrupt, StoppedError))
                self._fail("interrupted" if stopped else "failed", error)
                raise
            return self._summarise("completed", None, final, sample)

    def _start(self, held: ExitStack) -> None:
        """Lock the folder, put back the state of a run that goes on, and start the hooks."""
        self.record.make_folder()
        try:
            held.enter_context(run_lock(self.record.directory))
            if self.resumed is not None:
                RunState(self.manager).put_back(self.resumed.content(), self.resumed.folder)
            self.manager.start_hooks(self.run_info)
            self.run_info = replace(self.run_info, metric_infos=self.manager.hooks.metric_infos())
            if self.resumed is not None:
                self.manager.hooks.goes_on()
                self.manager.dispatch.start(self.run_info, self.resumed.manifest["sinks"])
                self._initial = dict(self.resumed.manifest["initial"])
        except BaseException:
            held.close()
            _attempt(lambda: self.manager.end("failed"))
            self.record.give_back()
            raise
        self.claim()

    def _train(self) -> None:
        progress = self.display.strategy_started(self.run_info, self.task, [*self.manager.hooks])
        loop = epoch_loop if self.run_info.loop == "epoch" else step_loop
        begin = perf_counter()
        try:
            with self._signals.caught():
                loop(self.task, self.manager, progress=progress, pauses=self._checkpointing)
                self._is_trained = True
        finally:
            self._trained = perf_counter() - begin
            self._checkpointing.finish()

    def _describe(self) -> dict[str, Any]:
        """Return what a checkpoint that is written now says of itself."""
        loop = self.state.loop
        return {
            **self.described,
            "experiment": self.run_info.experiment,
            "strategy": self.run_info.strategy,
            "epoch": loop.epoch,
            "step": loop.step,
            "evaluation": loop.evaluation,
            "score": loop.evaluation.get(self.best_metric),
            "initial": self._initial,
            "versions": versions(),
            "environment": environment(self.task.model),
        }

    def _evaluate(self) -> dict[str, float]:
        return self._in_eval_mode("evaluation", self.task.evaluate)

    def _in_eval_mode(self, name: str, look: Callable[[nn.Module], Result]) -> Result:
        """Look at the model in eval mode, isolated from the run."""

        def looking() -> Result:
            with borrowed_for_evaluation(self.task.model):
                return look(self.task.model)

        return self.manager.isolated(name, looking)

    def _fail(self, status: str, error: BaseException) -> None:
        """Close what is open and write the summary, with the newest evaluation as the final one."""
        _attempt(lambda: self.manager.end(status))
        self._summarise(status, explained(error), dict(self.state.loop.evaluation))
        if self.record.newest_checkpoint() is not None:
            sentence = f"{self._last_checkpoint()} Go on from it with: loopscope resume {self.record.directory}"
            warnings.warn(sentence, RunNotice, stacklevel=2)

    def _summarise(
        self, status: str, error: BaseException | None, final: dict[str, float], sample: str | None = None
    ) -> dict[str, Any]:
        summary = self.record.write_summary(
            self.run_info,
            self.task,
            self.state,
            self.manager,
            status=status,
            error=error,
            seconds={"total": perf_counter() - self._begin, "training": self._trained},
            initial=self._initial,
            final=final,
            sample=sample,
        )
        self.display.strategy_ended(summary)
        return summary

    def _last_checkpoint(self) -> str:
        newest = self.record.newest_checkpoint()
        return f"The last intact checkpoint is {newest}." if newest else "No checkpoint had been written before."


def _attempt(action: Callable[[], None]) -> None:
    """Do what can still be done after an error; a further one becomes a warning, since the first is what matters."""
    try:
        action()
    except LoopscopeError as error:
        warnings.warn(str(error), stacklevel=2)
