"""Signals: the step is finished, a checkpoint written, sinks closed; a second signal ends at once."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from loopscope import training_hooks
from loopscope.checkpoints import Signals, StoppedError, checkpoint_folders, open_checkpoint
from loopscope.hooks import HookPoint, TrainingHook
from loopscope.sinks import read_jsonl

from tests.framework.checkpoints.crash_runs import BOTH_SINKS, outcome, run, start
from tests.framework.runs.small_experiment import Small, SmallSteps, read_json, registered, session

assert training_hooks.__all__
CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Signalling(TrainingHook):
    """Raises signals within a step."""

    name = "signalling"
    hook_points = {HookPoint.POST_BACKWARD}
    numbers: tuple[int, ...] = ()

    def compute(self, ctx: Any) -> dict[str, float]:
        if ctx.step == 4:
            for number in self.numbers:
                signal.raise_signal(number)
        return {"step": ctx.step}

    def describe_metrics(self) -> list[Any]:
        return []


@pytest.fixture(autouse=True)
def entries():
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGUSR1)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    with registered(Small, SmallSteps, Early, Signalling):
        yield
    for number, handler in before.items():
        signal.signal(number, handler)


def signalled(folder: Path, runner: type[Small], *numbers: int, **options: Any) -> None:
    Signalling.numbers = numbers
    session(folder, runner, strategies=["plain"], hooks=["signalling", "norms"], **options).run()


def checkpointed(folder: Path, runner: type[Small]) -> list[int]:
    return [open_checkpoint(path).step for path in checkpoint_folders(folder / runner.name / "plain/checkpoints")]


@pytest.mark.some_rows(2)
@pytest.mark.parametrize("runner", [Small, SmallSteps])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_finishes_step_and_writes_checkpoint(runner, number, status, tmp_path: Path) -> None:
    """The run then ends with the status of the signal, complete metrics and the earlier signal handlers."""
    handlers = [signal.getsignal(item) for item in CAUGHT]
    with pytest.raises(StoppedError, match=f"Stopped by {number.name}") as stopped:
        signalled(tmp_path, runner, number)
    assert stopped.value.status == status
    assert checkpointed(tmp_path, runner) == [4]
    summary = read_json(tmp_path / runner.name / "plain/summary.json")
    assert (summary["status"], summary["steps"]) == ("interrupted", 4)
    series = [record.metrics["signalling/step"] for record in read_jsonl(tmp_path / runner.name / "plain/plain.jsonl")
              if "signalling/step" in record.metrics]  # fmt: skip
    assert [step for values in series for step in values.values] == [1, 2, 3, 4]
    assert [signal.getsignal(item) for item in CAUGHT] == handlers


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.guarantee("resumed-runs-are-identical")
@pytest.mark.parametrize("runner", [Small, SmallSteps])
def test_run_resumed_after_signal_matches_uninterrupted_run(runner, tmp_path: Path) -> None:
    """All files of both runs are equal, except the checkpoints."""
    signalled(tmp_path / "whole", runner)
    with pytest.raises(StoppedError):
        signalled(tmp_path / "stopped", runner, signal.SIGTERM)
    signalled(tmp_path / "stopped", runner, resume=True)
    differing_names = outcome(tmp_path / "stopped").differing_entries(outcome(tmp_path / "whole"))
    assert [name for name in differing_names if "/checkpoints/" not in name] == []


@pytest.mark.longer
def test_checkpoint_signal_does_not_stop_run(tmp_path: Path) -> None:
    """SIGUSR1 writes one checkpoint after the current step, and the run completes."""
    signalled(tmp_path, Small, signal.SIGUSR1)
    assert checkpointed(tmp_path, Small) == [4]
    assert read_json(tmp_path / "small/plain/summary.json")["status"] == "completed"


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        signalled(tmp_path, Small, signal.SIGTERM, signal.SIGINT)
    assert checkpointed(tmp_path, Small) == []
    assert read_json(tmp_path / "small/plain/summary.json")["status"] == "interrupted"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.longer
def test_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signalled(tmp_path, Small, signal.SIGINT)
    assert read_json(tmp_path / "small/plain/summary.json")["status"] == "completed"
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def raise_if(condition: bool) -> None:
    if condition:
        raise ZeroDivisionError


def test_earlier_handlers_are_restored_after_an_error() -> None:
    def mine(number: int, frame: Any) -> None:
        pass

    signal.signal(signal.SIGTERM, mine)
    with pytest.raises(ZeroDivisionError), Signals().deferred():
        raise_if(signal.getsignal(signal.SIGTERM) is not mine)
    assert signal.getsignal(signal.SIGTERM) is mine


def test_run_in_thread_keeps_signal_handlers(tmp_path: Path) -> None:
    """Outside the main thread, the run installs no signal handlers."""
    before, seen = [signal.getsignal(number) for number in CAUGHT], []

    def train() -> None:
        with Signals().deferred():
            seen.extend(signal.getsignal(number) for number in CAUGHT)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert seen == before


class Early(Small):
    """Raises a signal outside of a step: while the model of a strategy is built."""

    name = "early"
    number, strategy = signal.SIGTERM, "plain"

    def prepare_model(self, model: Any, strategy: str) -> Any:
        if strategy == self.strategy:
            signal.raise_signal(self.number)
        return model


@pytest.mark.guarantee("resumed-runs-are-identical")
@pytest.mark.parametrize("strategy", ["plain", "other-order"])
@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, StoppedError), (signal.SIGINT, KeyboardInterrupt)])
def test_signal_outside_the_loop_ends_session_cleanly(number, error, strategy, tmp_path: Path, monkeypatch) -> None:
    """Before the loop or between strategies, finished runs are kept, locks removed and handlers restored."""
    monkeypatch.setattr(Early, "number", number)
    monkeypatch.setattr(Early, "strategy", strategy)
    handlers = [signal.getsignal(item) for item in CAUGHT]
    with pytest.raises(error):
        session(tmp_path, Early, epochs=1, strategies=["plain", "other-order"]).run()
    done = [path.parent.name for path in tmp_path.glob("early/*/summary.json")]
    assert done == (["plain"] if strategy == "other-order" else [])
    assert not list(tmp_path.rglob("run.lock"))
    assert [signal.getsignal(item) for item in CAUGHT] == handlers


@pytest.mark.longer
@pytest.mark.guarantee("resumed-runs-are-identical")
@pytest.mark.parametrize("strategy", ["plain", "other-order"])
def test_early_checkpoint_request_waits_for_first_step(strategy, tmp_path: Path, monkeypatch) -> None:
    """SIGUSR1 arrives before the loop of the first or of the second strategy."""
    monkeypatch.setattr(Early, "number", signal.SIGUSR1)
    monkeypatch.setattr(Early, "strategy", strategy)
    summaries = session(tmp_path, Early, epochs=1, strategies=["plain", "other-order"]).run()
    assert [summary["status"] for summary in summaries] == ["completed", "completed"]
    folders = checkpoint_folders(tmp_path / f"early/{strategy}/checkpoints")
    assert [open_checkpoint(path).step for path in folders] == [1]


# Real processes

WORDS = ["run", "small", "--strategy", "plain", "clipped", "--hooks", "norms", "counterfactual", *BOTH_SINKS]


def when_training(words: list[str], folder: Path, number: int) -> tuple[int | None, str]:
    """Send a signal to a training process, and return its exit status and its output."""
    log = folder.with_suffix(".log")
    process = start([*words, "--output-dir", str(folder)], log)
    until = time.monotonic() + 240
    while not list(folder.glob("small/plain/checkpoints/step_*")) and time.monotonic() < until:
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(240)
    return process.exitcode, log.read_text()


@pytest.mark.process
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_process_exits_with_signal_status(number, status, tmp_path: Path) -> None:
    """The output names the signal and the resume command, and the summary has the status interrupted."""
    words = [*WORDS, "--epochs", "500", "--checkpoint-every-steps", "2"]
    words.remove("--no-console-output")
    exitcode, said = when_training(words, tmp_path / "run", number)
    assert exitcode == status, said
    assert said.endswith(f"loopscope: Stopped by {number.name}.\n")
    assert f"loopscope resume {tmp_path}/run/small/plain" in said.replace("\n", "")
    folder = tmp_path / "run/small/plain"
    summary, newest = read_json(folder / "summary.json"), checkpointed(tmp_path / "run", Small)[0]
    assert (summary["status"], summary["steps"]) == ("interrupted", newest)
    assert not (tmp_path / "run/small/clipped").exists()
    assert not list(folder.glob("run.lock"))


@pytest.mark.slow
@pytest.mark.process
def test_checkpoint_request_does_not_change_the_run(tmp_path: Path) -> None:
    """A process that receives SIGUSR1 leaves the same files as one that does not, except the checkpoints."""
    words = [*WORDS, "--epochs", "12", "--save-checkpoints", "1"]
    exitcode, said = when_training(words, tmp_path / "run", signal.SIGUSR1)
    assert exitcode == 0, said
    assert run([*words, "--output-dir", str(tmp_path / "whole")], tmp_path / "whole.log") == 0
    differing_names = outcome(tmp_path / "run").differing_entries(outcome(tmp_path / "whole"))
    assert [name for name in differing_names if "/checkpoints/" not in name] == []
