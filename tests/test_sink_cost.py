"""The benchmark of the file sinks writes the same numbers to every sink and logger."""

import csv
from contextlib import ExitStack

import pytest
from loopscope.hooks import Series
from loopscope.sinks import CSVSink, JSONLSink, read_csv, read_jsonl

from tests.benchmarks.sink_cost import LOGGERS, csv_logger, emitted, installed, loads, summary_writer

WRITTEN = pytest.mark.parametrize("load", list(loads()), ids=lambda load: load.title)


def numbers(value) -> list[float]:
    """Return every number in a metric's value."""
    if isinstance(value, Series):
        return value.values
    if isinstance(value, dict):
        return [number for item in value.values() for number in numbers(item)]
    return value if isinstance(value, list) else [value]


def expected(load) -> list[float]:
    return sorted(number for row in load.rows() for number in row.values())


@WRITTEN
@pytest.mark.parametrize(("sink", "read"), [(JSONLSink, read_jsonl), (CSVSink, read_csv)])
def test_the_sinks_write_every_number(load, sink, read, tmp_path):
    with ExitStack() as stack:
        emitted(load, sink(), tmp_path, stack)()
    written = [number for record in read(tmp_path / f"only.{sink.name}") for number in numbers(record.metrics)]
    assert sorted(written) == expected(load)
    assert len(written) == load.scalars > 1000


@WRITTEN
def test_csv_metrics_all_have_columns(load, tmp_path):
    with ExitStack() as stack:
        emitted(load, CSVSink(), tmp_path, stack)()
    with (tmp_path / "only.csv").open() as file:
        assert {row["other"] for row in csv.DictReader(file)} == {""}


@WRITTEN
@pytest.mark.skipif("CSVLogger" not in dict(installed()), reason="CSVLogger is in the extra 'bench'")
def test_the_csv_logger_writes_every_number(load, tmp_path):
    with ExitStack() as stack:
        csv_logger(load, tmp_path, stack)()
    (path,) = tmp_path.rglob("metrics.csv")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert sorted(float(row[name]) for row in rows for name in row if name != "step") == expected(load)


@pytest.mark.longer
@pytest.mark.some_rows(2)
@WRITTEN
@pytest.mark.skipif("SummaryWriter" not in dict(installed()), reason="SummaryWriter is in the extra 'bench'")
def test_the_summary_writer_writes_every_number(load, tmp_path):
    with ExitStack() as stack:
        summary_writer(load, tmp_path, stack)()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    events.Reload()
    written = [event.value for name in events.Tags()["scalars"] for event in events.Scalars(name)]
    assert sorted(written) == expected(load)


def test_a_logger_whose_package_is_missing_is_named(monkeypatch, capsys):
    monkeypatch.setitem(LOGGERS, "CSVLogger", ("a_missing_package", csv_logger))
    assert "CSVLogger" not in dict(installed())
    assert "No row against CSVLogger" in capsys.readouterr().err
