"""All hooks on the quick preset of mod_arithmetic: each reports, and the weights are those of the bare run."""

import warnings
from pathlib import Path

import pytest
import torch
from loopscope import training_hooks
from loopscope.errors import RunNotice
from loopscope.experiments.mod_arithmetic import ModArithmeticRunner
from loopscope.experiments.mod_arithmetic.runner import QUICK, ModArithmeticConfig
from loopscope.hooks.selection import bulk_hooks
from loopscope.runs import RunOptions, Session
from loopscope.sinks import JSONLSink, read_jsonl

from tests.framework.runs.small_experiment import read_json
from tests.support.processes import own_process

assert training_hooks.__all__


def train(folder: Path, epochs: int, **options) -> dict[str, torch.Tensor]:
    """Train one strategy and return its final weights."""
    config = ModArithmeticConfig(**QUICK | {"max_epochs": epochs, "output_dir": folder})
    Session(
        ModArithmeticRunner(config), RunOptions(strategies=["stride"], budget=None, **options), lambda: [JSONLSink()]
    ).run()
    return torch.load(folder / "mod_arithmetic/stride/stride_final.pt", weights_only=True)


def assert_all_report_and_leave_no_trace(folder: Path, epochs: int) -> None:
    bare = train(folder / "bare", epochs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", RunNotice)
        warnings.filterwarnings("ignore", ".* spiked at step")  # the preset does have spikes
        full = train(folder / "full", epochs, with_hooks="full", reference=folder / "bare")
    assert all(torch.equal(full[name], weights) for name, weights in bare.items())
    run = folder / "full/mod_arithmetic/stride"
    reported = {name.partition("/")[0] for row in read_jsonl(run / "stride.jsonl") for name in row.metrics}
    summary = read_json(run / "summary.json")
    assert summary["hooks_left_out"] == {}
    assert reported == {*bulk_hooks("full")}


@pytest.mark.guarantee("observers-change-nothing")
@pytest.mark.slow
@own_process
def test_two_epochs_with_all_hooks(tmp_path: Path) -> None:
    """The experiment mod_arithmetic with all hooks ends with the final weights of the run without hooks."""
    assert_all_report_and_leave_no_trace(tmp_path, 2)


@pytest.mark.slow
def test_the_whole_run_with_all_hooks(tmp_path: Path) -> None:
    assert_all_report_and_leave_no_trace(tmp_path, QUICK["max_epochs"])
