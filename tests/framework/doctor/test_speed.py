"""Findings about the time of a step: they need enough steps, and a time that matters."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from loopscope.cli import main
from loopscope.doctor import History, StepTimes, diagnose
from loopscope.report.page import step_time_table
from loopscope.report.run_reader import read_shown
from loopscope.training import step_clock
from torch import nn


def findings(steps: int = 1000, device: str = "cpu", **milliseconds: float) -> dict[str, str]:
    """Return the ids and sentences of the findings about a step of 10 ms of passes and further times."""
    times = {"forward": 4.0, "backward": 6.0} | milliseconds
    seconds = {name: time / 1000 for name, time in times.items()}
    content = {"steps": steps, "device": device, "seconds": seconds}
    diagnosis = diagnose(History(step_times=StepTimes.of(content)))
    assert all(finding.severity == "info" for finding in diagnosis)
    return {finding.id: finding.why for finding in diagnosis}


def test_waiting_for_data_is_found() -> None:
    assert findings(data=20.0) == {"waits-for-data": "67% of a step, 20 ms of 30 ms, waits for data."}
    assert "host, which may run ahead" in findings(data=20.0, device="cuda")["waits-for-data"]


def test_time_between_steps_is_found_on_the_cpu() -> None:
    """A loop without a DataLoader gets its data there; on an accelerator the host may also wait for the device."""
    assert "passes between two steps" in findings(between=20.0)["waits-for-data"]
    assert findings(between=20.0, data=1.0) == findings(between=20.0, device="cuda") == {}


def test_time_of_hooks_is_found() -> None:
    assert findings(hooks=15.0) == {"hooks-take-time": "60% of a step, 15 ms of 25 ms, passes in hooks."}


@pytest.mark.parametrize("steps", [1, 49])
def test_few_steps_give_no_finding(steps: int) -> None:
    assert findings(steps, data=20.0, hooks=50.0) == {}


def test_short_times_give_no_finding() -> None:
    times = {"forward": 0.1, "backward": 0.1}
    assert findings(data=1.9, **times) == findings(hooks=9.0, **times) == {}


@pytest.mark.parametrize("content", [None, 3, {}, {"steps": 9, "device": "cpu", "seconds": {"data": "many"}}])
def test_damaged_times_are_no_times(content: Any) -> None:
    assert StepTimes.of(content) is None


class SlowStart:
    """Batches of which the first takes a minute, and the others as long as given, on a clock of the test."""

    def __init__(self, seconds: float) -> None:
        self.now, self._seconds = 0.0, seconds

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(80):
            self.now += 60.0 if index == 0 else self._seconds
            yield torch.ones(2, 3)

    def pass_through(self, *inputs: Any) -> None:
        """Take the time of a forward pass."""
        self.now += 0.01


def run(folder: Path, seconds: float, monkeypatch: pytest.MonkeyPatch) -> loopscope.Scope:
    """Train on batches that take ``seconds``, and return the scope."""
    batches, model = SlowStart(seconds), nn.Linear(3, 1)
    monkeypatch.setattr(step_clock, "perf_counter", lambda: batches.now)
    model.register_forward_pre_hook(batches.pass_through)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with loopscope.attach(model, optimizer, hooks=["norms"], out=folder, display="none") as scope:
        for batch in scope.batches(batches):
            scope.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        assert bool(scope.diagnose().findings) == (seconds > 0.01)
    return scope


def test_first_batch_alone_gives_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers start, and data are prepared, before the first batch only."""
    run(tmp_path, 0.005, monkeypatch)


def test_commands_show_the_time_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Doctor, show and report read it from the summary, whose findings do not depend on time."""
    folder = run(tmp_path / "run", 0.03, monkeypatch).folder
    text = "40 ms: 75% waiting for data, 25% forward"
    main(["doctor", str(folder)])
    shown = capsys.readouterr().out
    assert f"A step takes {text}." in shown
    assert "info: waits-for-data" in shown
    main(["show", str(folder)])
    assert f"a step       {text}" in capsys.readouterr().out
    table = step_time_table([read_shown(folder, "run", 10**6)])
    assert "<td>40 ms</td><td>75%</td><td>25%</td><td>0%</td>" in table
    assert "waits-for-data" not in json.dumps(json.loads((folder / "summary.json").read_text("utf-8"))["findings"])
