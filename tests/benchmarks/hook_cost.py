"""Costs of the shipped hooks: each of them, in groups, and the two most expensive building blocks."""

import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from loopscope import training_hooks
from loopscope.engine import CommitRecord, HookManager
from loopscope.engine.model_context import Access, ModelContext
from loopscope.errors import RunNotice
from loopscope.experiments.mod_arithmetic import ModArithmeticRunner
from loopscope.experiments.mod_arithmetic.runner import QUICK, ModArithmeticConfig
from loopscope.hooks import STEP_POINTS, HookPoint, HookRegistry, ModelDataContext, RunInfo, windows_for
from loopscope.hooks.selection import bulk_hooks
from loopscope.loops import epoch_loop
from loopscope.runs import RunOptions, Session, strategy_training
from loopscope.runs.session import uses_reference
from loopscope.tensors import copied, trainable
from loopscope.training import TrainingTask, forward_backward
from loopscope.training_hooks.counterfactual import Counterfactual
from torch import Tensor

from tests.benchmarks.rows import MILLISECONDS, PERCENT, TIMES, Effort, Row
from tests.benchmarks.subjects import Subject, mixture_of_experts, mod_arithmetic
from tests.benchmarks.timing import Spread, Turns, clock, in_slices, ratio

assert training_hooks.__all__
Summary = Mapping[str, Any]
PRODUCT_IN_PASSES = 3
"""Forward-backward passes equivalent to a Hessian-vector product: a gradient, and its gradient."""
FORWARD_IN_PASSES = 1 / 3
PARALLEL_RUNS = 6
"""Number of consecutive bare runs that are compared with a run with all hooks, which takes about as long."""


class Measured(ModArithmeticRunner):
    """The experiment with one more group: the observers that are called only between epochs."""

    @property
    def hook_sets(self) -> Mapping[str, Sequence[str]]:
        return {**super().hook_sets, "epoch_end": epoch_end_observers()}


def train(effort: Effort, epochs: int, **options: Any) -> Summary:
    """Train one strategy as ``loopscope run`` does, without console or files of metrics, and return its summary.

    The reference solution of the hooks that want one is the weights of a first epoch.
    """
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", RunNotice)
        warnings.filterwarnings("ignore", ".* spiked at step")
        if options:
            _session(effort, 1, Path(folder, "first"), {}).run()
        reference = {"reference": Path(folder, "first")} if _wants_reference(options) else {}
        (summary,) = _session(effort, epochs, Path(folder, "run"), options | reference).run()
        return summary


def _session(effort: Effort, epochs: int, folder: Path, options: Mapping[str, Any]) -> Session:
    config = ModArithmeticConfig(**effort.quick | {"max_epochs": epochs, "output_dir": folder})
    return Session(Measured(config), RunOptions(strategies=["stride"], budget=None, **options))


def _wants_reference(options: Mapping[str, Any]) -> bool:
    named = [HookRegistry.get(name) for name in options.get("hooks", [])]
    return "with_hooks" in options or any(map(uses_reference, named))


def seconds(summary: Summary) -> float:
    """Return the time in the loop, with hooks and evaluations."""
    return float(summary["seconds"]["training"])


def cpu_time(function: Callable[..., Summary], *arguments: Any, **options: Any) -> Summary:
    """Call a function in a separate process whose runs record CPU time instead of wall-clock time."""
    with mock.patch.object(strategy_training, "perf_counter", clock):
        return function(*arguments, **options)


def epoch_end_observers() -> list[str]:
    """Return the names of the observers that are called only between epochs."""
    names = bulk_hooks("observers")
    windows = {
        name: windows_for(HookRegistry.get(name).hook_points, HookRegistry.get(name).loop_points, "epoch")
        for name in names
    }
    return [name for name in names if not STEP_POINTS & windows[name].keys()]


