"""Event files of runs, read back with TensorBoard's accumulator."""

import math
import random
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopscope.errors import UsageError
from loopscope.hooks import HookPoint, Series
from loopscope.sinks import TensorBoardSink
from loopscope.sinks.event_file import BUCKETS, EventFile, histogram
from tensorboard.plugins.hparams.metadata import (
    parse_session_end_info_plugin_data,
    parse_session_start_info_plugin_data,
)

from tests.framework.runs.small_experiment import SmallConfig
from tests.sinks.emits import run_info
from tests.sinks.event_files import accumulated, float32, scalars

FLOATS = st.floats(allow_nan=False, allow_infinity=False)


def written(folder, *emits, status="completed", **run):
    """Write emits of (metrics, point, step) and return the folder of the event file."""
    sink = TensorBoardSink()
    sink.set_run_context(run_info(folder, **run))
    for metrics, point, step in emits:
        sink.emit(metrics, 0, point, step=step)
    sink.close(status)
    return folder / "tensorboard"


def at_epoch_end(metrics, step=7):
    return (metrics, HookPoint.POST_EPOCH, step)


def test_scalar_is_written_at_its_step(tmp_path):
    folder = written(tmp_path, at_epoch_end({"h/a": 0.1}, 7), at_epoch_end({"h/a": 2, "h/b": True}, 14))
    assert scalars(folder) == {"h/a": [(7, float32(0.1)), (14, 2.0)], "h/b": [(14, 1.0)]}


def test_series_values_are_written_at_their_steps(tmp_path):
    series = {"h/a": Series([3, 4, 9], [0.5, 0.25, 0.125]), "h/b": Series([4], [1])}
    folder = written(tmp_path, (series, HookPoint.POST_STEP, 9))
    assert scalars(folder) == {"h/a": [(3, 0.5), (4, 0.25), (9, 0.125)], "h/b": [(4, 1.0)]}


def test_dict_gives_a_scalar_per_key(tmp_path):
    """Nested dicts and dicts inside a series are expanded too."""
    by_layer = Series([1, 2], [{"w": 1.0}, {"w": 2.0, "b": 3.0}])
    folder = written(
        tmp_path, at_epoch_end({"h/n": {"w": 1.5, "in": {"b": 2}}}), ({"h/s": by_layer}, HookPoint.POST_STEP, 2)
    )
    expected = {"h/n/w": [(7, 1.5)], "h/n/in/b": [(7, 2.0)], "h/s/w": [(1, 1.0), (2, 2.0)], "h/s/b": [(2, 3.0)]}
    assert scalars(folder) == expected


def test_non_finite_values_are_kept(tmp_path):
    metrics = {"h/nan": math.nan, "h/inf": math.inf, "h/neg": -math.inf, "h/huge": 10**400, "h/beyond": 1e300}
    found = {tag: points[0][1] for tag, points in scalars(written(tmp_path, at_epoch_end(metrics))).items()}
    assert math.isnan(found.pop("h/nan"))
    assert found == {"h/inf": math.inf, "h/neg": -math.inf, "h/huge": math.inf, "h/beyond": math.inf}


def test_list_is_written_as_histogram(tmp_path):
    """Non-finite values are counted in a scalar, and an empty list writes nothing."""
    values = [1.0, 2.0, 2.0, 4, math.nan, -math.inf]
    found = accumulated(written(tmp_path, at_epoch_end({"h/list": values, "h/empty": []})))
    (event,) = found.Histograms("h/list")
    proto = event.histogram_value
    assert (event.step, proto.min, proto.max, proto.num, proto.sum, proto.sum_squares) == (7, 1.0, 4.0, 4, 9.0, 25.0)
    assert [(point.step, point.value) for point in found.Scalars("h/list/non_finite")] == [(7, 2.0)]
    assert set(found.Tags()["histograms"]) == {"h/list"}


def test_text_and_nested_lists_are_written(tmp_path):
    """Text is a tensor, and every element of a nested list has its own tag."""
    folder = written(tmp_path, at_epoch_end({"h/word": "exact", "h/pairs": [{"a": 1.0}, {"a": 2.0}], "h/none": None}))
    assert scalars(folder) == {"h/pairs/0/a": [(7, 1.0)], "h/pairs/1/a": [(7, 2.0)]}
    assert accumulated(folder).Tensors("h/word")[0].tensor_proto.string_val == [b"exact"]


