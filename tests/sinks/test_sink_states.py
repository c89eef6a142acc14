"""Sink files equal the emitted metrics after any sequence of emits, flushes, closes, strategies, kills and resumes."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from loopscope.hooks import HookPoint, Series
from loopscope.sinks.csv import CSVSink, read_csv
from loopscope.sinks.jsonl import JSONLSink, read_jsonl
from loopscope.sinks.tensorboard_sink import TensorBoardSink
from loopscope.sinks.wandb_sink import WandbSink

from tests.sinks.emits import exact, run_info
from tests.sinks.event_files import float32, written

FILES = {
    CSVSink: "{}.csv",
    JSONLSink: "{}.jsonl",
    WandbSink: "{}.jsonl",
    TensorBoardSink: "tensorboard/events.out.tfevents.{}",
}
READERS = {CSVSink: read_csv, JSONLSink: read_jsonl, WandbSink: read_jsonl}
NUMBERS = st.one_of(st.floats(), st.integers(), st.booleans())
NAMES = st.sampled_from(["h/described", "h/surprise"])


def content_of(sink, path):
    """Return the content of a sink's file: records, or scalars for TensorBoard."""
    if isinstance(sink, TensorBoardSink):
        return [(tag, step, repr(value)) for tag, step, value in written(path)]
    return [(record.epoch, record.step, exact(record.metrics)) for record in READERS[type(sink)](path)]


def expected_of(sink, emitted):
    """Return the expected content of a sink's file: values at their steps for TensorBoard, emits for the others."""
    if not isinstance(sink, TensorBoardSink):
        return [(epoch, step, exact(metrics)) for epoch, step, metrics in emitted]
    points = []
    for _, step, metrics in emitted:
        for name, value in metrics.items():
            series = value if isinstance(value, Series) else Series([step], [value])
            points += [(name, at, repr(float32(item))) for at, item in zip(series.steps, series.values, strict=True)]
    return points


class SinkStates(RuleBasedStateMachine):
    """Compares the files of all sinks with the emitted metrics, by strategy."""

    @initialize()
    def begin(self):
        self.folder = tempfile.TemporaryDirectory()
        os.environ["WANDB_MODE"] = "disabled"
        self.sinks = [sink() for sink in FILES]
        self.emitted = {}
        self.current = None
        self.checkpoint = None

    def call_all(self, method, *arguments, **options):
        for sink in self.sinks:
            getattr(sink, method)(*arguments, **options)

    @rule(strategy=st.sampled_from(["a", "b", "c"]))
    def start(self, strategy):
        self.call_all("set_run_context", self.run(strategy))
        self.current = self.emitted[strategy] = []
        self.strategy, self.checkpoint = strategy, None

    def run(self, strategy):
        return run_info(Path(self.folder.name), strategy, ["h/described"])

    @precondition(lambda self: self.current is not None)
    @rule()
    def take_checkpoint(self):
        self.checkpoint = [sink.position() for sink in self.sinks], list(self.current)

    @precondition(lambda self: self.checkpoint is not None)
    @rule(torn=st.binary(max_size=40))
    def kill_and_resume(self, torn):
        self.call_all("close", "failed")
        positions, emitted = self.checkpoint
        self.sinks = [sink() for sink in FILES]
        for sink, position in zip(self.sinks, positions, strict=True):
            path = Path(self.folder.name) / FILES[type(sink)].format(self.strategy)
            with path.open("ab") as file:
                file.write(torn)
            sink.resume(self.run(self.strategy), position)
        self.call_all("flush")
        self.current = self.emitted[self.strategy] = list(emitted)

    @precondition(lambda self: self.current is not None)
    @rule(metrics=st.dictionaries(NAMES, NUMBERS, min_size=1), epoch=st.integers(0, 9), step=st.integers(0, 99))
    def emit(self, metrics, epoch, step):
        self.call_all("emit", metrics, epoch, HookPoint.POST_EPOCH, step=step)
        self.current.append((epoch, step, metrics))

    @precondition(lambda self: self.current is not None)
    @rule(values=st.lists(NUMBERS, min_size=1, max_size=3), first=st.integers(1, 99))
    def emit_series(self, values, first):
        series = Series(list(range(first, first + len(values))), values)
        self.call_all("emit", {"h/described": series}, 0, HookPoint.POST_STEP, step=series.steps[-1])
        self.current.append((0, series.steps[-1], {"h/described": series}))

    @precondition(lambda self: self.current is None)
    @rule()
    def emit_outside(self):
        for sink in self.sinks:
            with pytest.raises(RuntimeError, match="set_run_context"):
                sink.emit({"h/described": 1}, 0, HookPoint.POST_EPOCH, step=0)

    @rule()
    def flush(self):
        self.call_all("flush")

    @rule(status=st.sampled_from(["completed", "failed", "interrupted"]))
    def close(self, status):
        self.call_all("close", status)
        self.current = None

    @invariant()
    def files_contain_emitted_metrics(self):
        for sink in self.sinks:
            for strategy, emitted in self.emitted.items():
                path = Path(self.folder.name) / FILES[type(sink)].format(strategy)
                assert content_of(sink, path) == expected_of(sink, emitted)

    def teardown(self):
        self.call_all("close", "completed")
        self.folder.cleanup()
        del os.environ["WANDB_MODE"]


SinkStates.TestCase.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
TestSinkStates = pytest.mark.longer(SinkStates.TestCase)