class TimedManager(HookManager):
    """A manager that records the time of every visit at POST_EPOCH."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.seconds: list[float] = []

    def fire(self, point: HookPoint) -> None:
        begin = clock()
        super().fire(point)
        if point is HookPoint.POST_EPOCH:
            self.seconds.append(clock() - begin)


def observers_at_the_end_of_epochs(effort: Effort) -> Iterator[Row]:
    """Compare the visits of all observers at POST_EPOCH with an epoch of the same run."""
    subject, epochs = mod_arithmetic(effort.quick), max(4, effort.times(20))
    task, state = replace(subject.task, length=epochs), subject.state
    hooks = [HookRegistry.get(name)() for name in epoch_end_observers()]
    reference = copied(trainable(task.model))
    manager = TimedManager(hooks, task, state, required=(), reference_weights=reference)
    run = _run_info(task, reference)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        manager.start_hooks(run)
        begin = clock()
        epoch_loop(task, manager)
        epoch_seconds = clock() - begin
    epoch = (epoch_seconds - sum(manager.seconds)) / epochs
    shares = [seconds / epoch for seconds in manager.seconds[2:]]
    against = f"an epoch of {epoch * 1e3:.0f} ms, quick preset"
    yield Row("Observers at POST_EPOCH, together", against, PERCENT, Spread.of(shares), 0.05)


def _run_info(task: TrainingTask, reference: Mapping[str, Tensor] | None = None) -> RunInfo:
    return RunInfo(
        experiment="mod_arithmetic",
        strategy="stride",
        output_dir=Path("unused"),
        task=task,
        loop="epoch",
        seed=0,
        optimizer_class=type(task.optimizer),
        reference_weights=reference,
    )


def groups_of_observers(effort: Effort) -> Iterator[Row]:
    """Compare runs with observers with bare runs, in slices of their time."""
    epochs, rounds = max(2, effort.times(25)), effort.times(3)
    kinds: dict[str, dict[str, Any]] = {
        "bare": {},
        "epoch end": {"with_hooks": "epoch_end"},
        "observers": {"with_hooks": "observers"},
    }
    runs = [partial(cpu_time, train, effort, epochs, **options) for options in kinds.values()]
    taken = [map(seconds, in_slices(runs)) for _ in range(rounds)]
    found = dict(zip(kinds, map(list, zip(*taken, strict=True)), strict=True))
    against = f"bare run of {epochs} epochs, quick preset, {min(found['bare']) / epochs * 1e3:.0f} ms an epoch"
    label = "The same with SNAPSHOT and the loop's values for hooks"
    yield Row(label, against, TIMES, ratio(found["epoch end"], found["bare"]))
    yield Row("--with-hooks observers", against, TIMES, ratio(found["observers"], found["bare"]), 1.25)


def passes(summary: Summary) -> float:
    """Return the passes of hooks through the model, in forward-backward passes of a whole batch."""
    weights = {
        "forward": FORWARD_IN_PASSES,
        "forward_backward": 1.0,
        "second_backward": PRODUCT_IN_PASSES - 1.0,
        "hessian_product": PRODUCT_IN_PASSES,
    }
    kinds = summary["hook_samples"].values()
    return sum(rows * weights[kind] for counts in kinds for kind, rows in counts.items()) / QUICK["batch_size"]


def several(function: Callable[..., Summary], count: int, *arguments: Any, **options: Any) -> list[Summary]:
    """Call a function several times and return the results."""
    return [function(*arguments, **options) for _ in range(count)]


def full_group(effort: Effort) -> Iterator[Row]:
    """Compare a run with all hooks with the cost of its passes at the speed of simultaneous bare runs."""
    epochs = effort.times(60)
    kinds: list[tuple[int, dict[str, Any]]] = [(PARALLEL_RUNS, {}), (1, {"with_hooks": "full"})]
    runs = [partial(several, partial(cpu_time, train, effort, epochs, **options), count) for count, options in kinds]
    bare, (full,) = in_slices(runs)
    rate = sum(map(seconds, bare)) / sum(summary["steps"] for summary in bare)
    expected = rate * (full["steps"] + passes(full))
    against = f"{full['steps']:,} steps and {passes(full):,.0f} more forward-backward passes at {rate * 1e3:.2f} ms"
    label = f"--with-hooks full, {epochs} epochs"
    yield Row(label, against, TIMES, Spread.of([seconds(full) / expected]), 1.1)
    yield Row(label, "bare run", TIMES, Spread.of([seconds(full) / (rate * full["steps"])]))


def each_hook(effort: Effort) -> Iterator[Row]:
    """Read the cost of every hook from profiled runs: all together, and those that this run leaves out."""
    epochs = effort.times(20)
    bare = seconds(train(effort, epochs)) / epochs
    debug = [hook.name for hook in HookRegistry if hook.debug]
    full = train(effort, epochs, with_hooks="full", hooks=debug, profile_hooks=True)
    costs = {name: cost for name, cost in full["hook_profile"].items() if name not in full["hooks_left_out"]}
    # qk_clip commits, so that no group contains it.
    costs["qk_clip"] = train(effort, epochs, hooks=["qk_clip"], profile_hooks=True)["hook_profile"]["qk_clip"]
    rows = [_profiled(name, cost, epochs, bare, full["hook_samples"].get(name, {})) for name, cost in costs.items()]
    yield from sorted([*rows, routers(effort)], key=lambda row: row.figure)


def _profiled(name: str, cost: Summary, epochs: int, bare: float, samples: Summary, model: str = "") -> Row:
    """Return the row of a hook from its profile over some epochs, which take ``bare`` seconds each without hooks."""
    kept = f"{cost.get('state_bytes', 0) / 1e6:.1f} MB kept"
    sent = ", ".join(f"{rows:,} {kind}" for kind, rows in samples.items())
    share = f"{cost['seconds'] / epochs / bare:.1%} of an epoch{model}"
    against = f"{cost['calls'] / epochs:.1f} calls and {share}, {kept}{sent and '; samples: ' + sent}"
    return Row(name, against, MILLISECONDS, Spread.of([cost["seconds"] / cost["calls"]]))


def routers(effort: Effort) -> Row:
    """Read the cost of moe_router from a profiled run of a mixture of experts; the experiment has no routers."""
    epochs = effort.times(5)
    clocked = []
    for hooks in ([], [HookRegistry.get("moe_router")()]):
        subject = mixture_of_experts()
        task, state = replace(subject.task, length=epochs), subject.state
        manager = HookManager(hooks, task, state, profile=True)
        manager.start_hooks(_run_info(task))
        begin = clock()
        epoch_loop(task, manager)
        clocked.append(clock() - begin)
    profile = manager.profiler.report()["moe_router"]
    return _profiled("moe_router", profile, epochs, clocked[0] / epochs, {}, " of a mixture of 8 experts")


def hessian_product(effort: Effort) -> Iterator[Row]:
    """Compare an exact Hessian-vector product with forward and backward of the same batch."""
    subject = mod_arithmetic(effort.quick)
    subject.train(1, lambda: None)
    context = _context(subject)
    batch = next(iter(subject.task.loader))
    direction = copied(trainable(subject.task.model))
    turns = Turns(
        [lambda: context.hessian_vector_product(direction, batch), lambda: forward_backward(subject.task, batch)],
        calls=5,
    )
    for _ in range(effort.times(40)):
        turns.round()
    yield Row("Exact Hessian-vector product", "forward and backward of one batch", TIMES, ratio(*turns.seconds), 3.3)


def _context(subject: Subject) -> ModelDataContext:
    task, state = subject.task, subject.state
    access = Access(
        task,
        state,
        CommitRecord("bench", frozenset()),
        list(task.model.parameters()),
        mutates=False,
        device=None,
        stream=("bench", "PRE_STEP", 1),
        loop="epoch",
    )
    return ModelContext(access)


def counterfactual(effort: Effort) -> Iterator[Row]:
    """Compare the cost of a counterfactual with K epochs of its run."""
    epochs, shuffles = effort.times(6), Counterfactual().k
    found: list[list[float]] = [[], []]
    for _ in range(effort.times(5)):
        bare, with_hook = (seconds(train(effort, epochs, hooks=hooks)) for hooks in ([], ["counterfactual"]))
        found[0].append(with_hook - bare)
        found[1].append(shuffles * bare)
    yield Row(f"Counterfactual with {shuffles} shuffles", f"{shuffles} bare epochs", TIMES, ratio(*found), 1.05)
