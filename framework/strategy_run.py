"""One strategy from the start of its hooks to its summary, however it ends."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, TypeVar

from torch import nn

from framework.borrowing import lent_for_evaluation
from framework.checkpoints import save_checkpoint
from framework.commits import UndeclaredCommitError
from framework.contexts import RunInfo
from framework.display import Display
from framework.errors import HookError, LoopscopeError, StateMutationError
from framework.loops import epoch_loop, step_loop
from framework.manager import HookManager
from framework.records import RunRecord
from framework.train_step import TrainingTask
from framework.training_state import TrainingState

Result = TypeVar("Result")


@dataclass
class StrategyRun:
    """A run of one strategy; ``claim`` is called once the hooks have started, before anything of it is written."""

    run_info: RunInfo
    task: TrainingTask
    state: TrainingState
    manager: HookManager
    record: RunRecord
    display: Display
    claim: Callable[[], None]
    _begin: float = field(default_factory=perf_counter)
    _trained: float = 0.0
    _initial: dict[str, float] = field(default_factory=dict)

    def run(self) -> dict[str, Any]:
        """Train, write final weights and summary, and return the summary.

        However it ends, sinks are closed and the summary is written; an error is raised again after that. Only an
        error at the start, such as a hook that refuses the model, leaves the folder as it was.
        """
        self._start()
        try:
            self.manager.start_sinks(self.run_info)
            self._initial = self._evaluate()
            self._train()
            self.manager.end("completed")
            final = self._evaluate()
            sample = self._in_eval_mode("sample", self.task.sample)
            self.record.write_weights(self.task.model)
        except StateMutationError as error:
            self.manager.abandon()
            fatal = StateMutationError(f"{error} {self._last_checkpoint()}")
            self._fail("failed", fatal)
            raise fatal from error
        except (HookError, UndeclaredCommitError) as error:
            _attempt(self._checkpoint)
            self._fail("failed", error)
            raise
        except BaseException as error:
            self._fail("interrupted" if isinstance(error, KeyboardInterrupt) else "failed", error)
            raise
        return self._summarise("completed", None, final, sample)

    def _start(self) -> None:
        self.record.make_folder()
        try:
            self.manager.start_hooks(self.run_info)
        except BaseException:
            _attempt(lambda: self.manager.end("failed"))
            self.record.give_back()
            raise
        self.run_info = replace(self.run_info, metric_infos=self.manager.metric_infos())
        self.claim()

    def _train(self) -> None:
        progress = self.display.strategy_started(self.run_info, self.task, self.manager.hooks)
        loop = epoch_loop if self.run_info.loop == "epoch" else step_loop
        begin = perf_counter()
        try:
            loop(self.task, self.manager, progress=progress, checkpoint=self._checkpoint)
        finally:
            self._trained = perf_counter() - begin

    def _evaluate(self) -> dict[str, float]:
        return self._in_eval_mode("evaluation", self.task.evaluate)

    def _in_eval_mode(self, name: str, look: Callable[[nn.Module], Result]) -> Result:
        """Look at the model in eval mode, isolated from the run."""

        def looking() -> Result:
            with lent_for_evaluation(self.task.model):
                return look(self.task.model)

        return self.manager.isolated(name, looking)

    def _fail(self, status: str, error: BaseException) -> None:
        """Close what is open and write the summary, with the newest evaluation as the final one."""
        _attempt(lambda: self.manager.end(status))
        self._summarise(status, error, dict(self.state.loop.evaluation))

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

    def _checkpoint(self) -> None:
        manager = self.manager
        path = self.record.checkpoint_path(self.state.loop.step)
        save_checkpoint(path, self.state, manager.state_dict(), manager.run_streams)

    def _last_checkpoint(self) -> str:
        newest = self.record.newest_checkpoint()
        return f"The last intact checkpoint is {newest}." if newest else "No checkpoint had been written before."


def _attempt(action: Callable[[], None]) -> None:
    """Do what can still be done after an error; a further one becomes a warning, since the first is what matters."""
    try:
        action()
    except LoopscopeError as error:
        warnings.warn(str(error), stacklevel=2)
