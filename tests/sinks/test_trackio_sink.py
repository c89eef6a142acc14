"""The Trackio sink with the real client and a local store, and several clients in one run."""

import json
import math
import os
from types import SimpleNamespace

import pytest
from loopscope.errors import RunNotice, UsageError
from loopscope.hooks import HookPoint, Series
from loopscope.sinks import JSONLSink, TrackioSink, WandbSink, client_sink, read_jsonl

from tests.sinks.emits import run_info
from tests.sinks.test_sink_contracts import run_with
from tests.sinks.trackio_files import rows_of, table
from tests.support import differences

pytest.importorskip("trackio")
pytestmark = pytest.mark.filterwarnings("ignore::loopscope.errors.RunNotice")

SERIES = {"h/s": Series([1, 2, 4], [0.5, math.nan, 2.5])}
CONFIG = {"lr": 0.25, "_private": 1}
VALUES = {"h/a": 0.1, "h/inf": -math.inf, "h/list": [1.0, 3.0, math.nan]}


def clean_environment(patch, folder):
    """Remove Trackio's variables, set the local store, and wait up to a minute for the client."""
    for name in [name for name in os.environ if name.startswith("TRACKIO_")]:
        patch.delenv(name)
    patch.setenv("TRACKIO_DIR", str(folder))
    patch.setenv("HF_HUB_OFFLINE", "1")
    patch.setattr(client_sink, "LONGEST_WAIT", 60.0)


@pytest.fixture(autouse=True)
def isolated_trackio(monkeypatch, tmp_path):
    clean_environment(monkeypatch, tmp_path / "store")


def started(folder, **options):
    sink = TrackioSink(**options)
    sink.set_run_context(run_info(folder, config=CONFIG))
    return sink


def fed(sink):
    sink.emit(SERIES, 0, HookPoint.POST_STEP, step=4)
    sink.emit(VALUES, 0, HookPoint.POST_EPOCH, step=4)
    return sink


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """A run that failed after three emits and was resumed after the first two."""
    folder = tmp_path_factory.mktemp("trackio")
    with pytest.MonkeyPatch.context() as patch:
        clean_environment(patch, folder / "store")
        sink = fed(started(folder, project="demo"))
        position = sink.position()
        sink.emit({"h/a": 0.2}, 1, HookPoint.POST_EPOCH, step=5)
        sink.close("failed")
        sink = TrackioSink(project="demo")
        sink.resume(run_info(folder, config=CONFIG), position)
        for step in (5, 6):
            sink.emit({"h/a": step / 25}, step - 4, HookPoint.POST_EPOCH, step=step)
        sink.close("completed")
    return SimpleNamespace(store=folder / "store", name=f"only-{position['run_id'][:6]}")


@pytest.mark.slow
@pytest.mark.process
def test_trackio_rows_arrive_once_after_resume(resumed):
    """Every row is stored at its step in one run; numbers that are not finite are kept."""
    rows = rows_of(resumed.store)
    assert {name for name, _, _ in rows} == {resumed.name}
    assert [step for _, step, _ in rows] == [1, 2, 4, 4, 5, 6]
    metrics = [row for _, _, row in rows]
    assert [row.get("h/s") for row in metrics[:3]] == [0.5, "NaN", 2.5]
    assert (metrics[3]["h/a"], metrics[3]["h/inf"], metrics[3]["h/list/non_finite"]) == (0.1, "-Infinity", 1)
    assert sum(metrics[3]["h/list"]["values"]) == 2
    assert [row["h/a"] for row in metrics[4:]] == [0.2, 0.24]


@pytest.mark.process
def test_trackio_run_has_options_and_alert(resumed):
    """The group is the experiment, and an alert reports the failure."""
    ((config,),) = table(resumed.store, "SELECT config FROM configs")
    options = json.loads(config)
    assert (options["lr"], options["private"], options["strategy"], options["_Group"]) == (0.25, 1, "only", "exp")
    assert table(resumed.store, "SELECT title, level FROM alerts") == [("The run failed.", "error")]


@pytest.mark.process
@pytest.mark.guarantee("monitoring-changes-nothing")
def test_trackio_sink_leaves_run_unchanged(tmp_path):
    """The run has the same bytes and variables with the sink; the project is named after the experiment."""
    bare = run_with(tmp_path, [])
    variables = dict(os.environ)
    with pytest.warns(RunNotice, match="in project exp; to view it: trackio show --project exp"):
        watched = run_with(tmp_path, [TrackioSink()], audit=True)
    assert not differences(bare, watched)
    assert dict(os.environ) == variables
    steps = {record.step for record in read_jsonl(tmp_path / "only.jsonl")}
    assert steps <= {step for _, step, _ in rows_of(tmp_path / "store", "exp")}


@pytest.mark.process
@pytest.mark.guarantee("monitoring-changes-nothing")
def test_failing_trackio_client_only_warns(tmp_path):
    """Trackio reserves this name; the warning has the reason, and the record is complete."""
    sink = fed(started(tmp_path, project="registry-x"))
    with pytest.warns(UserWarning, match="Trackio client failed: ValueError: .*registry.*--to trackio --project"):
        sink.close("completed")
    assert len(list(read_jsonl(tmp_path / "only.jsonl"))) == 2


@pytest.mark.process
@pytest.mark.guarantee("monitoring-changes-nothing")
def test_unwritable_trackio_store_is_reported(tmp_path):
    """Trackio itself only prints that it lost rows."""
    (tmp_path / "store").write_text("a file in place of the folder")
    sink = fed(started(tmp_path, project="demo"))
    with pytest.warns(UserWarning, match="Trackio client failed: "):
        sink.close("completed")


@pytest.mark.slow
@pytest.mark.process
def test_several_clients_share_one_record(tmp_path, monkeypatch):
    """The record has every line once, in any order of the sinks."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_with(tmp_path, [JSONLSink()])
    alone = (tmp_path / "only.jsonl").read_bytes()
    run_with(tmp_path, [TrackioSink(project="demo"), JSONLSink(), WandbSink()])
    assert (tmp_path / "only.jsonl").read_bytes() == alone
    assert rows_of(tmp_path / "store")
    assert list(tmp_path.glob("wandb/offline-run-*"))


@pytest.mark.parametrize("name", ["", " ", "--"])
def test_invalid_trackio_project_is_refused(name):
    with pytest.raises(UsageError, match="is not a valid Trackio project"):
        TrackioSink(project=name)
