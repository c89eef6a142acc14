"""Positions of sinks: storing them in checkpoints, and resuming sinks at them."""

import random

import pytest
from loopscope.engine.metric_delivery import MetricDelivery
from loopscope.errors import RunNotice, UsageError
from loopscope.hooks import HookPoint, MetricSink
from loopscope.isolation import Isolation
from loopscope.sinks import CSVSink, JSONLSink, WandbSink, read_jsonl

from tests.sinks.emits import run_info
from tests.support import Case, RecordingSink, build


class Keeping(MetricSink):
    """Counts its emits and its starts, and records the position that it resumes from."""

    name = "keeping"

    def __init__(self, name="keeping", includes=(), count=0):
        self.name, self.includes, self.count = name, includes, count
        self.starts = []

    def set_run_context(self, run):
        self.starts.append("begin")

    def position(self):
        return {"count": self.count}

    def files(self):
        return [f"{self.name}.txt"]

    def resume(self, run, position):
        self.starts.append(position["count"])

    def emit(self, metrics, epoch, hook_point, *, step):
        self.count += 1


class Full(Keeping):
    """Fails for a full disk when asked for its position."""

    def position(self):
        raise OSError("No space left on device")


class Refusing(Keeping):
    """Refuses to resume, as its files are missing."""

    def resume(self, run, position):
        raise UsageError("keeping.txt is missing.")


class Drawing(Keeping):
    """Draws from the run's generator in ``position``."""

    def position(self):
        return {"count": random.random()}


@pytest.fixture
def isolation():
    """Start the isolation of a run that the sinks must not change."""
    isolation = Isolation(build(Case())[1])
    with isolation.visit():
        yield isolation


def started(isolation, positions, *sinks, folder=None):
    delivery = MetricDelivery(isolation, sinks, lambda *arguments: None)
    delivery.start(run_info(folder), positions)
    return delivery


def positions_of(isolation, *sinks):
    return MetricDelivery(isolation, sinks, lambda *arguments: None).positions()


def test_sink_positions_are_stored_by_name(isolation):
    """A sink that defines no position stores an empty one."""
    sinks = [Keeping("a", count=3), Keeping("b", count=5), RecordingSink()]
    assert positions_of(isolation, *sinks) == {"a": {"count": 3}, "b": {"count": 5}, "recording": {}}


def test_without_positions_every_sink_starts(isolation):
    started(isolation, None, sink := Keeping())
    assert sink.starts == ["begin"]


def test_sinks_resume_at_their_own_positions(isolation):
    """A sink without a stored position starts from the beginning."""
    sinks = [Keeping("a"), Keeping("b"), Keeping("new"), recording := RecordingSink()]
    started(isolation, {"a": {"count": 3}, "b": {"count": 5}, "gone": {"count": 7}, "recording": {}}, *sinks)
    assert [sink.starts for sink in sinks[:3]] == [[3], [5], ["begin"]]
    assert recording.events == ["start", "flush"]


def test_sink_resumes_files_of_included_sink(isolation):
    """A sink and the sink that it includes use the same position, in both directions."""
    assert positions_of(isolation, Keeping("a", includes=("b",), count=3)) == {"a": {"count": 3}, "b": {"count": 3}}
    started(isolation, {"b": {"count": 5}}, sink := Keeping("a", includes=("b",)))
    assert sink.starts == [5]


def test_sink_failing_at_its_position_is_disabled(isolation):
    """The run warns and stores None as the position, which marks the sink as failed."""
    with pytest.warns(UserWarning, match="Sink 'full' failed and is disabled.*No space left"):
        found = positions_of(isolation, Full("full"), Keeping("a", count=3))
    assert found == {"full": None, "a": {"count": 3}}


def test_failed_sink_stays_disabled_after_resume(isolation):
    """The resumed run issues a notice and again stores None as the position of the sink."""
    with pytest.warns(RunNotice, match="Sink 'full' had failed before the checkpoint and stays disabled"):
        delivery = started(isolation, {"full": None, "a": {"count": 3}}, full := Keeping("full"), a := Keeping("a"))
    assert (full.starts, a.starts) == ([], [3])
    assert delivery.positions()["full"] is None
    assert delivery.files() == ["a.txt"]


def test_missing_sink_file_stops_the_resume(isolation):
    """The error names the missing file instead of dropping the sink."""
    with pytest.raises(UsageError, match=r"keeping\.txt is missing"):
        started(isolation, {"keeping": {"count": 3}}, Refusing())


@pytest.mark.guarantee("damage-is-detected")
@pytest.mark.parametrize("sink", [JSONLSink, CSVSink])
def test_unopenable_file_is_refused_on_resume(sink, isolation, tmp_path):
    """The error names the file and the reason, here a folder in its place."""
    (tmp_path / f"only.{sink.name}").mkdir()
    position = {"size": 0, **sink.notation}
    with pytest.raises(UsageError, match=rf"only\.{sink.name} cannot be opened for appending: Is a directory; restore"):
        started(isolation, {sink.name: position}, sink(), folder=tmp_path)


@pytest.mark.parametrize("size", [None, -1, "x", 1.5, [], True])
def test_a_position_without_a_size_is_refused(size, isolation, tmp_path):
    (tmp_path / "only.jsonl").write_text("")
    with pytest.raises(UsageError, match="has no valid size of a file"):
        started(isolation, {"jsonl": {"size": size}}, JSONLSink(), folder=tmp_path)


def test_drawing_sink_leaves_random_state_unchanged():
    """Random numbers that a sink draws for its position come from the isolated state."""
    isolation = Isolation(build(Case())[1])
    before = random.getstate()
    with isolation.visit():
        positions_of(isolation, Drawing())
        assert random.getstate() != before
    assert random.getstate() == before


@pytest.mark.parametrize(("before", "after"), [(JSONLSink, WandbSink), (WandbSink, JSONLSink)])
def test_record_continues_under_replacement_sink(isolation, tmp_path, monkeypatch, before, after):
    """The W&B sink continues the file of the JSONL sink, and the reverse."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    first = started(isolation, None, earlier := before(), folder=tmp_path)
    earlier.emit({"h/number": 7001}, 0, HookPoint.POST_EPOCH, step=1)
    positions = first.positions()
    earlier.close("failed")
    started(isolation, positions, later := after(), folder=tmp_path)
    later.emit({"h/number": 7002}, 0, HookPoint.POST_EPOCH, step=2)
    later.close("completed")
    assert [record.metrics["h/number"] for record in read_jsonl(tmp_path / "only.jsonl")] == [7001, 7002]
