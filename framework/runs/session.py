"""One run of the command: checks everything first, then trains the strategies one after the other."""

import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ..checkpoints import Checkpoint, CheckpointPlan, Signals, is_locked, open_checkpoint
from ..errors import RunNotice, UsageError, notice, require
from ..firing import HookManager
from ..hooks import (
    ConfiguredHook,
    HookRegistry,
    MetricSink,
    TrainingHook,
    always_on,
    build_hooks,
    refuse_idle_options,
    select_hooks,
)
from ..preserved_streams import preserved_streams
from ..state import deterministic, laid_out_like, seed_everything
from ..training import Ranks, joined, quiet_graph_breaks
from .checks import asked, check_device, check_experiment
from .config import CHECKPOINTS, ExperimentConfig, RunOptions
from .records import RunRecord, environment, seed_name
from .reference import Reference, differences_from_run, find_reference, load_reference
from .resuming import MAY_DIFFER, newest_of, tell_of_environment
from .run_folder import OVERWRITING, REWINDS, RunFolder
from .runner import ExperimentRunner
from .strategy_run import Display, StrategyRun
from .task_building import build_run, chosen_strategies
from .validating import Earlier, Stretch, rewind, validate

OVERWRITING_FROM_PYTHON = "choose another output_dir in the config, or write over it: RunOptions(overwrite=True)"


@dataclass(frozen=True)
class Setup:
    """One strategy as it is to be run: everything that was checked and found before any strategy is built."""

    seed: int
    folder: RunFolder
    record: RunRecord
    hooks: Sequence[ConfiguredHook]
    guardian_device: torch.device | None
    left_out: Mapping[str, str]
    """Why hooks of a group could not be made, by name."""
    reference: Reference | None = None
    resumed: Checkpoint | None = None
    summary: dict[str, Any] | None = None
    """That of a run that is completed already, and is left as it is."""


