"""From an experiment and a strategy to what is trained."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from ..data import RowsOfRank, derived_seed
from ..errors import unknown
from ..state import RandomStreams, TrainingState, seed_everything
from ..training import Parallel, Precision, Ranks, TrainingTask, compile_model, split_groups, spread
from .checks import asked, plain
from .runner import ExperimentRunner


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


def build_run(
    runner: ExperimentRunner[Any], strategy: str, parallel: Parallel | None = None
) -> tuple[TrainingTask, TrainingState]:
    """Seed, then build what one strategy trains; the same weights for every strategy of a seed, and on every rank.

    Ranks that train in ``parallel`` share the rows of each batch, so that they train what one process does.
    """
    config = runner.config
    seed_everything(config.seed)
    model = asked(runner, "prepare_model", asked(runner, "build_model").to(runner.device), strategy)
    trained, ranks = model, Ranks()
    if parallel is not None:
        plan = asked(runner, "tensor_parallel_plan", model) if "tp" in parallel else {}
        trained = spread(model, parallel, plan)
        ranks = Ranks.of(model, trained if trained is not model else None, uneven=True)  # type: ignore[arg-type]
    optimizer = asked(runner, "build_optimizer", model)
    scheduler = asked(runner, "build_scheduler", optimizer)
    if parallel is not None:
        split_groups(optimizer, scheduler)
    loader = asked(runner, "build_loader", strategy)
    if ranks.size > 1:
        loader = RowsOfRank(loader, ranks.index, ranks.size)
    if ranks.index:  # or all ranks would draw one dropout mask
        seed_everything(derived_seed(config.seed, "rank", ranks.index))
    if config.with_compile:
        compile_model(model)
    precision = Precision.of(config.amp, runner.device)
    task = TrainingTask(
        trained,
        optimizer,
        loader,
        precision.autocast(partial(asked, runner, "compute_loss")),
        evaluate=precision.autocast(lambda model: plain(asked(runner, "evaluate", model))),
        scaler=precision.scaler(),
        should_stop=lambda numbers: plain(asked(runner, "should_stop", numbers)),
        target_grad=runner.target_grad,
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
    streams = RandomStreams(config.seed, loader.generators())
    extras = {"experiment": runner}
    return task, TrainingState(model, optimizer, streams, scheduler=scheduler, scaler=task.scaler, extras=extras)
