"""Files of resumed runs, for any position of the kill and of the last checkpoint."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loopscope.errors import UsageError
from loopscope.hooks import HookPoint
from loopscope.sinks import CSVSink, JSONLSink, TensorBoardSink

from tests.framework.runs.small_experiment import SmallConfig
from tests.sinks.emits import Emit, emits, run_info
from tests.sinks.event_files import values

FILES = {CSVSink: "only.csv", JSONLSink: "only.jsonl", TensorBoardSink: "tensorboard/events.out.tfevents.only"}
DESCRIBED = ["h/a", "h/norm/<parameter>"]
NAMES = st.sampled_from(["h/a", "h/norm/0.weight", "h/norm/0.bias", "h/surprise", "g/ü,;:[]"])


def begun(sink_class, folder, rows, **run):
    folder.mkdir(exist_ok=True)
    sink = sink_class()
    sink.set_run_context(run_info(folder, described=DESCRIBED, **run))
    for row in rows:
        row.to(sink)
    return sink


def resumed(sink_class, folder, position, rows, **run):
    sink = sink_class()
    sink.resume(run_info(folder, described=DESCRIBED, **run), position)
    for row in rows:
        row.to(sink)
    return sink


def content(path):
    """Return the bytes of a file; of an event file, the values with their steps, without times."""
    if "tfevents" not in path.name:
        return path.read_bytes()
    return [(step, value.SerializeToString()) for step, value in values(path) if "_hparams_" not in value.tag]


@pytest.mark.longer
@pytest.mark.parametrize("sink_class", FILES)
@settings(deadline=None, max_examples=25)
@given(data=st.data(), rows=st.lists(emits(NAMES), max_size=6))
def test_resumed_file_matches_uninterrupted_file(sink_class, data, rows):
    """This holds for any kill position and any position of the last checkpoint."""
    at = data.draw(st.integers(0, len(rows)), label="emits before the checkpoint")
    with tempfile.TemporaryDirectory() as name:
        whole, killed = Path(name, "whole"), Path(name, "killed")
        begun(sink_class, whole, rows).close("completed")
        sink = begun(sink_class, killed, rows[:at])
        position = sink.position()
        for row in rows[at:]:
            row.to(sink)
        sink.close("failed")
        path = killed / FILES[sink_class]
        os.truncate(path, data.draw(st.integers(position["size"], path.stat().st_size), label="bytes at the kill"))
        resumed(sink_class, killed, position, rows[at:]).close("completed")
        assert content(path) == content(whole / FILES[sink_class])
        assert path.stat().st_size == (whole / FILES[sink_class]).stat().st_size


@pytest.mark.longer
@pytest.mark.parametrize("sink_class", FILES)
@settings(deadline=None, max_examples=30)
@given(data=st.data(), rows=st.lists(emits(NAMES), min_size=1, max_size=3))
def test_file_shorter_than_checkpoint_is_refused(sink_class, data, rows):
    """The error has both sizes, and the file is unchanged."""
    with tempfile.TemporaryDirectory() as name:
        sink = begun(sink_class, Path(name), rows)
        position, path = sink.position(), Path(name, FILES[sink_class])
        sink.close("failed")
        left = data.draw(st.integers(0, position["size"] - 1), label="bytes left")
        os.truncate(path, left)
        with pytest.raises(UsageError, match=f"has {left:,} bytes, but had {position['size']:,} at the checkpoint"):
            resumed(sink_class, Path(name), position, [])
        assert path.stat().st_size == left


@pytest.mark.parametrize("sink_class", FILES)
def test_repeated_kills_and_resumes_match(tmp_path, sink_class):
    """A file that was killed and resumed after every row equals the uninterrupted one."""
    rows = [Emit({"h/a": number / 8}, number, HookPoint.POST_EPOCH, number) for number in range(8)]
    begun(sink_class, tmp_path / "whole", rows).close("completed")
    sink = begun(sink_class, tmp_path / "killed", [])
    for row in rows:
        position = sink.position()
        Emit({"h/a": -1.0}, 99, HookPoint.POST_EPOCH, 99).to(sink)
        sink.close("interrupted")
        sink = resumed(sink_class, tmp_path / "killed", position, [row])
    sink.close("completed")
    path = FILES[sink_class]
    assert content(tmp_path / "killed" / path) == content(tmp_path / "whole" / path)


def test_csv_with_other_columns_is_refused(tmp_path):
    """The file is unchanged."""
    sink = begun(CSVSink, tmp_path, [Emit({"h/a": 1.0}, 0, HookPoint.POST_EPOCH, 1)])
    position, before = sink.position(), (tmp_path / "only.csv").read_bytes()
    sink.close("failed")
    with pytest.raises(UsageError, match=r"only\.csv differs from the file at the checkpoint: its first line does not"):
        CSVSink().resume(run_info(tmp_path, described=["h/b"]), position)
    assert (tmp_path / "only.csv").read_bytes() == before


def test_csv_of_older_version_is_refused(tmp_path):
    """The error suggests --overwrite, and the file is unchanged."""
    sink = begun(CSVSink, tmp_path, [Emit({"h/a": 1.0}, 0, HookPoint.POST_EPOCH, 1)])
    size, before = sink.position()["size"], (tmp_path / "only.csv").read_bytes()
    sink.close("failed")
    with pytest.raises(UsageError, match=r"only\.csv was written by an older version.*overwrite=True"):
        resumed(CSVSink, tmp_path, {"size": size}, [])
    assert (tmp_path / "only.csv").read_bytes() == before


def test_tensorboard_resume_writes_hyperparameters_once(tmp_path):
    """The event file has one start and one end entry, and the end has the newest step."""
    config = SmallConfig(lr=0.25, output_dir=tmp_path)
    sink = begun(TensorBoardSink, tmp_path, [Emit({"h/a": 1.0}, 0, HookPoint.POST_EPOCH, 3)], config=config)
    position = sink.position()
    sink.close("interrupted")
    resumed(TensorBoardSink, tmp_path, position, [], config=config).close("completed")
    path = tmp_path / FILES[TensorBoardSink]
    tags = [value.tag for _, value in values(path)]
    assert [tags.count(f"_hparams_/session_{moment}_info") for moment in ("start", "end")] == [1, 1]
    assert [step for step, value in values(path) if value.tag.endswith("end_info")] == [3]


def test_altered_event_length_is_refused(tmp_path):
    """An event file with a changed length field raises a UsageError and is unchanged."""
    sink = begun(TensorBoardSink, tmp_path, [Emit({"h/a": 1.0}, 0, HookPoint.POST_EPOCH, 3)])
    position, path = sink.position(), tmp_path / FILES[TensorBoardSink]
    sink.close("failed")
    damaged = bytearray(path.read_bytes())
    damaged[0] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(UsageError, match="no event ends at byte"):
        resumed(TensorBoardSink, tmp_path, position, [])
    assert path.read_bytes() == damaged


@pytest.mark.longer
@pytest.mark.guarantee("damage-is-detected")
@pytest.mark.parametrize("sink_class", FILES)
@settings(deadline=None, max_examples=30)
@given(data=st.data(), rows=st.lists(emits(NAMES), min_size=1, max_size=3))
def test_bytes_changed_before_checkpoint_are_detected(sink_class, data, rows):
    """Any changed byte raises a UsageError, and the file is unchanged."""
    with tempfile.TemporaryDirectory() as name:
        sink = begun(sink_class, Path(name), rows)
        position = sink.position()
        sink.close("failed")
        path = Path(name) / FILES[sink_class]
        before = bytearray(path.read_bytes())
        before[data.draw(st.integers(0, position["size"] - 1), label="the byte")] ^= data.draw(st.integers(1, 255))
        path.write_bytes(before)
        with pytest.raises(UsageError, match="differs from the file at the checkpoint"):
            resumed(sink_class, Path(name), position, [])
        assert path.read_bytes() == before


@pytest.mark.guarantee("damage-is-detected")
@pytest.mark.parametrize("sink_class", FILES)
@pytest.mark.parametrize("replaced", [False, True])
def test_removed_or_replaced_file_is_detected(sink_class, replaced, tmp_path):
    """Asking for the position of the sink raises FileNotFoundError."""
    sink = begun(sink_class, tmp_path, [])
    path = tmp_path / FILES[sink_class]
    path.unlink()
    if replaced:
        path.write_text("another")
    with pytest.raises(FileNotFoundError, match="was removed or replaced during the run"):
        sink.position()
    sink.close("failed")
