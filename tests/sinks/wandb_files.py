"""Reader of the record log of an offline W&B run, with W&B's protobuf messages."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

HEADER = struct.Struct("<IHB")
BLOCK = 32768
FIRST_BYTES = 7
LAST_PARTS = (1, 4)
"""Types of a chunk that ends a record: a complete record, or the last of several chunks."""


def records(path: Path) -> Iterator[Record]:
    """Yield the records of a log in LevelDB's format: blocks of chunks, each with checksum, length and type."""
    data = path.read_bytes()
    position, message = FIRST_BYTES, b""
    while position + HEADER.size <= len(data):
        left = BLOCK - position % BLOCK
        if left < HEADER.size:
            position += left
            continue
        _, length, part = HEADER.unpack_from(data, position)
        position += HEADER.size + length
        message += data[position - length : position]
        if part in LAST_PARTS:
            yield Record.FromString(message)
            message = b""


def log_of(folder: Path) -> Path:
    """Return the log of the one W&B run in a run's folder."""
    (path,) = folder.glob("wandb/*run-*/run-*.wandb")
    return path


def history(path: Path) -> list[dict[str, Any]]:
    """Return every row in order, without the columns that W&B adds; histograms as (counts, limits)."""
    return [row(record.history) for record in records(path) if record.WhichOneof("record_type") == "history"]


def row(message: Any) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for item in message.item:
        name, *part = item.nested_key or [item.key]
        value = json.loads(item.value_json)
        if part:
            columns.setdefault(name, {})[part[0]] = value
        elif not name.startswith("_"):
            columns[name] = value
    return {
        name: (value["values"], value["bins"]) if isinstance(value, dict) else value for name, value in columns.items()
    }


def only(path: Path, kind: str) -> Any:
    """Return the one record of a kind."""
    (content,) = [getattr(record, kind) for record in records(path) if record.WhichOneof("record_type") == kind]
    return content


def axes(path: Path) -> dict[str, str]:
    """Return the declared step axis of every metric or metric pattern."""
    metrics = [record.metric for record in records(path) if record.WhichOneof("record_type") == "metric"]
    return {metric.name or metric.glob_name: metric.step_metric for metric in metrics}


def config_of(path: Path) -> dict[str, Any]:
    """Return the run's configuration."""
    updates = only(path, "run").config.update
    return {update.key: json.loads(update.value_json) for update in updates if update.key != "_wandb"}