@given(st.lists(FLOATS, min_size=1, max_size=60))
def test_histogram_buckets_count_values_up_to_limit(values):
    """Cumulative counts match the values at or below each sorted limit."""
    proto = histogram(np.array(values))
    limits, counts = list(proto.bucket_limit), list(proto.bucket)
    assert (len(limits), limits, sum(counts)) == (BUCKETS, sorted(limits), len(values))
    assert (proto.min, proto.max, limits[-1]) == (min(values), max(values), max(values))
    for index, limit in enumerate(limits):
        assert sum(counts[: index + 1]) == sum(value <= limit for value in values)


def hyperparameters(folder):
    tags = accumulated(folder).SummaryMetadata
    info = parse_session_start_info_plugin_data(tags("_hparams_/session_start_info").plugin_data.content)
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in info.hparams.items()}


def test_configuration_and_treatments_are_hyper_parameters(tmp_path):
    config = SmallConfig(lr=0.25, bright=True, output_dir=tmp_path)
    found = hyperparameters(written(tmp_path, config=config, treatments={"grad_clip": ("gradients",)}))
    assert (found["lr"], found["bright"], found["mode"], found["ratio"]) == (0.25, True, "fast", "None")
    assert (found["experiment"], found["strategy"]) == ("exp", "only")
    assert found["treatments"] == "grad_clip (gradients)"
    assert found.keys() >= config.as_dict().keys()


def test_text_tab_shows_untreated_runs(tmp_path):
    """The table has the flattened configuration, and the treatments as none."""
    found = accumulated(written(tmp_path, config={"lr": 0.5, "adam": {"eps": 1e-8}})).Tensors("run")
    lines = found[0].tensor_proto.string_val[0].decode().splitlines()
    assert {"| treatments | none |", "| lr | 0.5 |", "| adam.eps | 1e-08 |"} <= set(lines)


@pytest.mark.parametrize(("status", "shown"), [("completed", 1), ("failed", 2), ("interrupted", 2)])
def test_status_is_shown(tmp_path, status, shown):
    metadata = accumulated(written(tmp_path, at_epoch_end({"h/a": 1}), status=status)).SummaryMetadata
    assert (
        parse_session_end_info_plugin_data(metadata("_hparams_/session_end_info").plugin_data.content).status == shown
    )


def test_emitted_rows_are_readable_immediately(tmp_path):
    """An event file of an earlier run is overwritten."""
    written(tmp_path, at_epoch_end({"h/old": 1.0}))
    sink = TensorBoardSink()
    sink.set_run_context(run_info(tmp_path))
    sink.emit({"h/new": 0.5}, 0, HookPoint.POST_EPOCH, step=7)
    assert scalars(tmp_path / "tensorboard") == {"h/new": [(7, 0.5)]}
    sink.close("completed")


def test_sink_uses_no_random_numbers_or_threads(tmp_path):
    """Writing scalars and histograms does not change the state of the random module."""
    random.seed(3)
    before, threads = random.getstate(), threading.enumerate()
    written(tmp_path, at_epoch_end({"h/a": 1.0, "h/list": [1.0, 2.0]}))
    assert random.getstate() == before
    assert {*threading.enumerate()} <= {*threads}


def test_unopenable_event_file_is_closed(tmp_path):
    """On a full disk the constructor raises, and no file object stays open."""
    with pytest.raises(OSError, match="No space left"):
        EventFile(tmp_path.__class__("/dev/full"))


def test_missing_tensorboard_error_shows_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UsageError, match=r"'tensorboard' needs the package tensorboard.* pip install 'tensorboard>="):
        TensorBoardSink()


@pytest.mark.slow
@pytest.mark.process
def test_importing_sinks_imports_neither_package():
    code = "import loopscope.sinks, sys; sys.exit(bool({'tensorboard', 'wandb', 'tensorflow'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.process
def test_writing_imports_no_tensorflow(tmp_path):
    code = (
        "import sys; sys.modules['tensorflow'] = None; from pathlib import Path; "
        "from loopscope.sinks import event_file as e;"
        "f = e.EventFile(Path(sys.argv[1])); f.write({1: [('a', [0.5])]}); f.file.close()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "tfevents")], check=True)
    assert accumulated(tmp_path / "tfevents").Histograms("a")[0].step == 1
