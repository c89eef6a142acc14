"""The experiment mod_arithmetic: its pairs, their orders, and strategies that differ in the order only."""

import math
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loopscope import experiments, sinks, training_hooks
from loopscope.cli import main
from loopscope.experiments.mod_arithmetic import ModArithmeticRunner
from loopscope.experiments.mod_arithmetic.runner import STRATEGIES, ModArithmeticConfig, build_order, draw_pairs, sums
from loopscope.runs import build_run
from torch import Tensor

from tests.framework.runs.small_experiment import read_json
from tests.support.cases import slow_unless
from tests.support.processes import own_process

FILLED = (experiments, sinks, training_hooks)
TINY: dict[str, Any] = {
    **{"p": 11, "train_size": 60, "test_size": 40, "batch_size": 16, "epochs": 2},
    **{"embed_dim": 8, "num_heads": 2, "layers": 1, "ff_dim": 16, "target_acc": 1.0},
}


def tiny(**options: Any) -> ModArithmeticRunner:
    return ModArithmeticRunner(ModArithmeticConfig(**(TINY | options)))


def rows(pairs: Tensor) -> list[tuple[int, int]]:
    return [tuple(pair) for pair in pairs.tolist()]


def epoch_of(runner: ModArithmeticRunner, strategy: str, epoch: int = 0) -> Tensor:
    """Return the pairs of one epoch in their order."""
    return torch.cat([inputs for inputs, _ in runner.build_loader(strategy).batches(epoch)])


# Pairs


@pytest.mark.longer
@given(p=st.integers(2, 40), share=st.floats(0.01, 0.99), seed=st.integers(0, 2**63 - 1))
@settings(deadline=None, max_examples=50)
def test_train_and_test_pairs_are_disjoint(p: int, share: float, seed: int) -> None:
    """Together the training and test pairs contain every pair of residues exactly once."""
    train_size = max(1, math.floor(share * p * p))
    train, test = draw_pairs(p, train_size, p * p - train_size, seed)
    assert len(train) == train_size
    assert sorted(rows(train) + rows(test)) == [(a, b) for a in range(p) for b in range(p)]


def test_pairs_depend_on_seed_only() -> None:
    """Draws from the global generator do not change the pairs, and another seed does."""
    first = draw_pairs(31, 100, 50, 1)
    torch.rand(3)
    again, other = draw_pairs(31, 100, 50, 1), draw_pairs(31, 100, 50, 2)
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_pairs_are_drawn_uniformly() -> None:
    counts = torch.zeros(25)
    for seed in range(400):
        train, _ = draw_pairs(5, 10, 5, seed)
        counts[train[:, 0] * 5 + train[:, 1]] += 1
    share, draws = 10 / 25, 400
    assert ((counts / draws - share).abs() < 5 * math.sqrt(share * (1 - share) / draws)).all()


@pytest.mark.longer
def test_drawing_paper_pairs_is_cheap() -> None:
    """Drawing 1.3 million pairs modulo 9973 takes less than 5 seconds and 200 MB."""
    tracemalloc.start()
    begin = time.process_time()
    train, test = draw_pairs(9973, 300_000, 1_000_000, 199)
    seconds, (_, peak) = time.process_time() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (len(train), len(test)) == (300_000, 1_000_000)
    assert seconds < 5
    assert peak < 200e6


def test_labels_are_sums_modulo_p() -> None:
    runner = tiny()
    for inputs, targets in [*runner.build_loader("random").batches(3), *runner.evaluation_sets().values()]:
        assert targets.tolist() == [(a + b) % 11 for a, b in rows(inputs)]


def test_evaluation_sets_are_train_and_test_pairs() -> None:
    """Training accuracy uses the training pairs, and val uses test pairs that were never trained on."""
    runner = tiny()
    trained = set(rows(epoch_of(runner, "random")))
    sets = runner.evaluation_sets()
    assert set(rows(sets["train"][0])) == trained
    assert len(sets["val"][0]) == 40
    assert not set(rows(sets["val"][0])) & trained


# Orders


@pytest.mark.longer
@given(
    strategy=st.sampled_from(STRATEGIES),
    p=st.integers(2, 40),
    stride=st.none() | st.integers(1, 9),
    seed=st.integers(0, 2**32),
    epoch=st.integers(0, 10**6),
)
@settings(deadline=None, max_examples=100)
def test_every_order_is_a_permutation_in_every_epoch(strategy: str, p: int, stride: Any, seed: int, epoch: int) -> None:
    train, _ = draw_pairs(p, p * p - 1, 1, seed)
    order = build_order(strategy, train, p, stride, seed)(epoch)
    assert sorted(order.tolist()) == list(range(len(train)))


@pytest.mark.parametrize("stride", [None, 1, 4])
def test_stride_order_sorts_by_residue_then_value(stride: int | None) -> None:
    """Pairs are sorted by a modulo the stride and then by a, and ties keep their drawn order."""
    runner = tiny(stride=stride)
    step = stride or 3  # the integer square root of 11
    drawn = rows(epoch_of(runner, "fixed-random"))
    assert rows(epoch_of(runner, "stride")) == sorted(drawn, key=lambda pair: (pair[0] % step, pair[0]))


