"""The hook training_checks on sharded models reports the numbers of a run in one process."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from loopscope.engine import HookManager
from loopscope.loops import step_loop
from loopscope.training_hooks.checks import TrainingChecks

from tests.support import RecordingSink, run_info
from tests.support.ranks import on_two_ranks
from tests.training_hooks.sharded_runs import KINDS, sharded

pytestmark = pytest.mark.ranks
OF_DATA = ("input_", "target_", "repeated", "duplicate", "single", "ignored")


def rows(kind: str | None) -> list[tuple[Any, ...]]:
    """Train, and return the metrics without those of the data, which each process has of its own rows."""
    task, state = sharded(kind)
    sink = RecordingSink()
    manager = HookManager([TrainingChecks()], task, state, loop="step", sinks=[sink])
    manager.start(run_info(task, manager, "step"))
    step_loop(task, manager)
    manager.end("completed")
    found = [(name.partition("/")[2], step, value) for name, _, step, value in sink.rows()]
    return [row for row in found if not row[0].startswith(OF_DATA)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_sharded_models_give_the_same_numbers(tmp_path: Path, kind: str) -> None:
    expected = {(name, step): value for name, step, value in rows(None)}
    for found in on_two_ranks(partial(rows, kind), tmp_path):
        numbers = {(name, step): value for name, step, value in found}
        # tensor parallelism divides the rows of a weight, so dead rows are not known there
        missing = {key for key in expected.keys() - numbers.keys() if not key[0].startswith("dead_units")}
        assert not missing
        assert numbers == pytest.approx({key: expected[key] for key in numbers}, rel=1e-4, abs=1e-6)
