"""A session, which is one run of the command: check everything first, then train the strategies in turn."""

import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..checkpoints import Checkpoint, CheckpointPlan, Signals, open_checkpoint
from ..errors import RunNotice, UsageError, notice, require, short_path
from ..hooks import HookRegistry, MetricSink, TrainingHook
from ..hooks.selection import ConfiguredHook, always_on, build_hooks, create_sinks, refuse_idle_options, select_hooks
from ..option_words import option_text
from ..preserved_streams import preserved_streams
from ..state import seed_everything
from ..state.settings import deterministic
from ..tensors import laid_out_like
from ..training import Ranks, joined_process_group, quiet_graph_breaks
from .checks import call_method, check_device, check_experiment
from .config import CHECKPOINTS, ExperimentConfig, RunOptions
from .records import REWINDS, RunRecord, seed_name
from .reference import Reference, differences_from_run, find_reference, load_reference
from .resume import MAY_DIFFER, check_environment, find_checkpoint
from .run import Display, Run, create_manager
from .run_description import environment, planned_record
from .run_folder import OVERWRITING, RunFolder
from .runner import ExperimentRunner
from .strategy_training import StrategyTraining
from .task_building import build_run, chosen_strategies
from .validation import EarlierRun, StepRange, rewind, validate

OVERWRITING_FROM_PYTHON = "choose another output_dir in the config, or replace it: RunOptions(overwrite=True)"


@dataclass(frozen=True)
class StrategyPlan:
    """The plan for one strategy: the results of all checks that precede the building of any strategy."""

    seed: int
    folder: RunFolder
    record: RunRecord
    hooks: Sequence[ConfiguredHook]
    left_out: Mapping[str, str]
    """The hooks of a group that could not be created, by name, with the reasons."""
    reference: Reference | None = None
    resumed: Checkpoint | None = None
    summary: dict[str, Any] | None = None
    """The summary of a completed run, which is not trained again."""


