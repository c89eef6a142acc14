"""Alerts: every warning of a hook's ``check`` reaches the sinks, independent of Python's warning filters."""

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

warn = warnings.warn  # as imported by ``from warnings import warn``


class Anxious(TrainingHook):
    """Issues the same warning in every check, and in the second one also an alert and a recovery."""

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
    alerts = alerts_of(tmp_path / "small/plain")
    repeated = [alert for alert in alerts if alert["sentence"] == "All is lost."]
    assert [(alert["epoch"], alert["step"]) for alert in repeated] == [
        *((0, 1), (0, 2), (0, 3), (0, 3)), *((1, 4), (1, 5), (1, 6), (1, 6))
    ]  # fmt: skip
    rows = [indices.tolist() for indices in session(tmp_path).runner.build_loader("plain").row_indices(1)]
    assert [alert["rows"] for alert in repeated[4:]] == [*rows, rows[-1]]
    del repeated[0]["rows"]
    assert repeated[0] == {"epoch": 0, "step": 1, "hook": "anxious", "metric": "", "value": None, "limit": None,
                       "is_over": False, "sentence": "All is lost."}  # fmt: skip
    excess, recovery = [alert for alert in alerts if alert not in repeated]
    fields = ("metric", "step", "value", "limit", "is_over")
    assert [excess[field] for field in fields] == ["level", 1, 7.5, 6.0, False]
    assert (recovery["sentence"], recovery["is_over"]) == ("It is over.", True)
    shown = [item for item in caught if str(item.message) == "All is lost."]
    assert len(shown) == {"ignore": 0, "once": 1}.get(action, 8)
    assert all(Path(item.filename).name == "test_alerts.py" or item.lineno for item in shown)


def test_warnings_as_errors_still_record_alerts(tmp_path):
    """The run ends with a HookError at the check, and the alert is in the file."""
    with registered(Anxious), pytest.raises(HookError, match="'anxious' raised at check of step 3: Alert: All is lost"):
        session(tmp_path, hooks=["anxious"], strategies=["plain"]).run()
    assert alerts_of(tmp_path / "small/plain")[0]["sentence"] == "All is lost."


def test_warnings_of_other_modules_are_not_repeated():
    """warnings.catch_warnings would reset the registries of shown warnings."""

    class Warning_(Anxious):
        def compute(self, ctx: Any) -> dict[str, float]:
            exec(compile("import warnings; warnings.warn('once here')", "<m>", "exec"), registry)
            return {"level": 1.0}

    registry: dict[str, Any] = {"__name__": "elsewhere"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        train(Case(), [Warning_()], steps=6)
        assert [str(item.message) for item in caught].count("once here") == 1
        assert [str(item.message) for item in caught].count("All is lost.") > 6
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


@pytest.mark.parametrize("checkpoints", [1, 2])
@pytest.mark.parametrize("runner", ["small", "small_steps"])
def test_resumed_run_has_the_same_alerts(runner, checkpoints, tmp_path, monkeypatch):
    """The run is interrupted after one or two checkpoints."""
    kinds = {"runner": SmallSteps} if runner == "small_steps" else {}
    options = {"hooks": ["anxious"], "strategies": ["plain"], "epochs": 4, "save_checkpoints": 1, **kinds}
    with registered(Anxious), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session(tmp_path / "uninterrupted", **options).run()
        broken = session(tmp_path / "resumed", **options)
        steps = iter(range(100))

        def interrupted(model: Any, compute_loss: Any = broken.runner.compute_loss) -> Any:
            def compute(model: Any, batch: Any) -> Any:
                if next(steps) == 3 * checkpoints + 2:
                    raise KeyboardInterrupt
                return compute_loss(model, batch)

            return compute

        monkeypatch.setattr(broken.runner, "compute_loss", interrupted(None))
        with pytest.raises(KeyboardInterrupt):
            broken.run()
        session(tmp_path / "resumed", **options, resume=True).run()
    expected, resumed = (contents(tmp_path / name / runner / "plain") for name in ("uninterrupted", "resumed"))
    assert len(expected[ALERTS].splitlines()) >= 12
    assert {name: resumed[name] for name in (ALERTS, "plain.jsonl")} == {
        name: expected[name] for name in (ALERTS, "plain.jsonl")
    }
