"""Writer of TensorBoard's event files, without TensorFlow and without a thread."""

import os
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.plugins.hparams import metadata as hparams
from tensorboard.plugins.hparams.api_pb2 import STATUS_FAILURE, STATUS_SUCCESS
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb

from .client_process import as_float, cells
from .record import plain
from .run_file import RunFile

BUCKETS = 30


@lru_cache(maxsize=4096)
def _header(length: int) -> bytes:
    packed = struct.pack("<Q", length)
    return packed + _masked(packed)


def _masked(data: bytes) -> bytes:
    # Masked like in LevelDB's crc32c.h, since a plain CRC of data that contains CRCs is weak.
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


class EventFile:
    """An event file; every write has reached the operating system when it returns."""

    def __init__(self, path: Path, position: Mapping[str, Any] | None = None) -> None:
        """Overwrite the file, or reopen it at a ``position``; raises :class:`UsageError` if it has changed."""
        self.file = RunFile(path, position, _fault)
        if position is not None:
            return
        try:
            self._append(Event(wall_time=time.time(), file_version="brain.Event:2"))
        except BaseException:
            self.file.close()
            raise

    def write_options(self, options: Mapping[str, Any]) -> None:
        """Write the options of a run as a row of the HPARAMS tab and as a table in the TEXT tab."""
        accepted_options: dict[str, Any] = {}  # HPARAMS accepts numbers, booleans and texts
        for name, value in options.items():
            plain_value = as_float(value) if isinstance(value, (int, float)) else unicode(value)
            accepted_options[unicode(name)] = value if isinstance(value, bool) else plain_value
        # Without a trial id, runs with equal options would form a group.
        row = hparams_pb(accepted_options, trial_id="").value[0]
        lines = [f"| {name} | {str(value).replace('|', '&#124;')} |" for name, value in options.items()]
        table = unicode("\n".join(["| | |", "|---|---|", *lines]))
        self._write({0: [row, text_pb("run", table).value[0]]})

    def write(self, by_step: Mapping[int, Iterable[tuple[str, Any]]]) -> None:
        """Write pairs of name and value at their steps."""
        self._write({step: [value for item in items for value in messages(*item)] for step, items in by_step.items()})

    def write_status(self, status: str, step: int) -> None:
        """Write the status of the run at its last step."""
        outcome = STATUS_SUCCESS if status == "completed" else STATUS_FAILURE
        content = HParamsPluginData(session_end_info=SessionEndInfo(status=outcome, end_time_secs=time.time()))
        metadata = hparams.create_summary_metadata(content)
        tag, tensor = hparams.SESSION_END_INFO_TAG, hparams.NULL_TENSOR
        self._write({step: [Summary.Value(tag=tag, metadata=metadata, tensor=tensor)]})

    def _write(self, by_step: Mapping[int, Sequence[Any]]) -> None:
        """Write one event per step with its ``Summary.Value`` messages."""
        now = time.time()
        items = sorted(by_step.items())
        self._append(*(Event(wall_time=now, step=step, summary=Summary(value=values)) for step, values in items))

    def _append(self, *events: Any) -> None:
        """Write events in TensorFlow's record format: length, its masked checksum, data, its masked checksum."""
        records = [event.SerializeToString() for event in events]
        self.file.write(b"".join(_header(len(record)) + record + _masked(record) for record in records))


def _fault(file: FileIO, size: int) -> str:
    """Return why the first ``size`` bytes of a file are not complete events, or an empty text."""
    position = 0
    while position < size:
        header = os.pread(file.fileno(), 12, position)
        length = int.from_bytes(header[:8], "little")  # the other four bytes are its checksum
        if header != _header(length):
            break
        position += 12 + length + 4  # the last four are the checksum of the data
    return "" if position == size else f"no event ends at byte {size:,}, as one did at the checkpoint"


def unicode(value: Any) -> str:
    """Return the text of a value, with question marks for invalid Unicode such as half of a surrogate pair."""
    return str(value).encode(errors="replace").decode()


def messages(name: str, value: Any) -> list[Any]:
    """Return the ``Summary.Value`` messages of one value.

    A number becomes a scalar (TensorBoard stores float32), a dict one message per ``name/key``, and a list of numbers a
    histogram of the finite numbers, with the count of the others as ``name/non_finite``.
    """
    if type(value) is float:
        return [Summary.Value(tag=name, simple_value=value)]
    values: list[Any] = []
    for key, cell in cells(name, plain(value), histogram).items():
        tag = unicode(key)
        if isinstance(cell, str):
            values += text_pb(tag, unicode(cell)).value
        elif isinstance(cell, (int, float)):
            values.append(Summary.Value(tag=tag, simple_value=cell))
        else:
            values.append(Summary.Value(tag=tag, histo=cell))
    return values


def histogram(finite: Sequence[float]) -> Any:
    """Return the histogram of finite values, in buckets of equal width that include their upper limit."""
    values = np.array(finite)
    low, high = float(values.min()), float(values.max())
    # Limits low·(1 − t) + high·t, since high − low could overflow; rounded limits must not exceed high or fall.
    share = np.linspace(0, 1, BUCKETS + 1)
    limits = np.maximum.accumulate(np.minimum(low * (1 - share) + high * share, high))[1:]
    limits[-1] = high
    counts = np.bincount(np.searchsorted(limits, values), minlength=BUCKETS)
    with np.errstate(over="ignore", invalid="ignore"):
        total, squares = float(values.sum()), float(values @ values)
    return HistogramProto(
        min=low, max=high, num=len(values), sum=total, sum_squares=squares, bucket_limit=limits, bucket=counts
    )
