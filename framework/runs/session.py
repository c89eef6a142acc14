"""One run of the command: checks everything first, then trains the strategies one after the other."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ..checkpoints import Checkpoint, CheckpointPlan, moments_of
from ..errors import RunNotice, UsageError, unknown
from ..firing import HookManager
from ..hooks import (
    ConfiguredHook,
    HookRegistry,
    MetricSink,
    RunInfo,
    TrainingHook,
    build_hooks,
    refuse_idle_options,
    select_hooks,
    treatments,
)
from ..state import RandomStreams, TrainingState, deterministic, seed_everything
from ..training import Precision, TrainingTask, compile_model, quiet_graph_breaks
from .config import RunOptions, require
from .display import Display
from .records import RunRecord, environment, versions
from .reference import Reference, differences, find_reference, load_reference
from .resuming import described, newest_of, refuse_another_run, tell_of_environment
from .runner import ExperimentRunner
from .strategy_run import StrategyRun
from .validating import validate


@dataclass
class Session:
    """An experiment, how to run it, and where its metrics go; ``make_sinks`` returns new sinks for one strategy."""

    runner: ExperimentRunner[Any]
    options: RunOptions
    make_sinks: Callable[[], list[MetricSink]] = list
    display: Display = field(default_factory=Display)

    def run(self) -> list[dict[str, Any]]:
        """Train every strategy and return their summaries; one that is resumed and done is left as it is.

        Everything that can be known to be wrong before the first step raises :class:`UsageError`; then nothing has
        been written.
        """
        options, runner = self.options, self.runner
        with deterministic(on=not options.no_determinism), quiet_graph_breaks():
            strategies = chosen_strategies(runner, options.strategies)
            hooks = self._hooks(strategies)
            device = check_device(options.guardian_device) if options.guardian_device else None
            records = {strategy: RunRecord(self.directory(strategy), strategy) for strategy in strategies}
            for record in records.values():
                record.refuse_to_overwrite(allowed=options.overwrite or options.resume)
            found = self._checkpoints(hooks, records) if options.resume else {}
            references = self._references(hooks, records)
            summaries: list[dict[str, Any]] = []
            fresh = deepcopy(runner.state_dict())
            for strategy in strategies:
                finished = records[strategy].finished() if options.resume else None
                if finished is None:
                    runner.load_state_dict(deepcopy(fresh))
                    run = self._prepare(strategy, hooks[strategy], records[strategy], device, references.get(strategy))
                    run.resumed = found.get(strategy)
                    if summaries:
                        run.manager.hooks.reset()
                    finished = run.run()
                summaries.append(finished)
        self.display.ended(summaries)
        return summaries

    def validate(self) -> dict[str, Sequence[int]]:
        """Train every strategy again and return the steps at which it equals its checkpoints, bit for bit.

        Nothing is written. Raises :class:`UsageError` where there is nothing to compare with, and
        :class:`LoopscopeError` that names the first step and tensor where the runs part.
        """
        with (
            deterministic(on=not self.options.no_determinism),
            quiet_graph_breaks(),
            TemporaryDirectory() as elsewhere,
        ):
            strategies = chosen_strategies(self.runner, self.options.strategies)
            hooks = self._hooks(strategies)
            records = {strategy: RunRecord(self.directory(strategy), strategy) for strategy in strategies}
            references = self._references(hooks, records)
            fresh = deepcopy(self.runner.state_dict())
            compared: dict[str, Sequence[int]] = {}
            for strategy, record in records.items():
                moments, before = moments_of(record.checkpoints), record.recorded()
                if before is None or not moments:
                    raise UsageError(f"{record.directory} holds no intact checkpoints to compare with.")
                refuse_another_run(str(record.directory), before, self._described(strategy, hooks[strategy]))
                self.runner.load_state_dict(deepcopy(fresh))
                scratch = RunRecord(Path(elsewhere) / strategy, strategy)
                scratch.make_folder()
                device = check_device(self.options.guardian_device) if self.options.guardian_device else None
                without_sinks = replace(self, make_sinks=list)
                run = without_sinks._prepare(strategy, hooks[strategy], scratch, device, references.get(strategy))
                if compared:
                    run.manager.hooks.reset()
                compared[strategy] = validate(run, moments, before["hooks"])
        return compared

    def _checkpoints(
        self, hooks: Mapping[str, Sequence[ConfiguredHook]], records: Mapping[str, RunRecord]
    ) -> dict[str, Checkpoint | None]:
        """Find where every strategy goes on."""
        found: dict[str, Checkpoint | None] = {}
        for strategy, record in records.items():
            expected = self._described(strategy, hooks[strategy])
            found[strategy] = newest_of(record, expected)
        return found

    def _described(self, strategy: str, hooks: Sequence[ConfiguredHook]) -> dict[str, Any]:
        """Return what tells one strategy's run from another."""
        runner = self.runner
        return described(
            runner.name,
            strategy,
            runner.config.as_dict(),
            {item.hook.name: item.options for item in hooks},
            treatments(item.hook for item in hooks),
        )

    def directory(self, strategy: str) -> Path:
        """Return the folder of one strategy's run."""
        return Path(self.runner.config.output_dir) / self.runner.name / strategy

    def _hooks(self, strategies: Sequence[str]) -> dict[str, list[ConfiguredHook]]:
        """Make the hooks of every strategy; strategies share a hook where its options are the same."""
        options, runner = self.options, self.runner
        group = options.with_hooks or runner.default_group
        own = {strategy: runner.strategy_hooks(strategy) for strategy in strategies}
        names = {
            strategy: select_hooks(group, [*options.hooks, *own[strategy]], runner.hook_sets, runner.name)
            for strategy in strategies
        }
        refuse_idle_options(options.hook_options, {name for active in names.values() for name in active})
        made: list[ConfiguredHook] = []
        return {
            strategy: build_hooks(names[strategy], options.hook_options, own[strategy], made) for strategy in strategies
        }

    def _references(
        self, hooks: Mapping[str, Sequence[ConfiguredHook]], records: Mapping[str, RunRecord]
    ) -> dict[str, Reference]:
        """Load the reference solution of every strategy that has one and a hook that asks for it."""
        given, runner = self.options.reference, self.runner
        asking = [strategy for strategy, active in hooks.items() if any(_asks_for_reference(item) for item in active)]
        require(
            given is None or bool(asking),
            f"--reference {given} is given, but no hook that is on measures against a reference; add one of "
            f"--hooks {', '.join(hook.name for hook in HookRegistry if asks_for_reference(hook))}.",
        )
        found: dict[str, Reference] = {}
        for strategy in asking:
            earlier = (records[strategy].weights_path, records[strategy].reference_path)
            path = find_reference(given, earlier, runner.name, strategy)
            reference = None if path is None else self._load_reference(path, strategy)
            if reference is not None:
                found[strategy] = reference
        return found

    def _load_reference(self, path: Path, strategy: str) -> Reference | None:
        """Load a reference and tell how its run differs; one that nobody asked for may be of another model."""
        runner = self.runner
        seed_everything(runner.config.seed)
        model = runner.build_model().to(runner.device)
        try:
            reference = load_reference(path, model)
        except UsageError as error:
            if self.options.reference is not None:
                raise
            warnings.warn(f"Strategy {strategy!r} has no reference solution: {error}", RunNotice, stacklevel=2)
            return None
        if unlike := differences(path, runner.config, model):
            sentence = f"The reference of strategy {strategy!r}, {path}, comes from a run that differs"
            warnings.warn(f"{sentence}: {'; '.join(unlike)}.", RunNotice, stacklevel=2)
        return reference

    def _prepare(
        self,
        strategy: str,
        hooks: Sequence[ConfiguredHook],
        record: RunRecord,
        guardian_device: torch.device | None,
        reference: Reference | None,
    ) -> StrategyRun:
        runner, options = self.runner, self.options
        task, state = build_run(runner, strategy)
        weights = None if reference is None else reference.weights
        manager = HookManager(
            [item.hook for item in hooks],
            task,
            state,
            loop=runner.loop,
            required=[*options.hooks, *runner.strategy_hooks(strategy)],
            sinks=self.make_sinks(),
            on_error=options.on_hook_error,
            audit=options.audit_hooks,
            guardian_device=guardian_device,
            profile=options.profile_hooks,
            offload_state=options.hook_offload_state,
            reference_weights=weights,
        )
        run = RunInfo(
            experiment=runner.name,
            strategy=strategy,
            output_dir=record.directory,
            model=task.model,
            config=runner.config,
            loop=runner.loop,
            seed=runner.config.seed,
            steps=task.length * (len(task.loader) if runner.loop == "epoch" else 1),
            steps_per_epoch=len(task.loader),
            optimizer_class=type(task.optimizer),
            reference_weights=weights,
            metric_infos=manager.hooks.metric_infos(),
            treatments=treatments(manager.hooks),
            compared_metrics=runner.compared_metrics,
        )

        def claim() -> None:
            if session_run.resumed is not None:
                tell_of_environment(session_run.resumed, {**versions(), **environment(task.model)})
                return
            path = record.claim(None if reference is None else reference.path)
            record.write_config(run, hooks, options, path, runner.describe_data())

        session_run = StrategyRun(
            run,
            task,
            state,
            manager,
            record,
            self.display,
            claim,
            plan=CheckpointPlan(options.save_checkpoints, options.checkpoint_every_steps, options.keep_checkpoints),
            best_metric=runner.best_metric,
            described=self._described(strategy, hooks),
        )
        return session_run


