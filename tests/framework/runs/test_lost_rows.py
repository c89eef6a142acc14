"""Runs whose sinks fail: status, summary, display and exit status report lost rows."""

import json
import warnings
from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from loopscope.cli import main
from loopscope.hooks import MetricSink
from loopscope.runs import RunOptions, Session
from loopscope.sinks import CSVSink, JSONLSink

from tests.framework.runs.small_experiment import Small, SmallConfig, registered

pytestmark = pytest.mark.filterwarnings("ignore:Sink .* failed and is disabled:UserWarning")
CALLS = ("set_run_context", "emit", "flush", "close")


class Failing(MetricSink):
    """A sink that raises in one of its calls, from the second on except at the start and the end."""

    name = "failing"

    def __init__(self, where: str, error: BaseException) -> None:
        self.where, self.error, self.calls = where, error, 0

    def _fail(self, where: str, first: int) -> None:
        if where == self.where:
            self.calls += 1
            if self.calls >= first:
                raise self.error

    def set_run_context(self, run: Any) -> None:
        self._fail("set_run_context", 1)

    def emit(self, metrics: Any, epoch: int, hook_point: Any, *, step: int) -> None:
        self._fail("emit", 2)

    def flush(self) -> None:
        self._fail("flush", 1)

    def close(self, status: str) -> None:
        self._fail("close", 1)


class Display(Failing):
    """A failing sink that shows metrics and keeps none."""

    keeps = False


def summaries(out: Path, sink: MetricSink, **options: Any) -> list[dict[str, Any]]:
    runner = Small(SmallConfig(output_dir=out), torch.device("cpu"))
    settings = RunOptions(hooks=["norms"], **options)
    return Session(runner, settings, lambda: [sink, CSVSink()]).run()


@pytest.mark.parametrize("where", CALLS)
@pytest.mark.parametrize("error", [OSError(28, "No space left"), ValueError("a bug"), SystemExit(0)], ids=repr)
def test_run_with_lost_rows_is_incomplete(tmp_path, where, error):
    """If any call of a sink fails, the training ends, and the summary names the sink, the step and the error."""
    (summary,) = summaries(tmp_path, Failing(where, error), strategies=["plain"])
    assert (summary["status"], summary["epochs"]) == ("incomplete", 2)
    (failed,) = summary["sink_errors"]
    assert (failed["sink"], failed["error"], failed["lost_rows"]) == (
        "failing",
        f"{type(error).__name__}: {error}",
        True,
    )
    stored = json.loads((tmp_path / "small" / "plain" / "summary.json").read_text())
    assert stored["sink_errors"] == summary["sink_errors"]


def test_failed_display_loses_no_rows(tmp_path):
    """A sink that keeps no metrics does not make a run incomplete, but its error is in the summary."""
    (summary,) = summaries(tmp_path, Display("emit", ValueError("a bug")), strategies=["plain"])
    assert summary["status"] == "completed"
    assert [error["lost_rows"] for error in summary["sink_errors"]] == [False]


@pytest.mark.longer
def test_other_strategies_are_complete(tmp_path, monkeypatch):
    """Only the strategy whose rows are lost is incomplete."""
    emit = JSONLSink.emit

    def fail_once(sink: Any, metrics: Any, epoch: int, *rest: Any, **options: Any) -> None:
        if "plain" in str(sink.files()[0]) and epoch:
            raise OSError(28, "No space left")
        emit(sink, metrics, epoch, *rest, **options)

    monkeypatch.setattr(JSONLSink, "emit", fail_once)
    runner = Small(SmallConfig(output_dir=tmp_path), torch.device("cpu"))
    settings = RunOptions(hooks=["norms"], strategies=["plain", "other-order"])
    statuses = [summary["status"] for summary in Session(runner, settings, lambda: [JSONLSink()]).run()]
    assert statuses == ["incomplete", "completed"]


def lost(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left")


@pytest.mark.longer
@pytest.mark.parametrize("display", ["--no-console-output", "--silent"])
def test_command_reports_lost_rows(tmp_path, monkeypatch, capsys, display):
    """The command ends with status 1 and a sentence; ls and show report it."""
    words = f"run small --strategy plain --hooks norms {display} --output-dir {tmp_path}".split()
    with registered(Small), monkeypatch.context() as patch:
        patch.setattr(JSONLSink, "emit", lost)
        assert main(words) == 1
    message = " ".join(capsys.readouterr().err.split())
    assert "plain: the training is complete, but rows were lost: jsonl failed at step" in message
    assert main(["ls", str(tmp_path)]) == 0
    assert "incomplete" in capsys.readouterr().out
    assert main(["show", str(tmp_path / "small" / "plain")]) == 0
    assert "failed sinks jsonl at step" in " ".join(capsys.readouterr().out.split())


def test_attached_run_reports_lost_rows(tmp_path, monkeypatch):
    """An attached run warns, trains on, and is incomplete."""
    monkeypatch.setattr(JSONLSink, "emit", lost)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        with loopscope.attach(model, optimizer, hooks=["norms"], out=tmp_path / "run", display="none") as scope:
            for batch in scope.batches([torch.ones(1, 2)] * 3):
                scope.backward(model(batch).square().mean())
                optimizer.step()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["sink_errors"][0]["sink"]) == ("incomplete", 3, "jsonl")


@pytest.mark.longer
def test_incomplete_run_is_not_trained_again(tmp_path, monkeypatch):
    """With --resume a strategy that was trained to its end is skipped, although rows are lost."""
    monkeypatch.setattr(JSONLSink, "emit", lost)
    runner = Small(SmallConfig(output_dir=tmp_path), torch.device("cpu"))
    settings = RunOptions(hooks=["norms"], strategies=["plain"], save_checkpoints=1)
    first = Session(runner, settings, lambda: [JSONLSink()]).run()
    again = Session(runner, RunOptions(**{**vars(settings), "resume": True}), lambda: [JSONLSink()]).run()
    assert again[0]["status"] == first[0]["status"] == "incomplete"
    assert again[0]["seconds"] == first[0]["seconds"]
