"""A single name without a list, wherever several names are accepted."""

from pathlib import Path

import loopscope
import pytest
import torch
from loopscope import HookPoint, TrainingHook, UsageError, training_hooks
from loopscope.cli import main
from loopscope.engine.commits import parameters_named
from loopscope.lowbit import RECIPES, layers_to_quantize, quantize_model
from loopscope.report import compare_runs, matcher
from loopscope.runs import RunOptions
from torch import nn

from tests.framework.report.plotted import record

assert training_hooks.__all__


class CapturingHook(TrainingHook):
    """Capture the output of one layer."""

    name = "capturing"
    hook_points = {HookPoint.POST_STEP}
    metrics = "mean | mean output of the first layer | any | Arbitrary."

    def compute(self, ctx):
        return {"mean": ctx.forward(torch.ones(1, 2), capture="0").captured["0"].mean()}


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


@pytest.fixture
def run(tmp_path: Path):
    return loopscope.read_run(record(tmp_path, [(1, {"m/loss": 0.5, "m/list": [1, 2], "n/loss": 1.0})]))


def test_matching_accepts_one_pattern(run) -> None:
    assert run.matching("m/*") == run.matching(["m/*"]) == ["m/loss", "m/list"]
    with pytest.raises(UsageError, match="has no metric 'n'; the nearest: n/loss"):
        run.matching("n")


def test_runs_are_compared_by_one_pattern(run, tmp_path: Path) -> None:
    other = loopscope.read_run(record(tmp_path / "other", [(1, {"m/loss": 0.25})]))
    assert matcher("m/*")("m/loss")
    assert not matcher("m/*")("n/loss")
    with pytest.raises(UsageError, match="No metric matches 'loss'"):
        compare_runs([run, other], "loss")


def test_attach_accepts_one_hook_and_one_sink(tmp_path: Path) -> None:
    """The training has the requested hook, and its record is a CSV file."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with loopscope.attach(model, optimizer, hooks="norms", sinks="csv", out=tmp_path / "a", display="none") as scope:
        for batch in scope.batches([torch.ones(1, 2)]):
            scope.backward(model(batch).sum())
            optimizer.step()
        assert "norms" in scope.hooks
    assert (tmp_path / "a/a.csv").is_file()


def test_forward_captures_one_layer(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    hooks = [CapturingHook()]
    with loopscope.attach(model, optimizer, hooks=hooks, out=tmp_path / "a", display="none") as scope:
        for batch in scope.batches([torch.ones(1, 2)]):
            scope.backward(model(batch).sum())
            optimizer.step()
        assert scope.last_metrics()["capturing/mean"] == pytest.approx(model[0](torch.ones(1, 2)).mean().item())


def test_parameters_are_found_by_one_name() -> None:
    model = network()
    assert parameters_named(model, "0.weight") == {"0.weight": model[0].weight}


def test_one_pattern_selects_layers_to_quantize() -> None:
    """A text used to be read as letters, of which ``*`` matched every layer."""
    assert quantize_model(network(), "fp8", include="0*") == ["0"]
    assert layers_to_quantize(network(), RECIPES["fp8"], exclude="1") == ["0"]


def test_run_options_accept_one_strategy_and_one_hook() -> None:
    options = RunOptions(strategies="stride", hooks="norms")
    assert (options.strategies, options.hooks) == (["stride"], ["norms"])


def test_command_imports_one_package(capsys) -> None:
    assert main(["list"], packages="loopscope.experiments") == 0
    assert "mod_arithmetic" in capsys.readouterr().out
