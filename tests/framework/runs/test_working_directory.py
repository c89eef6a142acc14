"""Code that changes the working directory during a run does not move the run's files."""

import os
from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from loopscope.hooks import HookPoint
from loopscope.runs import RunOptions, Session
from loopscope.sinks import CSVSink, JSONLSink

from tests.framework.runs.small_experiment import Small, SmallConfig, registered
from tests.support import SpyHook


@pytest.fixture(autouse=True)
def in_first_folder(tmp_path, monkeypatch):
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    monkeypatch.chdir(tmp_path / "first")


class Leaving(SpyHook):
    """Changes to the second folder at one point."""

    name = "leaving"

    def __init__(self) -> None:
        super().__init__(lambda ctx: os.chdir(FOLDER[0]))
        self.hook_points = frozenset(FOLDER[1:])


FOLDER: list[Any] = []


@pytest.mark.some_rows(3)
@pytest.mark.longer
@pytest.mark.parametrize("point", [HookPoint.PRE_EPOCH, HookPoint.POST_STEP, HookPoint.SNAPSHOT])
def test_experiment_keeps_its_folder(tmp_path, point):
    """Two strategies with a relative folder, checkpoints and all sinks write only there."""
    FOLDER[:] = [tmp_path / "second", point]
    runner = Small(SmallConfig(output_dir=Path("out")), torch.device("cpu"))
    options = RunOptions(hooks=["leaving"], strategies=["plain", "other-order"], save_checkpoints=1)
    with registered(Leaving):
        Session(runner, options, lambda: [JSONLSink(), CSVSink()]).run()
    assert not [*(tmp_path / "second").iterdir()]
    for strategy in ("plain", "other-order"):
        folder = tmp_path / "first" / "out" / "small" / strategy
        names = {path.name for path in folder.iterdir()}
        assert {"summary.json", f"{strategy}.jsonl", f"{strategy}.csv", f"{strategy}_final.pt"} <= names
        assert [*(folder / "checkpoints").iterdir()]


@pytest.mark.parametrize("out", [None, "runs/mine", Path("mine")])
def test_attached_run_keeps_its_folder(tmp_path, out):
    """A loop that changes the directory, before its first step or later, does not move the files."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scope = loopscope.attach(model, optimizer, hooks=["norms"], out=out, sinks=["jsonl", "csv"], display="none")
    os.chdir(tmp_path)
    with scope:
        for batch in scope.batches([torch.ones(1, 2)] * 3):
            scope.backward(model(batch).square().mean())
            optimizer.step()
            os.chdir(tmp_path / "second")
    assert not [*(tmp_path / "second").iterdir()]
    assert len([*(tmp_path / "first").rglob("summary.json")]) == 1
    assert len([*(tmp_path / "first").rglob("*.csv")]) == 1