def asks_for_reference(hook: type[TrainingHook]) -> bool:
    """Tell whether a hook measures against a reference solution."""
    return hook.needs_reference_weights or hook.uses_reference_weights


def _asks_for_reference(item: ConfiguredHook) -> bool:
    return asks_for_reference(type(item.hook))


def chosen_strategies(runner: ExperimentRunner[Any], wanted: Sequence[str]) -> list[str]:
    """Expand the strategies that the user asked for: none or ``all`` means every one.

    Dashes and underscores are the same. Raises :class:`UsageError` for a name that is none.
    """
    if not wanted:
        return list(runner.strategies)
    known = {strategy.replace("-", "_"): strategy for strategy in runner.strategies}
    chosen: list[str] = []
    for name in wanted:
        if name != "all" and name.replace("-", "_") not in known:
            raise unknown(f"strategy of {runner.name}:", name, [*runner.strategies, "all"])
        chosen += runner.strategies if name == "all" else [known[name.replace("-", "_")]]
    return list(dict.fromkeys(chosen))


def build_run(runner: ExperimentRunner[Any], strategy: str) -> tuple[TrainingTask, TrainingState]:
    """Seed, then build what one strategy trains; the same weights for every strategy of a seed."""
    config = runner.config
    seed_everything(config.seed)
    model = runner.prepare_model(runner.build_model().to(runner.device), strategy)
    optimizer = runner.build_optimizer(model)
    scheduler = runner.build_scheduler(optimizer)
    loader = runner.build_loader(strategy)
    if config.with_compile:
        compile_model(model)
    precision = Precision.of(config.amp, runner.device)
    task = TrainingTask(
        model,
        optimizer,
        loader,
        precision.autocast(runner.compute_loss),
        evaluate=precision.autocast(runner.evaluate),
        scaler=precision.scaler(),
        should_stop=runner.should_stop,
        sample=runner.sample,
        target_grad=runner.target_grad,
        scheduler=scheduler,
        scheduler_interval=runner.scheduler_interval,
        length=runner.length,
        log_every=config.log_every,
        eval_every=config.eval_every,
        snapshot_every=config.snapshot_every,
        accumulation_steps=config.accumulation_steps,
        config=config,
    )
    streams = RandomStreams(config.seed, loader.generators())
    state = TrainingState(
        model, optimizer, streams, scheduler=scheduler, scaler=task.scaler, extras={"experiment": runner}
    )
    require(len(loader) > 0, f"Strategy {strategy!r} has no training batches.")
    return task, state


def check_device(name: str | None) -> torch.device:
    """Return the device called ``name``; ``None`` means the accelerator if there is one, the CPU otherwise."""
    # Without check_available torch names what it was built for: CUDA, in its default wheel for Linux, on any machine.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name is None:
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        known = "cpu" if accelerator is None else f"{accelerator.type}, cpu"
        raise UsageError(f"Device {name!r} cannot be used here. Known: {known}.") from error
    return device
