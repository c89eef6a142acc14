"""The frequency of evaluation, checkpoints, logging and snapshots does not change a run."""

import random

import numpy as np
import pytest
import torch
from loopscope.checkpoints import save_checkpoint
from loopscope.hooks import HookPoint

from tests.support import LOOPS, Case, SpyHook, at, differences, train
from tests.support.processes import own_process

pytestmark = pytest.mark.longer

PERIODS = (1, 3, 7)
EPOCHS = 21
REPORTED = {"loop/epoch_loss", "loop/running_loss", "loop/running_steps"}  # the mean loss since it was last logged


def final_bytes(case: Case, **options) -> dict[str, int]:
    """Train for 21 epochs with an evaluation that draws from every generator, and return the last digest."""
    return train(case, steps=3 * EPOCHS, audit=False, every_step=False, **options).final


def differing_finals(case: Case, *variants) -> list[str]:
    first, *others = [final_bytes(case, **options) for options in variants]
    return [name for other in others for name in differences(first, other) if name not in REPORTED]


def drawing(ctx) -> None:
    torch.rand(3), random.random(), random.gauss(0, 1), np.random.standard_normal()


@pytest.mark.some_rows(6)
@pytest.mark.guarantee("monitoring-changes-nothing")
@pytest.mark.parametrize("model", ["batchnorm_mlp", "tied"])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("setting", ["eval_every", "log_every"])
def test_evaluation_and_logging_frequency_preserves_final_bytes(setting, loop, model):
    """The final state has the same bytes for every eval_every and log_every, even if evaluation draws."""
    case = Case(model=model, loop=loop)
    assert differing_finals(case, *({setting: period} for period in PERIODS)) == []


@pytest.mark.some_rows(2)
@pytest.mark.guarantee("monitoring-changes-nothing")
@pytest.mark.parametrize("loop", LOOPS)
def test_snapshot_frequency_preserves_final_bytes(loop):
    """A hook that draws random numbers at SNAPSHOT leaves the same final state for every snapshot_every."""
    spy = at(SpyHook, HookPoint.SNAPSHOT)
    variants = [{"snapshot_every": period, "hooks": [spy(drawing)]} for period in PERIODS]
    assert differing_finals(Case(loop=loop), {}, *variants) == []


@pytest.mark.slow_rows("step")
@pytest.mark.guarantee("monitoring-changes-nothing")
@pytest.mark.parametrize("loop", LOOPS)
@own_process
def test_checkpoint_frequency_preserves_final_bytes(loop, tmp_path):
    """The final state has the same bytes for every checkpoint_every, even if saving draws random numbers."""

    def save(run) -> None:
        drawing(None)
        streams = run.manager.isolation.run_streams
        save_checkpoint(tmp_path / f"{run.state.loop.step}.pt", run.state, run.manager.hooks.state_dict(), streams)

    variants = [{"checkpoint_every": period, "save": save} for period in PERIODS]
    assert differing_finals(Case(loop=loop), {}, *variants) == []
    assert len([*tmp_path.iterdir()]) == (EPOCHS if loop == "epoch" else 3 * EPOCHS)
