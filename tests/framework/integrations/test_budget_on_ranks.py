"""Ranks of one training have the same schedules, though each measures other times."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as distributed
from loopscope.engine import budget
from loopscope.runs import read_decisions

from tests.framework.integrations.rank_loops import Loop
from tests.support.ranks import on_two_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore::loopscope.hooks.Alert")]


class Ticks:
    """A clock whose every reading takes a time that depends on the rank."""

    def __init__(self) -> None:
        self.seconds, self.tick = 0.0, 1e-4 * (1 + 50 * distributed.get_rank())

    def __call__(self) -> float:
        self.seconds += self.tick
        return self.seconds


def with_budget() -> dict[str, Any]:
    """Train with hooks of a group; return their schedules at the end, and whether the weights are those alone."""
    budget.thread_time, budget.FIRST_SECONDS = Ticks(), 0.0
    attached, bare = Loop("DDP", drawing=False), Loop("DDP", drawing=False)
    for loop in (attached, bare):
        loop.batches = loop.batches * 20
    options = {"with_hooks": "health", "audit": False, "loop": "step", "budget": 0.01, "stop_after": None}
    with attached.attach([], Path(os.environ["OUT"]), **options) as scope:
        attached.run(scope)
        factors = dict(scope._attached.manager.budget.factors)
    bare.run()
    return {"factors": factors, "is neutral": attached.trace == bare.trace, "steps": len(bare.trace)}


def test_ranks_use_the_factors_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks end with equal factors, which are those of the record, and train without a changed bit."""
    monkeypatch.setenv("OUT", str(tmp_path / "run"))
    first, second = on_two_ranks(with_budget, tmp_path)
    assert first["factors"] == second["factors"]
    assert max(first["factors"].values()) > 1
    assert first["is neutral"]
    assert second["is neutral"]
    decisions = read_decisions(tmp_path / "run")
    assert decisions[max(decisions)] == first["factors"]
    assert first["steps"] > budget.FIRST_WINDOW