def test_target_order_sorts_by_sum() -> None:
    """Pairs are sorted by their sum modulo p, and ties keep their drawn order."""
    runner = tiny()
    drawn = rows(epoch_of(runner, "fixed-random"))
    assert rows(epoch_of(runner, "target")) == sorted(drawn, key=lambda pair: sum(pair) % 11)


@pytest.mark.parametrize("strategy", ["stride", "target", "fixed-random"])
def test_fixed_orders_repeat_in_every_epoch(strategy: str) -> None:
    runner = tiny()
    assert torch.equal(epoch_of(runner, strategy, 0), epoch_of(runner, strategy, 57))


def test_random_order_reshuffles_every_epoch() -> None:
    """The order depends only on the seed and the epoch, not on the global generator."""
    runner = tiny()
    third = epoch_of(runner, "random", 3)
    assert not torch.equal(third, epoch_of(runner, "random", 4))
    torch.rand(7)
    assert torch.equal(third, epoch_of(tiny(), "random", 3))
    order, other = (build_order("random", third, 11, None, seed)(3) for seed in (1, 2))
    assert not torch.equal(order, other)


def test_the_default_stride_is_the_integer_square_root() -> None:
    train, _ = draw_pairs(97, 500, 100, 0)
    assert torch.equal(build_order("stride", train, 97, None, 0)(0), build_order("stride", train, 97, 9, 0)(0))


# Strategies


def test_strategies_share_pairs_and_initial_weights() -> None:
    runner = tiny()
    pairs = {strategy: sorted(rows(epoch_of(runner, strategy, 2))) for strategy in STRATEGIES}
    assert all(strategy_pairs == pairs["random"] for strategy_pairs in pairs.values())
    first, *others = (build_run(runner, strategy)[0].model.state_dict() for strategy in STRATEGIES)
    for other in others:
        assert all(torch.equal(first[name], value) for name, value in other.items())


def test_another_seed_gives_other_weights() -> None:
    one, other = (next(build_run(tiny(seed=seed), "random")[0].model.parameters()) for seed in (1, 2))
    assert not torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=slow_unless(name != "fixed-random")) for name in STRATEGIES]
)
@own_process
def test_every_strategy_runs_with_hooks_through_the_command(strategy: str, tmp_path: Path) -> None:
    words = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]
    more = "--with-hooks full --hooks grad_clip --hook-csv --hook-jsonl --no-console-output --audit-hooks"
    where = ["--strategy", strategy, "--output-dir", str(tmp_path)]
    hooks = ["--hook-config", "hessian.every_n_steps=3", "hessian.burst_length=2"]
    assert main(["run", "mod_arithmetic", *words, *where, *more.split(), *hooks]) == 0
    folder = tmp_path / "mod_arithmetic" / strategy
    summary = read_json(folder / "summary.json")
    assert (summary["status"], summary["steps"], summary["hook_errors"]) == ("completed", 8, [])
    assert set(summary["final"]) == {"train_acc", "train_loss", "val_acc", "val_loss"}
    record = (folder / f"{strategy}.jsonl").read_text()
    for hook in ("training_metrics", "norms", "fourier", "hessian", "counterfactual", "grad_clip"):
        assert f'"{hook}/' in record


@pytest.mark.longer
def test_all_runs_every_strategy(tmp_path: Path) -> None:
    words = [word for name, value in (TINY | {"epochs": 1}).items() for word in (f"--{name}", str(value))]
    where = ["--strategy", "all", "--output-dir", str(tmp_path), "--no-console-output"]
    assert main(["run", "mod_arithmetic", *words, *where]) == 0
    assert {path.name for path in (tmp_path / "mod_arithmetic").iterdir()} == set(STRATEGIES)


# Presets


def test_defaults_match_the_paper() -> None:
    expected = {
        **{"p": 9973, "train_size": 300_000, "test_size": 1_000_000, "batch_size": 256, "optimizer": "adamw"},
        **{"lr": 1e-3, "min_lr": 5e-7, "weight_decay": 0.1, "epochs": 5000, "embed_dim": 256, "num_heads": 4},
        **{"layers": 2, "ff_dim": 2048, "target_acc": 0.995, "snapshot_every": 10, "eval_every": 1, "seed": 199},
    }
    config = ModArithmeticConfig().as_dict()
    assert {name: config[name] for name in expected} == expected
    assert ModArithmeticRunner.presets["paper"] == {}
    assert ModArithmeticConfig().max_epochs is None


def test_quick_preset_has_expected_sizes() -> None:
    """The preset has p = 97, 30 * p training pairs, width 128 and hidden width 512, and fits into p * p pairs."""
    config = ModArithmeticConfig(**ModArithmeticRunner.presets["quick"])
    assert (config.p, config.train_size, config.embed_dim, config.ff_dim) == (97, 30 * 97, 128, 512)
    assert config.train_size + config.test_size <= 97**2


@given(size=st.integers(1, 30), p=st.integers(2, 30))
@settings(deadline=None, max_examples=30)
def test_sums_are_residues(size: int, p: int) -> None:
    pairs = torch.randint(p, (size, 2))
    assert sums(pairs, p).tolist() == [(a + b) % p for a, b in rows(pairs)]
