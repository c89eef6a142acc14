"""``loopscope.read_run``: recorded values as data frames, and errors for unreadable folders."""

import json
import math
import subprocess
import sys
from pathlib import Path

import loopscope
import pandas
import pytest
from loopscope import UsageError
from loopscope.hooks import HookPoint, Series
from loopscope.report import read_run
from loopscope.sinks import CSVSink, JSONLSink, read_jsonl

from tests.framework.report.plotted import record
from tests.framework.runs.small_experiment import Small, SmallSteps, registered, train

EMITS = [
    (1, {"m/loss": 0.5, "m/list": [1, 2], "m/grad": {"a/weight": 1.0, "b": {"c": 2.0}}}),
    (2, {"m/loss": math.nan, "m/flag": True, "m/word": "up"}),
    (4, {"m/loss": -math.inf, "m/count": 3}),
]


def test_frame_has_metric_columns_and_step_rows(tmp_path: Path) -> None:
    """The columns keep dtypes, missing values, NaN, infinity and lists."""
    run = loopscope.read_run(record(tmp_path, EMITS))
    assert run.names == ["m/loss", "m/list", "m/grad/a/weight", "m/grad/b/c", "m/flag", "m/word", "m/count"]
    loss = run.frame("m/loss")
    assert (list(loss.index), loss.index.name, list(loss.columns)) == ([1, 2, 4], "step", ["m/loss"])
    assert loss["m/loss"].tolist()[::2] == [0.5, -math.inf]
    assert math.isnan(loss["m/loss"][2])
    both = run.frame("m/count", "m/flag")
    assert list(both.index) == [2, 4]
    assert (both["m/count"][4], both["m/flag"][2]) == (3, True)
    assert both["m/count"].isna()[2]
    assert run.frame("m/count")["m/count"].dtype == "int64"
    assert run.frame("m/flag")["m/flag"].dtype == "bool"
    assert run.frame("m/list")["m/list"][1] == [1, 2]
    assert list(run.frame().columns) == run.names


def test_long_frame_has_every_recorded_value(tmp_path: Path) -> None:
    """Each value of a series has its own step, and a dict has one metric per key."""
    emits = [(6, {"m/loss": Series([4, 6], [0.5, 0.25]), "m/grad": Series([5], [{"a": 1.0}])})]
    run = loopscope.read_run(record(tmp_path, emits, point=HookPoint.POST_STEP))
    rows = [tuple(row) for row in run.metrics.itertuples(index=False)]
    assert rows == [
        (0, 4, "POST_STEP", "m/loss", 0.5),
        (0, 6, "POST_STEP", "m/loss", 0.25),
        (0, 5, "POST_STEP", "m/grad/a", 1.0),
    ]
    assert run.frame("m/loss")["m/loss"].to_dict() == {4: 0.5, 6: 0.25}


@pytest.mark.longer
@pytest.mark.parametrize("runner", [Small, SmallSteps])
def test_real_run_matches_its_record_and_summary(tmp_path: Path, runner: type[Small]) -> None:
    """A CSV record gives the same frame as the JSONL record."""
    summary = train(tmp_path, runner=runner, epochs=3, hooks=["norms"])
    folder = tmp_path / runner.name / "plain"
    run = loopscope.read_run(str(folder))
    assert (run.state, run.summary["final"], run.config["epochs"]) == ("completed", summary["final"], 3)
    loss = run.frame("training_metrics/loss")["training_metrics/loss"]
    expected: dict[int, float] = {}
    for emit in read_jsonl(folder / "plain.jsonl"):
        value = emit.metrics.get("training_metrics/loss")
        if value is not None:
            expected |= (
                dict(zip(value.steps, value.values, strict=True)) if isinstance(value, Series) else {emit.step: value}
            )
    assert loss.to_dict() == expected
    assert run.frame("training_metrics/val_acc", by="epoch").iloc[-1, 0] == summary["final"]["val_acc"]
    by_csv = (folder / "plain.jsonl").unlink() or loopscope.read_run(folder)
    assert sorted(by_csv.names) == sorted(run.names)
    pandas.testing.assert_frame_equal(by_csv.frame(*run.names), run.frame())


