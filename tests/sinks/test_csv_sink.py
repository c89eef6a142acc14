import csv
import json
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loopscope.hooks import STEP_POINTS, HookPoint, Series
from loopscope.sinks.csv import CSVSink, read_csv
from loopscope.sinks.record import plain

from tests.sinks.emits import WORDS, Emit, emits, exact, run_info, series_in_step

DESCRIBED = ["h/loss", "h/a,b;c", "h/norm", "h/norm/<parameter>", "g/ratio/<parameter>", "g/ratio/deep/<parameter>"]
KEYS = WORDS.filter(bool)
PLACES = st.one_of(
    st.sampled_from([("h/loss", "h/loss", None), ("h/a,b;c", "h/a,b;c", None), ("h/norm", "h/norm", None)]),
    KEYS.map(lambda key: (f"h/norm/{key}", "h/norm/<parameter>", key)),
    KEYS.filter(lambda key: not key.startswith("deep/")).map(lambda key: (f"g/ratio/{key}", "g/ratio", key)),
    KEYS.map(lambda key: (f"g/ratio/deep/{key}", "g/ratio/deep", key)),
    KEYS.map(lambda key: (f"unknown/{key}", f"unknown/{key}", None)),
)
COLUMN_OF = {}


def store_place(place):
    """Store the column of a name, and return the name."""
    name, column, key = place
    COLUMN_OF[name] = (column, key)
    return name


def with_families(metrics):
    """Combine per-parameter metrics of a family into one dict, as in the file."""
    result = {}
    for name, value in metrics.items():
        column, key = COLUMN_OF[name]
        if key is None:
            result[column] = value
        else:
            result.setdefault(column, {})[key] = value
    return result


def expected_rows(emit):
    if emit.point not in STEP_POINTS:
        return [(emit.epoch, emit.step, emit.point, exact(with_families(emit.metrics)))]
    by_steps = {}
    for name, series in emit.metrics.items():
        by_steps.setdefault(tuple(series.steps), {})[name] = series
    return [(emit.epoch, steps[-1], emit.point, exact(with_families(part))) for steps, part in by_steps.items()]


def written(folder, *calls, described=DESCRIBED):
    sink = CSVSink()
    sink.set_run_context(run_info(folder, described=described))
    for metrics, point in calls:
        sink.emit(metrics, 3, point, step=7)
    sink.close("completed")
    return folder / "only.csv"


def cells(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.longer
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(emits(PLACES.map(store_place)), max_size=4))
def test_every_row_is_read_back_as_emitted(tmp_path, all_emits):
    sink = CSVSink()
    sink.set_run_context(run_info(tmp_path, described=DESCRIBED))
    for emit in all_emits:
        emit.to(sink)
    sink.close("completed")
    found = [(r.epoch, r.step, r.hook_point, exact(r.metrics)) for r in read_csv(tmp_path / "only.csv")]
    assert found == [row for emit in all_emits for row in expected_rows(emit)]


@pytest.mark.longer
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(series_in_step(PLACES.map(store_place)), max_size=4))
def test_aligned_series_round_trip_as_rows(tmp_path, flushes):
    """Series with matching steps share one row per step and are read back as emitted."""
    all_emits = [Emit(metrics, 3, HookPoint.POST_STEP, 7) for metrics in flushes]
    path = written(tmp_path, *((emit.metrics, emit.point) for emit in all_emits))
    found = [(r.epoch, r.step, r.hook_point, exact(r.metrics)) for r in read_csv(path)]
    assert found == [row for emit in all_emits for row in expected_rows(emit)]


@pytest.mark.longer
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(emits(PLACES.map(store_place)), max_size=3))
def test_any_csv_reader_can_read_the_file(tmp_path, all_emits):
    """Each line is one row, and each cell is a number, a boolean or JSON."""
    sink = CSVSink()
    sink.set_run_context(run_info(tmp_path, described=DESCRIBED))
    for emit in all_emits:
        emit.to(sink)
    sink.close("completed")
    with (tmp_path / "only.csv").open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    assert len(rows) + 1 == (tmp_path / "only.csv").read_bytes().count(b"\n")
    assert {len(row) for row in rows} <= {len(header)}
    for position, *cells, other in rows:
        assert int(position) >= 0
        assert all(cell in ("nan", "inf", "-inf", "True", "False") or is_json(cell) for cell in cells[2:] if cell)
        assert not other or type(json.loads(other)) is dict


def is_json(text):
    json.loads(text)
    return True


def test_header_is_written_first_and_never_changes(tmp_path):
    """A metric that appears later does not add a column."""
    sink = CSVSink()
    sink.set_run_context(run_info(tmp_path, described=["h/loss", "h/norm/<parameter>"]))
    header = (tmp_path / "only.csv").read_text()
    assert header == "epoch,step,hook_point,h/loss,h/norm,other\n"
    sink.emit({"surprise/x": 1.0}, 0, HookPoint.POST_EPOCH, step=1)
    sink.close("completed")
    assert (tmp_path / "only.csv").read_text().startswith(header)


def test_parameter_metrics_share_one_column(tmp_path):
    """A scalar of the same name keeps a separate column."""
    metrics = {"h/norm": 1.5, "h/norm/w": 0.5, "h/norm/b": math.nan, "g/ratio/w": 2}
    (row,) = cells(written(tmp_path, (metrics, HookPoint.POST_EPOCH)))
    assert row["h/norm"] == "1.5"
    assert row["h/norm/<parameter>"] == '{"w":0.5,"b":NaN}'
    assert row["g/ratio"] == '{"w":2}'


