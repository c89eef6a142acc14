"""Construction of the training task and its state from an experiment and a strategy."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from ..data import RowsOfRank, derived_seed
from ..errors import unknown
from ..state import RandomStreams, TrainingState, seed_everything
from ..state.generators import generators_of
from ..state.parameter_groups import split_groups
from ..training import Parallel, Precision, Ranks, TrainingTask, compile_model, parallelise
from .checks import call_method, plain
from .runner import ExperimentRunner


def chosen_strategies(runner: ExperimentRunner[Any], selected: Sequence[str]) -> list[str]:
    """Return the strategies that the user selected; none or ``all`` selects every one.

    Dashes and underscores are equivalent.

    Raises:
        UsageError: for an unknown strategy.
    """
    if not selected:
        return list(runner.strategies)
    by_key = {strategy.replace("-", "_"): strategy for strategy in runner.strategies}
    chosen: list[str] = []
    for name in selected:
        if name != "all" and name.replace("-", "_") not in by_key:
            raise unknown(f"strategy of {runner.name}:", name, [*runner.strategies, "all"])
        chosen += runner.strategies if name == "all" else [by_key[name.replace("-", "_")]]
    return list(dict.fromkeys(chosen))


def build_run(
    runner: ExperimentRunner[Any], strategy: str, parallel: Parallel | None = None
) -> tuple[TrainingTask, TrainingState]:
    """Seed, then build the training task of one strategy; initial weights are equal for all strategies and ranks.

    Ranks that train in ``parallel`` share the rows of each batch, so that together they train like one process.
    """
    config = runner.config
    seed_everything(config.seed)
    model = call_method(runner, "prepare_model", call_method(runner, "build_model").to(runner.device), strategy)
    trained, ranks = model, Ranks()
    if parallel is not None:
        plan = runner.tensor_parallel_plan(model) if "tp" in parallel else {}
        trained = parallelise(model, parallel, plan)
        ranks = Ranks.of(model, trained if trained is not model else None, uneven=True)  # type: ignore[arg-type]
    optimizer = call_method(runner, "build_optimizer", model)
    scheduler = call_method(runner, "build_scheduler", optimizer)
    if parallel is not None:
        split_groups(optimizer, scheduler)
    loader = call_method(runner, "build_loader", strategy)
    if ranks.size > 1:
        loader = RowsOfRank(loader, ranks.index, ranks.size)
    if ranks.index:  # otherwise all ranks would draw the same dropout masks
        seed_everything(derived_seed(config.seed, "rank", ranks.index))
    if config.with_compile:
        compile_model(model)
    precision = Precision.of(config.amp, runner.device)
    task = TrainingTask(
        trained,
        optimizer,
        loader,
        precision.autocast(partial(call_method, runner, "compute_loss")),
        evaluate=precision.autocast(partial(_plain_result, runner, "evaluate")),
        scaler=precision.scaler(),
        should_stop=partial(_plain_result, runner, "should_stop"),
        scheduler=scheduler,
        scheduler_interval=runner.scheduler_interval,
        scheduler_metric=runner.best_metric,
        length=runner.length,
        log_every=config.log_every,
        eval_every=config.eval_every,
        snapshot_every=config.snapshot_every,
        accumulation_steps=config.accumulation_steps,
        config=config,
        ranks=ranks,
    )
    streams = RandomStreams(config.seed, (*loader.generators(), *generators_of(runner.compute_loss, runner.evaluate)))
    extras = {"experiment": runner}
    return task, TrainingState(model, optimizer, streams, scheduler=scheduler, scaler=task.scaler, extras=extras)


def _plain_result(runner: Any, method: str, argument: Any) -> Any:
    """Call a method of an experiment, and return its checked value without tensors."""
    return plain(call_method(runner, method, argument))