@dataclass
class Session:
    """An experiment, how to run it, and where its metrics go; ``make_sinks`` returns new sinks for one strategy."""

    runner: ExperimentRunner[Any]
    options: RunOptions
    make_sinks: Callable[[], list[MetricSink]] = list
    display: Display = field(default_factory=Display)
    _signals: Signals = field(default_factory=Signals)
    _elsewhere: Path | None = None
    """The folder for all runs, in place of that of the config."""

    def run(self) -> list[dict[str, Any]]:
        """Train every strategy and return their summaries; one that is resumed and done is left as it is.

        Everything that can be known to be wrong before the first step raises :class:`UsageError`; then nothing has
        been written.
        """
        with self._signals.interruptible(), self._surroundings() as held:
            session, ranks = self, Ranks.everyone(self.options.parallel)
            if not ranks.is_main:  # this process computes along; what it would write goes away with a folder of its own
                folder = Path(held.enter_context(TemporaryDirectory()))
                session = replace(self, display=Display(), _elsewhere=folder)
            setups = ranks.together(session._checked)
            ranks.check_equal(session._decisive(setups))
            if self.options.resume:  # the first rank has found and checked from where
                found = ranks.gather([(setup.resumed and setup.resumed.folder, setup.summary) for setup in setups])[0]
                setups = [
                    replace(setup, resumed=folder and open_checkpoint(folder), summary=summary)
                    for setup, (folder, summary) in zip(setups, found, strict=True)
                ]
            runs = session._runs([setup for setup in setups if setup.summary is None])
            summaries = [setup.summary or next(runs).run() for setup in setups]
        session.display.ended(summaries)
        return summaries

    @contextmanager
    def _surroundings(self) -> Iterator[ExitStack]:
        """Set in the body what runs need of torch and of the other processes; the body may enter further contexts."""
        determined = deterministic(on=not self.options.no_determinism)
        with preserved_streams(), determined, quiet_graph_breaks(), joined(self.options.parallel), ExitStack() as held:
            yield held

    def _decisive(self, setups: Sequence[Setup]) -> dict[str, Any]:
        """Return what decides the numbers of all runs, by names for a sentence."""
        found: dict[str, Any] = {"What is trained": [(setup.folder.strategy, setup.seed) for setup in setups]}
        for record in [setup.record for setup in setups]:
            entries = {**record.config, **record.versions, **record.run, "hooks": {**record.hooks}}
            found |= {name: value for name, value in entries.items() if name not in MAY_DIFFER}
        names = (*CHECKPOINTS, "digest_every", "parallel", "resume")
        return found | {name: getattr(self.options, name) for name in names}

    def planned(self) -> list[Setup]:
        """Check all that :meth:`run` checks before it writes, and return what it would do; notices are left to it."""
        with (
            preserved_streams(),
            warnings.catch_warnings(),
            deterministic(on=not self.options.no_determinism),
            quiet_graph_breaks(),
        ):
            warnings.simplefilter("ignore", RunNotice)
            return self._checked()

    def _checked(self) -> list[Setup]:
        options, setups = self.options, self._setups()
        remedy = OVERWRITING if options.recorded else OVERWRITING_FROM_PYTHON
        for setup in setups:
            setup.folder.refuse_to_overwrite(allowed=options.overwrite or options.resume, remedy=remedy)
        if options.resume and self._elsewhere is None:
            setups = [
                replace(setup, resumed=newest_of(setup.folder, setup.record), summary=setup.folder.completed())
                for setup in setups
            ]
        return self._with_references(setups)

    def validate(self) -> dict[str, Sequence[int]]:
        """Train every strategy again and return the steps at which it equals its checkpoints, bit for bit.

        Nothing is written. Raises :class:`UsageError` where there is nothing to compare with, and
        :class:`LoopscopeError` that names the first step and tensor where the runs part.
        """
        with self._surroundings() as held:
            elsewhere = held.enter_context(TemporaryDirectory())
            setups = self._setups()
            earlier = [Earlier.of(setup.folder, setup.record) for setup in setups]
            folders = [setup.folder for setup in setups]
            moved = [replace(each, path=Path(elsewhere, each.strategy, each.path.name)) for each in folders]
            both = zip(self._with_references(setups), moved, strict=True)
            setups = [replace(setup, folder=folder) for setup, folder in both]
            runs = replace(self, make_sinks=list)._runs(setups)
            return {run.folder.name: validate(run, found) for run, found in zip(runs, earlier, strict=True)}

    def rewind(self, stretch: Stretch, *, recorded: bool = True) -> tuple[Path, int, Sequence[int]]:
        """Train a stretch of a run again, from its nearest checkpoint before, with the hooks of this session.

        The run lies where this session would write it; its files stay as they are. Where it is not ``recorded``,
        nothing is written beside them either. Returns the folder of the metrics,
        the step after which the training began, and the steps at which it was compared, bit for bit. Raises
        :class:`UsageError` for what cannot be, :class:`LoopscopeError` where the run is not what it was.
        """
        with self._surroundings() as held:
            (setup,) = self._with_references(self._setups())
            require(setup.folder.record() is not None, f"{setup.folder.path} holds no run.")
            locked = is_locked(setup.folder.path)
            require(not locked, f"{setup.folder.path} is still being trained; rewind it when it has ended.")
            earlier = Earlier.of(setup.folder, setup.record, is_whole=False)
            path = setup.folder.path / REWINDS / stretch.name
            if not (recorded and Ranks.everyone(self.options.parallel).is_main):
                path = Path(held.enter_context(TemporaryDirectory())) / stretch.name
            folder = replace(setup.folder, path=path)
            folder.refuse_to_overwrite(allowed=True)  # an earlier one of the same steps
            (run,) = self._runs([replace(setup, folder=folder)])
            compared = rewind(run, stretch, earlier)
            return path, run.resumed.step if run.resumed else 0, compared

    def _setups(self) -> list[Setup]:
        """Check the experiment, seeds, strategies, hooks and devices."""
        options = self.options
        check_experiment(self.runner, ExperimentRunner)
        strategies = chosen_strategies(self.runner, options.strategies)
        left_out: dict[str, dict[str, str]] = {strategy: {} for strategy in strategies}
        hooks = self._hooks(strategies, left_out)
        device = check_device(options.guardian_device) if options.guardian_device else None
        configs = [replace(self.runner.config, seed=seed) for seed in options.seeds] or [self.runner.config]
        both = [(strategy, config) for config in configs for strategy in strategies]
        return [self._setup(strategy, config, hooks[strategy], device, left_out[strategy]) for strategy, config in both]

    def _setup(
        self,
        strategy: str,
        config: ExperimentConfig,
        hooks: Sequence[ConfiguredHook],
        device: torch.device | None,
        left_out: Mapping[str, str],
    ) -> Setup:
        """Say what is run, as far as it is known before the model is built, and where."""
        options, name = self.options, self.runner.name
        known = {"experiment": name, "strategy": strategy, "config": config.as_dict(), "options": options.recorded}
        record = RunRecord.planned(hooks, options.on_hook_error, options.audit_hooks, **known)
        path = (self._elsewhere or Path(self.runner.config.output_dir)) / name / strategy
        folder = RunFolder(path / seed_name(config.seed) if options.seeds else path, strategy)
        return Setup(config.seed, folder, record, hooks, device, left_out)

    def _hooks(
        self, strategies: Sequence[str], left_out: Mapping[str, MutableMapping[str, str]]
    ) -> dict[str, list[ConfiguredHook]]:
        """Make the hooks of every strategy; strategies share a hook where its options are the same.

        Hooks of a group that cannot be made are added to ``left_out``, by strategy and name, with the reason.
        """
        options, runner = self.options, self.runner
        group = options.with_hooks or runner.default_group
        own = {strategy: asked(runner, "strategy_hooks", strategy) for strategy in strategies}
        least = always_on() if self._keeps() else []
        names = {
            strategy: select_hooks(group, [*options.hooks, *own[strategy]], runner.hook_sets, runner.name) or least
            for strategy in strategies
        }
        given, made = options.hook_options, list[ConfiguredHook]()
        refuse_idle_options(given, {name for active in names.values() for name in active})
        return {
            strategy: build_hooks(
                *(names[strategy], given, own[strategy], made),
                required=[*options.hooks, *own[strategy]],
                left_out=left_out[strategy],
            )
            for strategy in strategies
        }

    def _keeps(self) -> bool:
        """Return whether any sink keeps the metrics."""
        return any(sink.keeps for sink in self.make_sinks())

    def _with_references(self, setups: Sequence[Setup]) -> list[Setup]:
        """Load the reference solution of every strategy that has one and a hook that asks for it."""
        given = self.options.reference
        asking = [any(asks_for_reference(item.hook) for item in setup.hooks) for setup in setups]
        require(
            given is None or any(asking),
            f"--reference {given} is given, but no hook that is on measures against a reference; add one of "
            f"--hooks {', '.join(hook.name for hook in HookRegistry if asks_for_reference(hook))}.",
        )
        return [
            replace(setup, reference=self._reference(setup.folder, setup.seed)) if asks else setup
            for setup, asks in zip(setups, asking, strict=True)
        ]

    def _reference(self, folder: RunFolder, seed: int) -> Reference | None:
        """Load a reference and tell how its run differs; one that nobody asked for may be of another model."""
        runner, given = self.runner, self.options.reference
        path = find_reference(given, (folder.weights, folder.reference), runner.name, folder.strategy, seed)
        if path is None:
            return None
        seed_everything(runner.config.seed)
        model = runner.build_model().to(runner.device)
        try:
            reference = load_reference(path, model)
        except UsageError as error:
            if given is not None:
                raise
            notice(f"Strategy {folder.strategy!r} has no reference solution: {error}")
            return None
        said = f"The reference of strategy {folder.strategy!r}, {path}, comes from a run that"
        try:
            if differing := differences_from_run(path, runner.config, model):
                notice(f"{said} differs: {'; '.join(differing)}.")
        except UsageError as error:
            notice(f"{said} may differ: {error}")
        return reference

    def _runs(self, setups: Sequence[Setup]) -> Iterator[StrategyRun]:
        """Build one run after the other: from the same state of the experiment, with hooks that remember no other."""
        fresh = deepcopy(asked(self.runner, "state_dict"))
        for index, setup in enumerate(setups):
            config = replace(self.runner.config, seed=setup.seed)
            if config != self.runner.config:
                self.runner = type(self.runner)(config, self.runner.device)
                fresh = deepcopy(asked(self.runner, "state_dict"))
            self.runner.load_state_dict(deepcopy(fresh))
            run = self._built(setup)
            if index:
                run.manager.hooks.reset()
            yield run

    def _built(self, setup: Setup) -> StrategyRun:
        runner, options = self.runner, self.options
        digest_every = 0 if options.digest_every is None and not self._keeps() else options.digest_every
        task, state = build_run(runner, setup.folder.strategy, options.parallel)
        weights, live = None, dict(state.model.named_parameters())
        if setup.reference is not None:  # whole, while ranks may hold parts
            weights = {name: laid_out_like(value, live[name]) for name, value in setup.reference.weights.items()}
        manager = HookManager(
            [item.hook for item in setup.hooks],
            task,
            state,
            loop=runner.loop,
            required=[*options.hooks, *runner.strategy_hooks(setup.folder.strategy)],
            left_out=setup.left_out,
            sinks=self.make_sinks() if self._elsewhere is None else [],
            on_error=options.on_hook_error,
            audit=options.audit_hooks,
            guardian_device=setup.guardian_device,
            profile=options.profile_hooks,
            offload_state=options.hook_offload_state,
            reference_weights=weights,
        )
        record = replace(setup.record, environment=environment(task.model, task.ranks))
        if setup.resumed is not None:
            tell_of_environment(setup.resumed, record, exact=options.exact)
        every, keep = options.save_checkpoints, options.keep_checkpoints
        plan = CheckpointPlan(every, options.checkpoint_every_steps, keep, digest_every)
        info = manager.run_info(runner.name, setup.folder.strategy, setup.folder.path)
        run = StrategyRun(info, runner, manager, setup.folder, record, self.display, plan, self._signals, setup.resumed)
        run.reference = None if setup.reference is None else setup.reference.path
        return run


def asks_for_reference(hook: TrainingHook | type[TrainingHook]) -> bool:
    """Return whether a hook measures against a reference solution."""
    return hook.needs_reference_weights or hook.uses_reference_weights
