"""One run of the command: checks everything first, then trains the strategies one after the other."""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from framework.borrowing import lent_modes
from framework.checkpoints import save_checkpoint
from framework.config import RunOptions, require
from framework.contexts import RunInfo
from framework.errors import HookError, StateMutationError, UsageError, unknown
from framework.hook_config import ConfiguredHook, build_hooks
from framework.hooks import TrainingHook
from framework.loops import NoProgress, Progress, epoch_loop, step_loop
from framework.manager import HookManager
from framework.metrics import MetricSink
from framework.random_streams import RandomStreams, seed_everything
from framework.records import RunRecord
from framework.registry import select_hooks
from framework.runner import ExperimentRunner
from framework.train_step import TrainingTask
from framework.training_state import TrainingState


class Display:
    """What a session tells the user; this one says nothing."""

    def strategy_started(self, run: RunInfo, task: TrainingTask, hooks: Sequence[TrainingHook]) -> Progress:
        """Announce a strategy and return the display of its progress."""
        return NoProgress()

    def strategy_ended(self, summary: Mapping[str, Any]) -> None:
        """Show how a strategy ended."""

    def ended(self, summaries: Sequence[Mapping[str, Any]]) -> None:
        """Compare the strategies."""


@dataclass
class Session:
    """An experiment, how to run it, and where its metrics go.

    ``make_sinks`` returns new sinks for one strategy. ``prepare`` raises :class:`UsageError` for everything that can
    be known to be wrong before the first step, and writes nothing.
    """

    runner: ExperimentRunner[Any]
    options: RunOptions
    make_sinks: Callable[[], list[MetricSink]] = list
    display: Display = field(default_factory=Display)

    def run(self) -> list[dict[str, Any]]:
        """Train every strategy and return their summaries."""
        strategies = chosen_strategies(self.runner, self.options.strategies)
        hooks = {strategy: self._hooks(strategy) for strategy in strategies}
        records = {strategy: RunRecord(self.directory(strategy), strategy) for strategy in strategies}
        for record in records.values():
            record.refuse_to_overwrite(allowed=self.options.overwrite)
        for record in records.values():
            record.claim()
        summaries = []
        for strategy in strategies:
            summaries.append(self._run_strategy(strategy, hooks[strategy], records[strategy]))
        self.display.ended(summaries)
        return summaries

    def directory(self, strategy: str) -> Path:
        """Return the folder of one strategy's run."""
        return Path(self.runner.config.output_dir) / self.runner.name / strategy

    def _hooks(self, strategy: str) -> list[ConfiguredHook]:
        own = self.runner.strategy_hooks(strategy)
        options = self.options
        names = select_hooks(options.with_hooks, [*options.hooks, *own], self.runner.hook_sets, self.runner.name)
        return build_hooks(names, options.hook_options, own)

    def _run_strategy(self, strategy: str, hooks: list[ConfiguredHook], record: RunRecord) -> dict[str, Any]:
        runner, options = self.runner, self.options
        task, state = build_run(runner, strategy)
        manager = HookManager(
            [item.hook for item in hooks],
            task,
            state,
            loop=runner.loop,
            sinks=self.make_sinks(),
            on_error=options.on_hook_error,
            audit=options.audit_hooks,
            guardian_device=torch.device(options.guardian_device) if options.guardian_device else None,
            profile=options.profile_hooks,
        )
        run = RunInfo(
            experiment=runner.name,
            strategy=strategy,
            output_dir=record.directory,
            model=task.model,
            config=runner.config,
            loop=runner.loop,
            seed=runner.config.seed,
            metric_infos=manager.metric_infos(),
            treatments=manager.treatments(),
        )
        record.write_config(run, hooks, options)
        return StrategyRun(run, task, state, manager, record, self.display).run()