def test_metric_order_does_not_affect_columns(tmp_path):
    metrics = {"g/ratio/w": 4, "h/norm/b": 3, "h/loss": 1, "h/norm": 2, "h/norm/w": 5}
    backwards = dict(reversed(metrics.items()))
    first, second = cells(written(tmp_path, (metrics, HookPoint.POST_EPOCH), (backwards, HookPoint.POST_EPOCH)))
    filled = {"h/loss": "1", "h/norm": "2", "h/norm/<parameter>": '{"b":3,"w":5}', "g/ratio": '{"w":4}'}
    assert {name: first[name] for name in filled} == filled
    assert {name: second[name] for name in filled} == filled | {"h/norm/<parameter>": '{"w":5,"b":3}'}


def test_series_of_two_values_becomes_a_list(tmp_path):
    """A series of one value is written as that value."""
    single, several = {"h/norm/w": Series([4], [1])}, {"h/norm/w": Series([4, 5], [1, 2])}
    rows = cells(written(tmp_path, *((metrics, HookPoint.POST_STEP) for metrics in (single, several, single))))
    assert [row["h/norm/<parameter>"] for row in rows] == ['{"w":1}', '{"w":[1,2]}', '{"w":1}']


def test_undescribed_metric_goes_to_last_column(tmp_path):
    (row,) = cells(written(tmp_path, ({"who/x": -math.inf, "who/y": [1, 2]}, HookPoint.POST_EPOCH)))
    assert row["other"] == '{"who/x":-Infinity,"who/y":[1,2]}'


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": 1, "b": 2}, '{"a":1,"b":2}'),
        ([0.5, math.nan, -math.inf], "[0.5,NaN,-Infinity]"),
        ({"layer": [1, 2], "rest": {"x": True}}, '{"layer":[1,2],"rest":{"x":true}}'),
        ((1, 2), "[1,2]"),
        ([], "[]"),
        ({}, "{}"),
        ("exact", '"exact"'),
        ("", '""'),
        (None, "null"),
        (1e-300, "1e-300"),
        (-math.inf, "-inf"),
        (True, "True"),
        (np.float32(0.5), "0.5"),
    ],
)
def test_numbers_are_plain_and_other_values_json(tmp_path, value, text):
    """Numbers and booleans have Python's format and are read back exactly."""
    path = written(tmp_path, ({"h/loss": value}, HookPoint.POST_EPOCH))
    assert cells(path)[0]["h/loss"] == text
    read = next(read_csv(path)).metrics["h/loss"]
    assert exact(read) == exact(list(value) if isinstance(value, tuple) else plain(value))


@pytest.mark.parametrize("value", [{"w": 1}, [1, 2], [], "exact", None])
@pytest.mark.parametrize("name", ["h/loss", "who/x"])
def test_nonnumeric_single_value_is_read_back(tmp_path, name, value):
    """A series of one dict, list, string or None is not read as a family or as several values."""
    (record,) = read_csv(written(tmp_path, ({name: Series([4], [value])}, HookPoint.POST_STEP)))
    assert record.metrics == {name: Series([4], [value])}


def test_series_with_the_same_steps_share_a_row(tmp_path):
    metrics = {"h/loss": Series([4, 5], [0.5, 0.25]), "h/norm/w": Series([4, 5], [1, 2]), "h/norm": Series([5], [9])}
    first, second = cells(written(tmp_path, (metrics, HookPoint.POST_STEP)))
    assert (first["step"], first["h/loss"], first["h/norm/<parameter>"]) == ("[4,5]", "[0.5,0.25]", '{"w":[1,2]}')
    assert (second["step"], second["h/norm"], second["h/loss"]) == ("5", "9", "")


@pytest.mark.longer
def test_long_series_cell_is_read_back(tmp_path):
    """The reader does not change the field size limit of the csv module."""
    limit = csv.field_size_limit()
    series = Series(list(range(1, 50_001)), [1 / step for step in range(1, 50_001)])
    (record,) = read_csv(written(tmp_path, ({"h/loss": series}, HookPoint.POST_STEP)))
    assert record.metrics == {"h/loss": series}
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize(
    ("point", "read"),
    [(HookPoint.POST_EPOCH, {"steps": [1], "values": [2.0]}), (HookPoint.POST_STEP, Series([1], [2.0]))],
)
def test_series_keeps_its_steps_at_any_point(tmp_path, point, read):
    """A series from POST_EPOCH is read back as a dict of steps and values."""
    (record,) = read_csv(written(tmp_path, ({"h/loss": Series([1], [2.0])}, point)))
    assert record.metrics == {"h/loss": read}


def test_older_file_version_is_refused(tmp_path):
    """The error quotes the cell that is neither a number nor JSON."""
    path = written(tmp_path, ({"h/loss": 1.0}, HookPoint.POST_EPOCH))
    with path.open("a") as file:
        file.write("0,2,POST_EPOCH,0.5,,,w:0.5;b:nan,,,\n")
    with pytest.raises(ValueError, match=r"'w:0\.5;b:nan' is neither a number nor JSON; older versions"):
        list(read_csv(path))
