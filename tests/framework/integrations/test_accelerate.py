"""Hooks in loops of Accelerate: they follow the Accelerator's micro-batches and unwrap its objects."""

from pathlib import Path
from typing import Any

import loopscope
import pytest

from tests.framework.integrations.custom_loops import QUIET, Loop, Parts, alone, assert_equal, attached, train

pytestmark = [
    pytest.mark.trainer,
    pytest.mark.filterwarnings("ignore::loopscope.hooks.Alert"),
]  # of the health of so small a run


def record(out: Path, loop: Loop, /, **options: Any) -> list[str]:
    attached(loop, out, ["observers"], **options)
    return (out / f"{out.name}.jsonl").read_text().splitlines()


@pytest.mark.some_rows(4)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("counts", ["epoch", "step"])
def test_hooks_report_the_same_as_without_accelerate(tmp_path, accumulate, counts):
    """The bare loop divides the losses by the number of micro-batches itself."""
    theirs = record(tmp_path / "a" / "run", Loop(accelerate=True, accumulate=accumulate), loop=counts)
    bare = record(tmp_path / "b" / "run", Loop(accumulate=accumulate, divides=True), loop=counts)
    assert len(bare) >= 2
    assert theirs == bare


def test_a_shorter_last_group_is_a_step(tmp_path):
    parts = Parts(Loop(accelerate=True, accumulate=2))
    with parts.attach(tmp_path, ["training_metrics"], loop="step") as scope:
        train(parts, scope)
        assert "running, step 4:" in repr(scope)


def test_unprepared_objects_can_be_attached(tmp_path):
    """The caller passes the model and optimizer that were given to Accelerator.prepare()."""
    loop = Loop(accelerate=True, accumulate=2, clips=0.1)
    bare, parts = alone(loop), Parts(loop)
    given = {"scheduler": parts.scheduler.scheduler, "accelerator": parts.accelerator, "out": tmp_path} | QUIET
    with loopscope.attach(parts.model, parts.raw, hooks=["norms"], **given) as scope:
        train(parts, scope)
    assert_equal(bare, parts)