@dataclass
class Session:
    """An experiment with the options of its run; ``make_sinks`` returns new sinks for each strategy, or their names."""

    runner: ExperimentRunner[Any]
    options: RunOptions
    make_sinks: Callable[[], Sequence[str | MetricSink]] = list
    display: Display = field(default_factory=Display)
    signals: Signals = field(default_factory=Signals)
    _output_folder: Path | None = None
    """The output folder that replaces that of the config."""

    def run(self) -> list[dict[str, Any]]:
        """Train every strategy and return their summaries; with ``resume``, skip completed ones.

        Raises:
            UsageError: for every mistake that can be detected before the first step; nothing is written then.
        """
        with self.signals.interruptible(), self._environment() as contexts:
            session, ranks = self, Ranks.all_processes(self.options.parallel)
            if not ranks.is_main:  # other ranks write to a temporary folder, and only the main one has a display
                folder = Path(contexts.enter_context(TemporaryDirectory()))
                session = replace(self, display=Display(), _output_folder=folder)
            plans = ranks.call_on_all(session._check)
            ranks.check_equal(session._options_affecting_results(plans))
            if self.options.resume:  # all ranks resume from the checkpoints that the main one has found and checked
                main = ranks.gather([(plan.resumed and plan.resumed.folder, plan.summary) for plan in plans])[0]
                plans = [
                    replace(plan, resumed=folder and open_checkpoint(folder), summary=summary)
                    for plan, (folder, summary) in zip(plans, main, strict=True)
                ]
            trainings = session._trainings([plan for plan in plans if plan.summary is None])
            summaries = [plan.summary or next(trainings).train() for plan in plans]
        session.display.ended(summaries)
        return summaries

    @contextmanager
    def _environment(self) -> Iterator[ExitStack]:
        """Set up determinism and the process group for the body; yield a stack for further contexts."""
        with self._reproducible(), joined_process_group(self.options.parallel), ExitStack() as contexts:
            yield contexts

    @contextmanager
    def _reproducible(self) -> Iterator[None]:
        """Set up determinism for the body, and preserve the random streams of the caller."""
        with preserved_streams(), deterministic(on=not self.options.no_determinism), quiet_graph_breaks():
            yield

    def _options_affecting_results(self, plans: Sequence[StrategyPlan]) -> dict[str, Any]:
        """Return every option that affects the results, by its name in error messages."""
        options: dict[str, Any] = {"The list of runs": [(plan.folder.strategy, plan.seed) for plan in plans]}
        for record in [plan.record for plan in plans]:
            entries = {**record.config, **record.versions, **record.run}
            entries["The configuration of the hooks"] = {**record.hooks}
            options |= {name: value for name, value in entries.items() if name not in MAY_DIFFER}
        names = (*CHECKPOINTS, "digest_every", "parallel", "resume")
        return options | {name: getattr(self.options, name) for name in names}

    def planned(self) -> list[StrategyPlan]:
        """Check everything that :meth:`run` checks before it writes, without notices, and return its plan."""
        with self._reproducible(), warnings.catch_warnings():
            warnings.simplefilter("ignore", RunNotice)
            return self._check()

    def _check(self) -> list[StrategyPlan]:
        """Return the plan for every strategy; raise :class:`UsageError` for a mistake in the options."""
        options, plans = self.options, self._plans()
        advice = OVERWRITING if options.recorded else OVERWRITING_FROM_PYTHON
        for plan in plans:
            plan.folder.refuse_to_overwrite(allowed=options.overwrite or options.resume, advice=advice)
        if options.resume and self._output_folder is None:
            plans = [
                replace(plan, resumed=find_checkpoint(plan.folder, plan.record), summary=plan.folder.completed())
                for plan in plans
            ]
        return self._with_references(plans)

    def validate(self) -> dict[str, Sequence[int]]:
        """Train every strategy again and return the steps at which it equals its checkpoints, bit for bit.

        The output directory is not changed.

        Raises:
            UsageError: if a run has neither checkpoints nor digests to compare with.
            DivergedError: at the first difference; the message names the step and the tensor.
        """
        with self._environment() as contexts:
            temporary = contexts.enter_context(TemporaryDirectory())
            plans = self._plans()
            earlier_runs = [EarlierRun.of(plan.folder, plan.record) for plan in plans]
            folders = [plan.folder for plan in plans]
            moved = [replace(folder, path=Path(temporary, folder.strategy, folder.path.name)) for folder in folders]
            pairs = zip(self._with_references(plans), moved, strict=True)
            plans = [replace(plan, folder=folder) for plan, folder in pairs]
            trainings = zip(replace(self, make_sinks=list)._trainings(plans), earlier_runs, strict=True)
            return {training.folder.name: validate(training, earlier) for training, earlier in trainings}

    def rewind(self, stretch: StepRange, *, recorded: bool = True) -> tuple[Path, int, Sequence[int]]:
        """Train a stretch of a run again, from the nearest earlier checkpoint, with the hooks of this session.

        The run is in the output folder of this session, and its files are not changed. Metrics are written to a new
        folder within it, or to a temporary folder unless ``recorded``.

        Returns:
            The folder of the metrics, the step after which training started, and the steps at which the state was
            compared, bit for bit.

        Raises:
            UsageError: if the stretch cannot be trained again.
            DivergedError: if the training differs from the run.
        """
        with self._environment() as contexts:
            (plan,) = self._with_references(self._plans())
            require(plan.folder.record() is not None, f"{short_path(plan.folder.path)} contains no run.")
            earlier = EarlierRun.of(plan.folder, plan.record, is_whole=False)
            path = plan.folder.path / REWINDS / stretch.name
            if not (recorded and Ranks.all_processes(self.options.parallel).is_main):
                path = Path(contexts.enter_context(TemporaryDirectory())) / stretch.name
            folder = replace(plan.folder, path=path)
            folder.refuse_to_overwrite(allowed=True)  # an earlier rewind of the same steps is replaced
            (training,) = self._trainings([replace(plan, folder=folder)])
            compared = rewind(training, stretch, earlier)
            return path, training.resumed.step if training.resumed else 0, compared

    def _plans(self) -> list[StrategyPlan]:
        """Return the plan for every strategy and seed, after checking the experiment, the hooks and the devices."""
        options = self.options
        check_experiment(self.runner, ExperimentRunner)
        strategies = chosen_strategies(self.runner, options.strategies)
        left_out: dict[str, dict[str, str]] = {strategy: {} for strategy in strategies}
        hooks = self._build_hooks(strategies, left_out)
        if options.guardian_device:
            check_device(options.guardian_device)
        configs = [replace(self.runner.config, seed=seed) for seed in options.seeds] or [self.runner.config]
        pairs = [(strategy, config) for config in configs for strategy in strategies]
        return [self._plan(strategy, config, hooks[strategy], left_out[strategy]) for strategy, config in pairs]

    def _plan(
        self, strategy: str, config: ExperimentConfig, hooks: Sequence[ConfiguredHook], left_out: Mapping[str, str]
    ) -> StrategyPlan:
        """Return the plan for one strategy and seed, without parts that need the model."""
        options, name = self.options, self.runner.name
        fields: dict[str, Any] = {"experiment": name, "strategy": strategy, "config": config.as_dict()}
        record = planned_record(hooks, options, options=options.recorded, changed=options.changed, **fields)
        # Absolute, so that a run whose code changes the working directory keeps its folder.
        path = (self._output_folder or Path(self.runner.config.output_dir)).absolute() / name / strategy
        folder = RunFolder(path / seed_name(config.seed) if options.seeds else path, strategy)
        return StrategyPlan(config.seed, folder, record, hooks, left_out)

    def _build_hooks(
        self, strategies: Sequence[str], left_out: Mapping[str, MutableMapping[str, str]]
    ) -> dict[str, list[ConfiguredHook]]:
        """Create the hooks of every strategy; strategies share a hook whose options are equal.

        Hooks of a group that cannot be created are added to ``left_out``, by strategy and name, with the reason.
        """
        options, runner = self.options, self.runner
        group = options.with_hooks or runner.default_group
        strategy_hooks = {strategy: call_method(runner, "strategy_hooks", strategy) for strategy in strategies}
        minimum = always_on() if self._keeps_metrics() else []
        required = {strategy: [*options.hooks, *strategy_hooks[strategy]] for strategy in strategies}
        selected = {name: select_hooks(group, hooks, runner.hook_sets, runner.name) for name, hooks in required.items()}
        names = {strategy: selected[strategy] or minimum for strategy in strategies}
        given, shared_hooks = options.hook_options, list[ConfiguredHook]()
        refuse_idle_options(given, {name for active in names.values() for name in active})
        return {
            strategy: build_hooks(
                *(names[strategy], given, strategy_hooks[strategy], shared_hooks),
                required=required[strategy],
                left_out=left_out[strategy],
            )
            for strategy in strategies
        }

    def _keeps_metrics(self) -> bool:
        """Return whether any sink stores the metrics."""
        return any(sink.keeps for sink in create_sinks(self.make_sinks()))

    def _with_references(self, plans: Sequence[StrategyPlan]) -> list[StrategyPlan]:
        """Load the reference solution of every strategy that has one and a hook that uses it."""
        given = self.options.reference
        uses = [any(uses_reference(item.hook) for item in plan.hooks) for plan in plans]
        require(
            given is None or any(uses),
            f"{option_text('reference', given)} has no effect, since no active hook measures against a reference; "
            f"enable one of {', '.join(hook.name for hook in HookRegistry if uses_reference(hook))}.",
        )
        return [
            replace(plan, reference=self._reference(plan.folder, plan.seed)) if is_used else plan
            for plan, is_used in zip(plans, uses, strict=True)
        ]

    def _reference(self, folder: RunFolder, seed: int) -> Reference | None:
        """Load a reference and report how its run differs.

        A reference that the user has not given is skipped with a notice if it belongs to another model.
        """
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
        subject = f"The reference of strategy {folder.strategy!r}, {path}, comes from a run that"
        try:
            if differing := differences_from_run(path, runner.config, model):
                notice(f"{subject} differs: {'; '.join(differing)}.")
        except UsageError as error:
            notice(f"{subject} may differ: {error}")
        return reference

    def _trainings(self, plans: Sequence[StrategyPlan]) -> Iterator[StrategyTraining]:
        """Build the training of each plan in turn, from the same state of the experiment and with reset hooks."""
        initial_state = deepcopy(self.runner.state_dict())
        for index, plan in enumerate(plans):
            config = replace(self.runner.config, seed=plan.seed)
            if config != self.runner.config:
                self.runner = type(self.runner)(config, self.runner.device)
                initial_state = deepcopy(self.runner.state_dict())
            self.runner.load_state_dict(deepcopy(initial_state))
            training = self._build(plan)
            if index:
                training.manager.hooks.reset()
            yield training

    def _build(self, plan: StrategyPlan) -> StrategyTraining:
        runner, options = self.runner, self.options
        digest_every = 0 if options.digest_every is None and not self._keeps_metrics() else options.digest_every
        task, state = build_run(runner, plan.folder.strategy, options.parallel)
        weights, parameters = None, dict(state.model.named_parameters())
        if plan.reference is not None:  # complete tensors, while the parameters may be sharded
            weights = {name: laid_out_like(value, parameters[name]) for name, value in plan.reference.weights.items()}
        manager = create_manager(
            options,
            plan.hooks,
            task,
            state,
            loop=runner.loop,
            required=[*options.hooks, *runner.strategy_hooks(plan.folder.strategy)],
            left_out=plan.left_out,
            sinks=create_sinks(self.make_sinks()) if self._output_folder is None else [],
            reference_weights=weights,
        )
        record = replace(plan.record, environment=environment(task.model, task.ranks))
        if plan.resumed is not None:
            check_environment(plan.resumed, record, exact=options.exact)
        every, keep = options.save_checkpoints, options.keep_checkpoints
        checkpoints = CheckpointPlan(every, options.checkpoint_every_steps, keep, digest_every)
        info = manager.run_info(runner.name, plan.folder.strategy, plan.folder.path)
        run = Run(manager, plan.folder, record, info, self.display, compared_metrics=runner.compared_metrics)
        reference = None if plan.reference is None else plan.reference.path
        return StrategyTraining(run, runner, checkpoints, self.signals, plan.resumed, reference)


def uses_reference(hook: TrainingHook | type[TrainingHook]) -> bool:
    """Return whether a hook measures against a reference solution."""
    return hook.needs_reference_weights or hook.uses_reference_weights
