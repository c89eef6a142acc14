"""Number of rows in logs of W&B clients, which a crash may have truncated."""

import json
import tempfile
import zlib
from bisect import bisect_right
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st
from loopscope.sinks.wandb_process import BLOCK, CHUNK, LOG_BEGIN, WandbTask, log_records, rows_in, sent_row_count
from wandb.proto.wandb_internal_pb2 import HistoryItem, HistoryRecord, Record

from tests.sinks.wandb_files import history

LONG_ROW = 3
COUNT = 400
PARTS = {(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}
"""Types of chunks by (starts a record, ends a record)."""


def row(step):
    """Return a row of W&B's history; one is longer than two blocks."""
    value = HistoryItem(key="h/a", value_json=json.dumps("a" * (70_000 if step == LONG_ROW else 100)))
    return Record(history=HistoryRecord(item=[value, HistoryItem(key="_step", value_json=str(step))]))


def log_of(messages):
    """Return a log in LevelDB's format, the end offset of each record, and the offsets of filling bytes."""
    log, ends, filling = bytearray(LOG_BEGIN), [], []
    for message in messages:
        begin = 0
        while begin < len(message):
            left = BLOCK - len(log) % BLOCK
            if left < CHUNK.size:
                filling += range(len(log), len(log) + left)
                log += bytes(left)
            piece = message[begin : begin + BLOCK - len(log) % BLOCK - CHUNK.size]
            part = PARTS[begin == 0, begin + len(piece) == len(message)]
            log += CHUNK.pack(zlib.crc32(bytes([part]) + piece), len(piece), part) + piece
            begin += len(piece)
        ends.append(len(log))
    return bytes(log), ends, filling


LOG, ENDS, FILLING = log_of([row(step).SerializeToString() for step in range(COUNT)])


def rows_of(data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run-abc.wandb")
        path.write_bytes(data)
        return rows_in(path)


def test_every_row_of_a_log_is_counted(tmp_path):
    (tmp_path / "log").write_bytes(LOG)
    assert rows_in(tmp_path / "log") == len(history(tmp_path / "log")) == COUNT
    assert Record.FromString(list(log_records(tmp_path / "log"))[LONG_ROW]) == row(LONG_ROW)


def test_offline_resume_starts_after_existing_rows(tmp_path):
    """Rows are counted in the logs of the run, or read from the note if the logs are missing."""
    task = WandbTask("r", str(tmp_path), "p", "e", "s", {}, {}, [], None, run_id="abc", resumed=True)
    offline = SimpleNamespace(offline=True, starting_step=0)
    for name, steps in (("run-1-abc", (0, 1)), ("offline-run-2-abc", (2, 3, 4)), ("offline-run-3-other", range(9))):
        (tmp_path / "wandb" / name).mkdir(parents=True)
        log = log_of([row(step).SerializeToString() for step in steps])[0]
        (tmp_path / "wandb" / name / f"run-{name[-3:]}.wandb").write_bytes(log)
    assert sent_row_count(task, offline, StringIO("3")) == sent_row_count(task, offline, StringIO()) == 5
    assert sent_row_count(task, offline, StringIO("7")) == 7
    assert sent_row_count(task, SimpleNamespace(offline=False, starting_step=2), StringIO("7")) == 2
    assert sent_row_count(replace(task, resumed=False), offline, StringIO("7")) == 0


def test_a_log_without_rows_has_none():
    assert rows_of(b"") == rows_of(LOG[:LOG_BEGIN]) == rows_of(log_of([Record().SerializeToString()])[0]) == 0


def test_resumed_log_counts_rows_of_the_whole_run():
    """The first row of the log is at step 7."""
    assert rows_of(log_of([row(step).SerializeToString() for step in (7, 8)])[0]) == 9


@settings(deadline=None, max_examples=60)
@given(st.integers(0, len(LOG) - 1))
def test_truncated_log_counts_whole_rows(size):
    assert rows_of(LOG[:size]) == bisect_right(ENDS, size)


@settings(deadline=None, max_examples=60)
@given(st.integers(LOG_BEGIN, len(LOG) - 1))
def test_flipped_bit_keeps_earlier_rows(at):
    damaged = bytearray(LOG)
    damaged[at] ^= 1
    assert rows_of(damaged) == (COUNT if at in FILLING else bisect_right(ENDS, at))
