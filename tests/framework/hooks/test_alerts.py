"""Alerts: every warning of a hook's ``check`` reaches the sinks with its place, whatever Python's filter says."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from loopscope.errors import HookError, RunNotice
from loopscope.hooks import ALERTS, Alert, HookPoint, TrainingHook
from loopscope.sinks import CSVSink, JSONLSink

from tests.framework.runs.small_experiment import SmallSteps, contents, registered, session
from tests.support import Case, train

warn = warnings.warn  # as ``from warnings import warn`` finds it


class Anxious(TrainingHook):
    """Says the same at every check, as a user's hook may; of the second fire also how far it went, and that it ends."""

    name = "anxious"
    hook_points = {HookPoint.POST_EPOCH, HookPoint.POST_STEP}
    metrics = "level | 1 | 1 | Look."

    def compute(self, ctx: Any) -> dict[str, float]:
        return {"level": 1.0}

    def check(self, values: Any, step: int) -> None:
        warn("All is lost.", stacklevel=2)
        if step == 2:
            warnings.warn(Alert("Too far.", metric="level", step=1, value=7.5, limit=6.0), stacklevel=1)
            warnings.warn("It is over.", RunNotice, stacklevel=1)


def alerts_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / ALERTS).read_text().splitlines()]


@pytest.mark.parametrize("action", ["default", "ignore", "once", "always"])
def test_alerts_are_recorded_despite_warning_filters(action, tmp_path):
    """Each alert keeps its epoch, step and batch rows, even if Python filters the warning."""
    with registered(Anxious), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        session(tmp_path, hooks=["anxious"], strategies=["plain"]).run()
    found = alerts_of(tmp_path / "small/plain")
    lost = [alert for alert in found if alert["sentence"] == "All is lost."]
    assert [(alert["epoch"], alert["step"]) for alert in lost] == [
        *((0, 1), (0, 2), (0, 3), (0, 3)), *((1, 4), (1, 5), (1, 6), (1, 6))
    ]  # fmt: skip
    rows = [each.tolist() for each in session(tmp_path).runner.build_loader("plain").row_indices(1)]
    assert [alert["rows"] for alert in lost[4:]] == [*rows, rows[-1]]
    del lost[0]["rows"]
    assert lost[0] == {"epoch": 0, "step": 1, "hook": "anxious", "metric": "", "value": None, "limit": None,
                       "is_over": False, "sentence": "All is lost."}  # fmt: skip
    far, over = [alert for alert in found if alert not in lost]
    assert (far["metric"], far["step"], far["value"], far["limit"], far["is_over"]) == ("level", 1, 7.5, 6.0, False)
    assert (over["sentence"], over["is_over"]) == ("It is over.", True)
    told = [each for each in caught if str(each.message) == "All is lost."]
    assert len(told) == {"ignore": 0, "once": 1}.get(action, 8)
    assert all(Path(each.filename).name == "test_alerts.py" or each.lineno for each in told)


def test_warnings_as_errors_still_record_alerts(tmp_path):
    """The run ends with a HookError at the check, and the alert is in the file."""
    with registered(Anxious), pytest.raises(HookError, match="'anxious' raised at check of step 3: Alert: All is lost"):
        session(tmp_path, hooks=["anxious"], strategies=["plain"]).run()
    assert alerts_of(tmp_path / "small/plain")[0]["sentence"] == "All is lost."


def test_other_modules_remember_what_they_have_warned_of():
    """Python's own way to catch warnings would make them say it again."""

    class Forgetful(Anxious):
        def compute(self, ctx: Any) -> dict[str, float]:
            exec(compile("import warnings; warnings.warn('once here')", "<m>", "exec"), registry)
            return {"level": 1.0}

    registry: dict[str, Any] = {"__name__": "elsewhere"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        train(Case(), [Forgetful()], steps=6)
        assert [str(each.message) for each in caught].count("once here") == 1
        assert [str(each.message) for each in caught].count("All is lost.") > 6
        assert ("always", None, UserWarning, None, 0) not in warnings.filters


def test_alerts_follow_the_jsonl_record(tmp_path):
    """Overwriting the run without a JSONL sink removes the alerts of the earlier run."""
    with registered(Anxious), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = session(tmp_path, hooks=["anxious"], strategies=["plain"])
        first.run()
        first.options = type(first.options)(strategies=["plain"], overwrite=True)
        first.make_sinks = lambda: [CSVSink()]
        first.run()
    assert not (tmp_path / "small/plain" / ALERTS).exists()
    assert ALERTS in JSONLSink.leaves("plain")


@pytest.mark.parametrize("kept", [1, 2])
@pytest.mark.parametrize("runner", ["small", "small_steps"])
def test_a_resumed_run_leaves_the_same_alerts(runner, kept, tmp_path, monkeypatch):
    """The run is stopped by an error of its display after so many checkpoints."""
    kinds = {"runner": SmallSteps} if runner == "small_steps" else {}
    options = {"hooks": ["anxious"], "strategies": ["plain"], "epochs": 4, "save_checkpoints": 1, **kinds}
    with registered(Anxious), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session(tmp_path / "whole", **options).run()
        broken = session(tmp_path / "cut", **options)
        steps = iter(range(100))

        def stop(model: Any, found: Any = broken.runner.compute_loss) -> Any:
            def compute(model: Any, batch: Any) -> Any:
                if next(steps) == 3 * kept + 2:
                    raise KeyboardInterrupt
                return found(model, batch)

            return compute

        monkeypatch.setattr(broken.runner, "compute_loss", stop(None))
        with pytest.raises(KeyboardInterrupt):
            broken.run()
        session(tmp_path / "cut", **options, resume=True).run()
    whole, cut = (contents(tmp_path / name / runner / "plain") for name in ("whole", "cut"))
    assert len(whole[ALERTS].splitlines()) >= 12
    assert {name: cut[name] for name in (ALERTS, "plain.jsonl")} == {
        name: whole[name] for name in (ALERTS, "plain.jsonl")
    }