@pytest.mark.longer
def test_epoch_rows_hold_last_value_of_epoch(tmp_path: Path) -> None:
    with registered(SmallSteps):
        train(tmp_path, runner=SmallSteps, epochs=2, log_every=1)
    run = loopscope.read_run(tmp_path / "small_steps/plain")
    steps, epochs = (run.frame("training_metrics/loss", by=by)["training_metrics/loss"] for by in ("step", "epoch"))
    assert (len(steps), epochs.index.name) == (6, "epoch")
    assert epochs.iloc[0] in steps.values[:3]
    assert epochs.iloc[-1] == steps.iloc[-1]


@pytest.mark.parametrize("sink_class", [JSONLSink, CSVSink])
def test_unfinished_record_is_read_to_last_line(tmp_path: Path, sink_class) -> None:
    """The reader ignores an incomplete last line in JSONL and CSV files."""
    folder = record(tmp_path, EMITS[:1], sink_class=sink_class)
    with (folder / f"only.{sink_class.name}").open("a") as file:
        file.write('{"epoch":0,"step":2,"hook_po' if sink_class is JSONLSink else '0,2,"POST')
    run = loopscope.read_run(folder)
    assert (run.state, run.summary) == ("killed", {})
    assert run.frame("m/loss").to_dict() == {"m/loss": {1: 0.5}}


def test_run_without_records_has_empty_frames(tmp_path: Path) -> None:
    run = loopscope.read_run(record(tmp_path, []))
    assert (run.names, len(run.frame()), len(run.metrics)) == ([], 0, 0)
    assert list(run.metrics.columns) == ["epoch", "step", "hook_point", "metric", "value"]


def test_patterns_select_and_unknown_names_are_refused(tmp_path: Path) -> None:
    """The error suggests the nearest name or lists the existing ones."""
    run = loopscope.read_run(record(tmp_path, EMITS))
    assert list(run.frame("m/*o*", "m/loss").columns) == ["m/loss", "m/word", "m/count"]
    with pytest.raises(UsageError, match=r"has no metric 'm/los'; the nearest: m/loss"):
        run.frame("m/los")
    with pytest.raises(UsageError, match=r"has no metric 'qqq'; it has m/loss, .* and 1 more"):
        run.frame("qqq")
    with pytest.raises(UsageError, match="by is 'epochs'; it must be step or epoch"):
        run.frame("m/loss", by="epochs")


def test_unreadable_folder_or_record_is_refused(tmp_path: Path) -> None:
    """The config and state of a run without a record stay readable, and a damaged summary is reported."""
    with pytest.raises(UsageError, match="is not the folder of a run"):
        loopscope.read_run(tmp_path)
    folder = record(tmp_path, EMITS)
    (folder / "only.jsonl").write_text("{]\n")
    run = loopscope.read_run(folder)
    with pytest.raises(UsageError, match="cannot be read after 0 emits"):
        run.frame("m/loss")
    (folder / "only.jsonl").unlink()
    run = loopscope.read_run(folder)
    assert run.config == {}
    with pytest.raises(UsageError, match=r"has neither only.jsonl nor only.csv; .* with the sink 'jsonl' or 'csv'"):
        run.names  # noqa: B018
    (folder / "summary.json").write_text(json.dumps({"status": "failed"}))
    run = loopscope.read_run(folder)
    assert (run.state, run.summary) == ("damaged", {})
    assert "summary.json cannot be used: it has no field" in run.problem


def test_missing_pandas_error_names_install_command(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("loopscope.optional_packages.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"read_run needs the package pandas.*pip install 'pandas>="):
        read_run(tmp_path)


@pytest.mark.slow
@pytest.mark.process
def test_reading_names_does_not_import_pandas(tmp_path: Path) -> None:
    """pandas is imported only when a frame is requested, after import loopscope alone."""
    folder = record(tmp_path, EMITS)
    code = (
        f"import sys, loopscope; run = loopscope.read_run({str(folder)!r}); names = run.names; "
        "assert 'pandas' not in sys.modules; print(len(names), len(run.frame()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "7 3\n", done.stderr
