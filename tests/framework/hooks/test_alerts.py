"""Alerts: those that a hook's ``check`` returns reach the sinks, independent of Python's warning filters."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from loopscope.errors import HookError, UsageError
from loopscope.hooks import ALERTS, Alert, AlertNotice, HookPoint, Recovery, TrainingHook
from loopscope.runs import read_alerts
from loopscope.sinks import CSVSink, JSONLSink

from tests.framework.runs.small_experiment import SmallSteps, contents, registered, session
from tests.support import Case, train


class Anxious(TrainingHook):
    """Returns the same sentence in every check, and in the second one also a measured alert and a recovery."""

    name = "anxious"
    hook_points = {HookPoint.POST_EPOCH, HookPoint.POST_STEP}
    metrics = "level | 1 | 1 | Look."

    def compute(self, ctx: Any) -> dict[str, float]:
        return {"level": 1.0}

    def check(self, values: Any, step: int) -> Any:
        yield Alert("All is lost.")
        if step == 2:
            yield Alert("Too far.", metric="level", step=1, value=7.5, limit=6.0)
            yield Recovery("It is over.")


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
    assert repeated[0] == {"epoch": 0, "step": 1, "hook": "anxious", "metric": "", "severity": "warning", "value": None,
                       "id": "anxious", "limit": None, "is_over": False, "sentence": "All is lost."}  # fmt: skip
    excess, recovery = [alert for alert in alerts if alert not in repeated]
    fields = ("metric", "step", "value", "limit", "is_over")
    assert [excess[field] for field in fields] == ["level", 1, 7.5, 6.0, False]
    assert (recovery["sentence"], recovery["is_over"]) == ("It is over.", True)
    shown = [item for item in caught if str(item.message) == "All is lost."]
    assert len(shown) == {"ignore": 0, "once": 1}.get(action, 8)
    assert {Path(item.filename).name for item in shown} <= {"test_alerts.py"}


@pytest.mark.filterwarnings("error::loopscope.hooks.Alert")
def test_remark_is_issued_as_a_notice(tmp_path):
    """Severity and id are in the file, and a filter of alerts does not apply to a remark."""

    class Calm(Anxious):
        def check(self, values: Any, step: int) -> Any:
            yield Alert("A spike.", metric="level", severity="info", id="loss-spike")

    with registered(Calm), pytest.warns(AlertNotice, match="A spike"):
        session(tmp_path, hooks=["anxious"], strategies=["plain"]).run()
    first = alerts_of(tmp_path / "small/plain")[0]
    assert (first["severity"], first["id"]) == ("info", "loss-spike")


def test_unknown_severity_is_refused():
    with pytest.raises(UsageError, match=r"Unknown severity of an alert: 'bad'\..*critical, info, warning"):
        Alert("The loss spiked.", severity="bad")


def test_alerts_of_earlier_versions_are_complete(tmp_path):
    """Lines without severity and id get defaults, and other lines are left out."""
    lines = [{"epoch": 0, "step": 3, "hook": "norms", "metric": "own_norm", "sentence": "High.", "is_over": is_over}
             for is_over in (False, True)]  # fmt: skip
    (tmp_path / ALERTS).write_text("".join(f"{json.dumps(line)}\n" for line in lines) + "[]\n{}\n3\nno")
    alert, recovery = read_alerts(tmp_path)
    assert (alert["severity"], alert["id"]) == ("warning", "norms-own-norm")
    assert recovery["severity"] == "info"


@pytest.mark.filterwarnings("error::loopscope.hooks.Alert")
def test_alerts_as_errors_are_still_recorded(tmp_path):
    """The run ends with a HookError at the check, and the alert is in the file."""
    with registered(Anxious), pytest.raises(HookError, match="'anxious' raised at check of step 3: Alert: All is lost"):
        session(tmp_path, hooks=["anxious"], strategies=["plain"]).run()
    assert alerts_of(tmp_path / "small/plain")[0]["sentence"] == "All is lost."


def test_plain_warnings_in_check_are_no_alerts(tmp_path):
    class Warning_(Anxious):
        def check(self, values: Any, step: int) -> None:
            warnings.warn("All is lost.", stacklevel=1)

    with registered(Warning_), pytest.warns(UserWarning, match="All is lost") as caught:
        session(tmp_path, hooks=["anxious"], strategies=["plain"]).run()
    assert {item.category for item in caught} == {UserWarning}
    assert alerts_of(tmp_path / "small/plain") == []


@pytest.mark.parametrize(("returned", "named"), [(3, "3; it returns a list"), (["bad"], r"'bad' in its alerts")])
def test_other_results_of_check_are_refused(returned, named):
    class Mistaken(Anxious):
        def check(self, values: Any, step: int) -> Any:
            return returned

    with pytest.raises(HookError, match=rf"raised at check of step 3: TypeError: returned {named}.*Alert\('The loss"):
        train(Case(), [Mistaken()])


def test_alerts_before_an_error_are_kept(tmp_path):
    class Failing(Anxious):
        def check(self, values: Any, step: int) -> Any:
            yield Alert("All is lost.")
            raise ValueError("broken")

    with registered(Failing), pytest.raises(HookError, match="ValueError: broken"):
        session(tmp_path, hooks=["anxious"], strategies=["plain"]).run()
    assert alerts_of(tmp_path / "small/plain")[0]["sentence"] == "All is lost."


@pytest.mark.longer
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
    assert ALERTS in JSONLSink.file_names("plain")


@pytest.mark.longer
@pytest.mark.some_rows(2)
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
