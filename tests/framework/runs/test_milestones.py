"""Runs whose schedule counts milestones (MultiStepLR) are resumed, rewound and verified like any other."""

from pathlib import Path
from typing import Any

import pytest
import torch
from loopscope import sinks, training_hooks
from loopscope.runs import StepRange

from tests.framework.checkpoints.killed_sessions import kill_after
from tests.framework.runs.small_experiment import SmallSteps, contents, session

FILLED = (sinks, training_hooks)
OPTIONS: dict[str, Any] = {
    "strategies": ["plain"],
    "epochs": 4,
    "checkpoint_every_steps": 2,
    "save_checkpoints": 1,
    "keep_checkpoints": 20,
}

pytestmark = pytest.mark.usefixtures("patient_small")


class Milestones(SmallSteps):
    """The small experiment with a sequence of a warm-up and milestones."""

    name = "milestones"

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2)
        drops = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5, 7], gamma=0.1)
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, drops], [2])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    session(folder, Milestones, **OPTIONS, hooks=["path_length"]).run()
    return folder


def final_weights(folder: Path) -> bytes:
    return contents(folder)["milestones/plain/plain_final.pt"]


@pytest.mark.some_rows(2)
@pytest.mark.guarantee("resumed-runs-are-identical")
@pytest.mark.parametrize("step", [3, 8])
def test_resumed_milestones_equal_the_whole_run(step: int, finished: Path, tmp_path: Path) -> None:
    """The drops of a ``MultiStepLR`` that come after the interruption happen at their steps."""
    options = {**OPTIONS, "hooks": ["path_length"]}
    kill_after(step, tmp_path / "killed", tmp_path / "left", Milestones, **options)
    session(tmp_path / "left", Milestones, **options, resume=True).run()
    assert final_weights(tmp_path / "left") == final_weights(finished)


@pytest.mark.some_rows(3)
@pytest.mark.guarantee("runs-can-be-verified")
@pytest.mark.parametrize("stretch", [StepRange(3, 6), StepRange(4, 9), StepRange(11, 12)], ids=["3", "4", "11"])
def test_stretches_with_milestones_are_rewound(stretch: StepRange, finished: Path) -> None:
    """A stretch, which ``rewind`` and ``verify --intervals`` train again, equals the checkpoints of the run."""
    _, _, compared = session(finished, Milestones, **OPTIONS, hooks=["hessian"]).rewind(stretch, recorded=False)
    assert list(compared)[-1] == stretch.until
