import json
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loopscope.hooks import HookPoint, Series
from loopscope.sinks.jsonl import JSONLSink, read_jsonl

from tests.sinks.emits import NUMBERS, VALUES, WORDS, emits, exact, run_info, series_in_step

NAMES = st.builds("{}/{}".format, WORDS, WORDS)


def written(folder, *calls):
    sink = JSONLSink()
    sink.set_run_context(run_info(folder))
    for metrics, point in calls:
        sink.emit(metrics, 3, point, step=7)
    sink.close("completed")
    return folder / "only.jsonl"


@pytest.mark.longer
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(emits(NAMES), max_size=4))
def test_emits_are_read_back_exactly(tmp_path, all_emits):
    sink = JSONLSink()
    sink.set_run_context(run_info(tmp_path))
    for emit in all_emits:
        emit.to(sink)
    sink.close("completed")
    records = list(read_jsonl(tmp_path / "only.jsonl"))
    assert [(r.epoch, r.step, r.hook_point) for r in records] == [(e.epoch, e.step, e.point) for e in all_emits]
    assert [list(record.metrics) for record in records] == [list(emit.metrics) for emit in all_emits]
    assert [exact(record.metrics) for record in records] == [exact(emit.metrics) for emit in all_emits]


def test_line_contains_position_then_metrics(tmp_path):
    """A line is one compact JSON object with the metrics in their given order."""
    path = written(tmp_path, ({"b/y": 0.1, "a/x": {"k": [1, 2]}}, HookPoint.POST_EPOCH))
    assert path.read_text() == '{"epoch":3,"step":7,"hook_point":"POST_EPOCH","b/y":0.1,"a/x":{"k":[1,2]}}\n'


@pytest.mark.longer
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.one_of(st.dictionaries(NAMES, NUMBERS, max_size=6), st.dictionaries(NAMES, VALUES, max_size=3)))
def test_value_lines_match_json_module(tmp_path, metrics):
    """Lines of plain values equal the compact output of json.dumps."""
    line = {"epoch": 3, "step": 7, "hook_point": "POST_EPOCH"} | metrics
    path = written(tmp_path, (metrics, HookPoint.POST_EPOCH))
    assert path.read_text() == json.dumps(line, separators=(",", ":")) + "\n"


@pytest.mark.longer
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(series_in_step(NAMES))
def test_series_lines_match_json_module(tmp_path, metrics):
    """Lines of series equal the compact output of json.dumps."""
    fields = {name: {"steps": series.steps, "values": series.values} for name, series in metrics.items()}
    line = {"epoch": 3, "step": 7, "hook_point": "POST_STEP"} | fields
    path = written(tmp_path, (metrics, HookPoint.POST_STEP))
    assert path.read_text() == json.dumps(line, separators=(",", ":")) + "\n"


def test_value_kinds_may_change_between_lines(tmp_path):
    """The same names with other kinds of values are read back correctly."""
    kinds = [{"h/a": 1.0, "h/b": 2}, {"h/a": Series([1], [0.5]), "h/b": 2}, {"h/a": [1, 2], "h/b": math.inf}]
    kinds.append({"h/a": Series([1, 2], [0.5, 1]), "h/b": Series([1, 2], ["x", None])})
    records = read_jsonl(written(tmp_path, *((metrics, HookPoint.POST_STEP) for metrics in kinds)))
    assert [record.metrics for record in records] == kinds


def test_series_is_written_with_steps_and_values(tmp_path):
    path = written(tmp_path, ({"h/m": Series([5, 7], [0.5, math.inf])}, HookPoint.POST_STEP))
    assert json.loads(path.read_text())["h/m"] == {"steps": [5, 7], "values": [0.5, math.inf]}


def test_non_finite_values_follow_json_module(tmp_path):
    """NaN, Infinity and -Infinity are written as in the json module."""
    path = written(tmp_path, ({"h/m": [math.nan, math.inf, -math.inf]}, HookPoint.SNAPSHOT))
    assert '"h/m":[NaN,Infinity,-Infinity]' in path.read_text()


def test_unsupported_values_use_nearest_json_form(tmp_path):
    """NumPy scalars, tuples, enums and other objects become numbers, lists or strings."""
    odd = {"h/a": np.float32(0.5), "h/b": {(1, 2): np.int64(3)}, "h/c": (1,), "h/d": object, "h/e": HookPoint.SNAPSHOT}
    (record,) = read_jsonl(written(tmp_path, (odd, HookPoint.POST_EPOCH)))
    assert record.metrics == {"h/a": 0.5, "h/b": {"(1, 2)": 3}, "h/c": [1], "h/d": str(object), "h/e": 6}


def test_reserved_metric_name_is_refused(tmp_path):
    """A metric named like a position field raises an error, and no line is written."""
    sink = JSONLSink()
    sink.set_run_context(run_info(tmp_path))
    with pytest.raises(ValueError, match="hook/metric"):
        sink.emit({"epoch": 1.0}, 0, HookPoint.POST_EPOCH, step=1)
    sink.close("failed")
    assert (tmp_path / "only.jsonl").read_text() == ""


def test_truncated_line_is_skipped_by_reader(tmp_path):
    path = written(tmp_path, ({"h/m": 1}, HookPoint.POST_EPOCH), ({"h/m": 2}, HookPoint.POST_EPOCH))
    path.write_bytes(path.read_bytes()[:-3])
    assert [record.metrics for record in read_jsonl(path)] == [{"h/m": 1}]


def test_emitted_line_is_readable_immediately(tmp_path):
    """The line is in the file before any flush or close."""
    sink = JSONLSink()
    sink.set_run_context(run_info(tmp_path))
    sink.emit({"h/m": 1.0}, 0, HookPoint.POST_EPOCH, step=1)
    assert len(list(read_jsonl(tmp_path / "only.jsonl"))) == 1
    sink.close("completed")