@dataclass
class StrategyRun:
    """One strategy from its first evaluation to its summary, however it ends."""

    run_info: RunInfo
    task: TrainingTask
    state: TrainingState
    manager: HookManager
    record: RunRecord
    display: Display

    def run(self) -> dict[str, Any]:
        """Train, and leave summary, final weights and closed sinks behind; an error is raised again after that."""
        begin = time.perf_counter()
        initial = self._evaluate()
        status, trained = "failed", 0.0
        try:
            self.manager.start(self.run_info)
            progress = self.display.strategy_started(self.run_info, self.task, self.manager.hooks)
            start = time.perf_counter()
            loop = epoch_loop if self.run_info.loop == "epoch" else step_loop
            try:
                loop(self.task, self.manager, progress=progress, checkpoint=self._checkpoint)
            finally:
                trained = time.perf_counter() - start
            status = "completed"
        except HookError:
            self._checkpoint()
            raise
        except StateMutationError as error:
            raise StateMutationError(f"{error} {self._last_checkpoint()}") from error
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        finally:
            summary = self._finish(status, initial, trained, begin)
        return summary

    def _evaluate(self) -> dict[str, float]:
        def in_eval_mode() -> dict[str, float]:
            with lent_modes(self.task.model, train=False):
                return self.task.evaluate(self.task.model)

        return self.manager.isolated("evaluation", in_eval_mode)

    def _finish(self, status: str, initial: dict[str, float], trained: float, begin: float) -> dict[str, Any]:
        with nullcontext() if status == "completed" else warnings.catch_warnings():
            self.manager.end(status)
        final = self._evaluate() if status == "completed" else dict(self.state.loop.evaluation)
        seconds = {"total": time.perf_counter() - begin, "training": trained}
        summary = self.record.write_summary(
            self.run_info,
            self.task,
            self.state,
            self.manager,
            status=status,
            seconds=seconds,
            initial=initial,
            final=final,
        )
        if status == "completed":
            self.record.write_weights(self.task.model)
        self.display.strategy_ended(summary)
        return summary

    def _checkpoint(self) -> None:
        save_checkpoint(self.record.checkpoint_path(self.state.loop.step), self.state, self.manager.state_dict())

    def _last_checkpoint(self) -> str:
        newest = self.record.newest_checkpoint()
        return f"The last intact checkpoint is {newest}." if newest else "No checkpoint had been written before."


def chosen_strategies(runner: ExperimentRunner[Any], wanted: Sequence[str]) -> list[str]:
    """Expand the strategies that the user asked for: none or ``all`` means every one."""
    if not wanted or "all" in wanted:
        return list(runner.strategies)
    for strategy in wanted:
        if strategy not in runner.strategies:
            raise unknown("strategy", strategy, [*runner.strategies, "all"])
    return list(dict.fromkeys(wanted))


def build_run(runner: ExperimentRunner[Any], strategy: str) -> tuple[TrainingTask, TrainingState]:
    """Seed, then build what one strategy trains; the same weights for every strategy of a seed."""
    config = runner.config
    seed_everything(config.seed)
    model = runner.build_model().to(runner.device)
    optimizer = runner.build_optimizer(model)
    scheduler = runner.build_scheduler(optimizer)
    loader = runner.build_loader(strategy)
    task = TrainingTask(
        model,
        optimizer,
        loader,
        runner.compute_loss,
        evaluate=runner.evaluate,
        should_stop=runner.should_stop,
        target_grad=runner.target_grad,
        scheduler=scheduler,
        scheduler_interval=runner.scheduler_interval,
        length=runner.length,
        eval_every=config.eval_every,
        snapshot_every=config.snapshot_every,
        checkpoint_every=config.checkpoint_every,
        accumulation_steps=config.accumulation_steps,
        config=config,
    )
    streams = RandomStreams(config.seed, loader.generators())
    state = TrainingState(model, optimizer, streams, scheduler=scheduler, extras={"experiment": runner})
    require(len(loader) > 0, f"Strategy {strategy!r} has no training batches.")
    return task, state


def check_device(name: str | None) -> torch.device:
    """Return the device called ``name``; ``None`` means the accelerator if there is one, the CPU otherwise."""
    if name is None:
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"Device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device
