"""The benchmarks run, compare equal work and count correctly; nothing here is timed."""

import math
import multiprocessing
from dataclasses import replace

import pytest
import torch
from loopscope.engine import HookManager
from loopscope.experiments.mod_arithmetic.runner import QUICK
from loopscope.loops import step_loop
from loopscope.training_hooks.clipping import GradClip

from tests.benchmarks import tied_cost
from tests.benchmarks.__main__ import BENCHMARKS
from tests.benchmarks.memory_cost import BARE, HOOKS, MUTATING, measure, memory_rows
from tests.benchmarks.report import data, misses
from tests.benchmarks.rows import MICROSECONDS, PER_SECOND, Effort, Row
from tests.benchmarks.subjects import Subject, bare_steps, mod_arithmetic
from tests.benchmarks.tied_memory import peak_of_tensors
from tests.benchmarks.timing import Spread, Turns, difference, in_slices, ratio
from tests.support.processes import own_process

TINY = QUICK | {"train_size": 96, "test_size": 32, "embed_dim": 16, "ff_dim": 32}
SLOW_BENCHMARKS = (
    *("each", "overflow", "lowbit", "others", "ranks", "checkpoints", "tied", "health", "attach", "whole", "compiled"),
)
"""Benchmarks that together take three minutes and whose code other tests also run."""
WITHOUT_BARS = ("each", "others", "record", "whole")
ROWS = {
    "each": "activations attention_logits first_nonfinite matrix_updates moe_router optimizer_health output_logits "
    "parameter_norms qk_clip token_loss training_checks"
}
"""Rows that a benchmark has at the smallest effort, too; a run of one epoch is too short for some other hooks."""
LOOK = Effort(share=0.0, quick=TINY, paper=TINY)


def weights(subject: Subject) -> list[torch.Tensor]:
    return list(subject.task.model.parameters())


def marks(name: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a benchmark's test."""
    on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
    return [pytest.mark.slow] * (name in SLOW_BENCHMARKS) + on_gpu * (name == "gpu")


@pytest.mark.slow_rows("sizes", "record", "groups", "rewinds", "fire", "sinks")
@pytest.mark.process
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in BENCHMARKS if name != "memory"])
def test_every_benchmark_yields_rows_of_finite_numbers(name):
    _, parts = BENCHMARKS[name]
    rows = [row for benchmark in parts for row in benchmark(LOOK)]
    assert name in WITHOUT_BARS or len({row.figure for row in rows if row.result}) >= 1
    figures = {row.figure for row in rows}
    assert figures
    assert figures >= set(ROWS.get(name, "").split())
    assert all(math.isfinite(number) for row in rows for number in row.numbers)


@pytest.mark.process
def test_slices_return_in_order_and_failures_clean_up():
    """No child process remains after one of them raises."""
    assert in_slices([lambda: sum(range(10**7)), lambda: 2]) == [sum(range(10**7)), 2]
    with pytest.raises(EOFError):
        in_slices([lambda: 1, lambda: 1 // 0])
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_memory_is_counted_in_training_state_copies():
    """Only mutating hooks hold one copy of the training state."""
    measured = {kind: measure(kind, TINY) for kind in (BARE, *HOOKS)}
    alive = {row.figure: row.value.median for row in memory_rows([measured]) if row.figure.startswith("Tensors")}
    assert alive.pop(f"Tensors alive, {MUTATING}") == pytest.approx(1, abs=0.1)
    assert all(copies == pytest.approx(0, abs=0.1) for copies in alive.values())


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_bare_loop_matches_the_real_loop(max_norm):
    """The modular arithmetic model is trained with and without clipping."""
    ours, bare = mod_arithmetic(TINY), mod_arithmetic(TINY)
    ours.train(3, lambda: None, [] if max_norm is None else [GradClip(max_norm=max_norm)])
    steps = bare_steps(bare, max_norm)
    for _ in range(3):
        next(steps)
    assert all(map(torch.equal, weights(ours), weights(bare)))


@pytest.mark.slow
@own_process
def test_bare_language_model_loop_matches_real_loop():
    ours, bare = (tied_cost.language_model(tied_cost.TINY) for _ in range(2))
    step_loop(replace(ours.task, length=3), HookManager((), ours.task, ours.state, loop="step"))
    steps = tied_cost.bare_steps(bare.task, bare.tokens)
    for _ in range(3):
        next(steps)
    assert all(map(torch.equal, ours.task.model.parameters(), bare.task.model.parameters()))


def test_tensor_peak_counts_only_live_tensors():
    def work() -> None:
        first = torch.ones(1000)
        second = first + first
        del first
        second.sum()

    assert peak_of_tensors(work) == pytest.approx(8000, abs=100)


def test_functions_alternate_in_reversed_rounds():
    """Each function is called twice per turn."""
    calls = []
    turns = Turns([lambda: calls.append("a"), lambda: calls.append("b")], calls=2, after=lambda: calls.append("|"))
    turns.round()
    turns.round()
    assert "".join(calls) == "aa|bb|bb|aa|"
    assert [len(seconds) for seconds in turns.seconds] == [2, 2]


def test_neighbours_are_compared_block_by_block():
    assert difference([3.0, 13.0, 5.0], [1.0, 10.0, 4.0]) == Spread(median=2.0, best=2.0, noise=1.0)
    assert ratio([3.0, 20.0, 4.0], [1.0, 10.0, 4.0]) == Spread(median=2.0, best=3.0, noise=1.0)


def test_row_passes_up_to_its_limit():
    """The table and the list of misses show the result."""
    row = Row("A call", "nothing", MICROSECONDS, Spread(2e-6, 1e-6, 5e-7), 2e-6)
    rows = {"Calls": [row, replace(row, figure="Another", bar=1e-6), replace(row, figure="A third", bar=None)]}
    assert [each.result for each in rows["Calls"]] == ["pass", "miss", ""]
    assert misses(rows) == "1 of 2 bars met; missed: Another"
    assert "| A call  | nothing |   2.0 µs | 1.0 µs | 0.5 µs | ≤ 2.0 µs | pass   |" in data(rows)


@pytest.mark.parametrize(("rate", "result"), [(3.0, "pass"), (2.0, "pass"), (1.0, "miss")])
def test_row_passes_from_its_floor(rate, result):
    """A rate equal to the floor passes."""
    row = Row("Scalars", "nothing", PER_SECOND, Spread(rate, rate, 0.0), floor=2.0)
    assert row.cells()[-2:] == ["≥ 2 /s", result]
    assert misses({"Sinks": [row]}).startswith("1 of 1" if result == "pass" else "0 of 1")
