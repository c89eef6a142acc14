"""Trainings that reach their own end: folders that cannot be written, unusual evaluations, closing hooks, output."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from loopscope.errors import HookMisuseError, UsageError
from loopscope.hooks import HookPoint, Metrics, RunDataContext, TrainingHook
from loopscope.integrations import Scope
from torch import nn


def steps(scope: Scope, net: nn.Module, optimizer: torch.optim.Optimizer, count: int = 3) -> None:
    """Train on ``count`` batches of random numbers."""
    for batch in scope.batches([torch.randn(6, 4) for _ in range(count)]):
        scope.backward(net(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def attached(folder: Path, hooks: Any = ("norms",), **options: Any) -> tuple[Scope, nn.Module, torch.optim.Optimizer]:
    """Return a scope of a small network with batch normalisation."""
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    options = {"display": "none", **options}
    return loopscope.attach(net, optimizer, hooks=hooks, out=folder, **options), net, optimizer


def became_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("x")


def summary_is_folder(folder: Path) -> None:
    (folder / "summary.json").mkdir()


def alerts_are_folder(folder: Path) -> None:
    (folder / "alerts.jsonl").unlink(missing_ok=True)
    (folder / "alerts.jsonl").mkdir()


@pytest.mark.parametrize("damage", [became_file, summary_is_folder, alerts_are_folder])
def test_lost_folder_ends_in_one_warning(damage: Callable[[Path], None], tmp_path: Path) -> None:
    scope, net, optimizer = attached(tmp_path / "run", sinks=[])
    steps(scope, net, optimizer)
    damage(tmp_path / "run")
    with pytest.warns(UserWarning, match="has no complete record") as warned:
        scope.close()
    assert len(warned) == 1


@pytest.mark.parametrize(("key", "name"), [(1, "1"), (None, "None"), (("val", "dog"), "val/dog"), (True, "True")])
def test_keys_of_evaluations_become_names(key: object, name: str, tmp_path: Path) -> None:
    scope, net, optimizer = attached(tmp_path / "run")
    steps(scope, net, optimizer)
    scope.evaluate(lambda: {key: 0.5})
    scope.close()
    assert json.loads((tmp_path / "run/summary.json").read_text())["final"] == {name: 0.5}


def test_nested_evaluations_are_recorded(tmp_path: Path) -> None:
    scope, net, optimizer = attached(tmp_path / "run")
    steps(scope, net, optimizer)
    scope.evaluate(
        lambda: {**scope.evaluate(lambda: {"accuracy": float(net(torch.ones(2, 4)).sum() * 0)}), "loss": 1.0}
    )
    scope.close()
    assert json.loads((tmp_path / "run/summary.json").read_text())["final"] == {"accuracy": 0.0, "loss": 1.0}


class Caller(TrainingHook):
    """Calls its scope."""

    name = "caller"
    hook_points = {HookPoint.POST_STEP}
    call: Callable[[], object]

    def describe_metrics(self) -> list[Any]:
        """Return no description."""
        return []

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Call the scope."""
        self.call()
        return {}


@pytest.mark.parametrize("name", ["close", "epoch_end"])
@pytest.mark.parametrize("on_hook_error", ["raise", "skip"])
def test_hooks_may_not_call_scope(name: str, on_hook_error: str, tmp_path: Path) -> None:
    hook = Caller()
    scope, net, optimizer = attached(tmp_path / "run", [hook], on_hook_error=on_hook_error)
    hook.call = getattr(scope, name)
    with pytest.raises(HookMisuseError, match=rf"scope.{name}\(\) was called by a hook"), scope:
        steps(scope, net, optimizer)
    assert torch.is_grad_enabled()
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"


def test_evaluation_may_not_close_scope(tmp_path: Path) -> None:
    scope, net, optimizer = attached(tmp_path / "run")
    steps(scope, net, optimizer)
    with pytest.raises(UsageError, match=r"within scope\.evaluate"):
        scope.evaluate(scope.close)
    assert torch.is_grad_enabled()
    scope.close()


class Tee:
    """The usual logger class of research code, without ``isatty`` and ``encoding``."""

    def __init__(self, *, fails: bool = False) -> None:
        self.text, self._fails = "", fails

    def write(self, text: str) -> None:
        """Keep a text."""
        if self._fails:
            raise OSError(28, "No space left on device")
        self.text += text

    def flush(self) -> None:
        """Do nothing."""


def closed() -> StringIO:
    stream = StringIO()
    stream.close()
    return stream


STREAMS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "tee": Tee,
    "full": lambda: Tee(fails=True),
    "closed": closed,
    "ascii": lambda: TextIOWrapper(BytesIO(), "ascii"),
}


@pytest.fixture(params=STREAMS)
def output(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Replace standard output and standard error."""
    stream = STREAMS[request.param]()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream)
    yield stream
    monkeypatch.undo()


@pytest.mark.parametrize("display", ["normal", "silent", "none"])
def test_display_never_ends_a_training(output: Any, display: str, tmp_path: Path) -> None:
    scope, net, optimizer = attached(tmp_path / "run", ["norms"], display=display)
    with scope:
        steps(scope, net, optimizer)
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "completed"
    if isinstance(output, Tee) and display == "normal" and output.text:
        assert "3 steps" in output.text


def test_full_output_is_reported_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "stdout", Tee(fails=True))
    monkeypatch.setattr(sys, "stderr", errors := Tee())
    scope, net, optimizer = attached(tmp_path / "run", display="normal")
    with scope:
        steps(scope, net, optimizer)
    assert errors.text.count("nothing more is displayed, since output failed: OSError") == 1


def test_batches_have_length_of_loader(tmp_path: Path) -> None:
    scope, *_ = attached(tmp_path / "run")
    assert len(scope.batches([torch.ones(6, 4)] * 3)) == 3
    with pytest.raises(TypeError, match="list_iterator has no length"):
        len(scope.batches(iter([torch.ones(6, 4)])))
    assert len(list(scope.batches(iter([torch.ones(6, 4)])))) == 1
    scope.close()


def test_lines_do_not_join_bars_of_tqdm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    monkeypatch.setattr(sys, "stdout", output := Tee())
    monkeypatch.setattr(sys, "stderr", output)
    scope, net, optimizer = attached(tmp_path / "run", display="normal")
    for batch in (bar := tqdm(scope.batches([torch.randn(6, 4)] * 3), ncols=60)):
        scope.backward(net(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    scope.close()
    assert bar.total == 3
    lines = [line.rpartition("\r")[2] for line in output.text.split("\n")]
    assert not [line for line in lines if "it/s" in line and "run" in line]


def test_scope_shows_progress_and_findings(tmp_path: Path) -> None:
    """Before the first step there are no findings; then parameters that no optimizer holds are found."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with loopscope.attach(model, optimizer, out=tmp_path / "run", loop="step", length=4, display="none") as scope:
        assert repr(scope) == f"not started: {scope.folder}"
        for batch in scope.batches([torch.ones(2, 4)] * 2):
            scope.backward(model(batch).sum())
            optimizer.step()
    first, *findings = repr(scope).splitlines()
    assert first == f"closed, step 2 of 4 (50%): {scope.folder}"
    assert any("parameters-without-optimizer, before the first step" in line for line in findings)
