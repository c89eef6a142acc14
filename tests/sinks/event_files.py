"""Content of event files, read with TensorBoard's loader."""

from pathlib import Path
from typing import Any

import numpy as np
from loopscope.sinks.client_process import as_float
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

ALL = {"scalars": 0, "histograms": 0, "tensors": 0}


def accumulated(path: Path) -> EventAccumulator:
    """Read an event file, or a folder of event files, completely."""
    return EventAccumulator(str(path), size_guidance=ALL).Reload()


def scalars(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Return every scalar as (step, value), by tag, in written order."""
    content = accumulated(path)
    return {tag: [(event.step, event.value) for event in content.Scalars(tag)] for tag in content.Tags()["scalars"]}


def values(path: Path) -> list[tuple[int, Any]]:
    """Return the ``Summary.Value`` messages with their steps, in the order of the file."""
    return [(event.step, value) for event in LegacyEventFileLoader(str(path)).Load() for value in event.summary.value]


def written(path: Path) -> list[tuple[str, int, float]]:
    """Return every scalar as (tag, step, value), in the order of the file."""
    return [(value.tag, step, value.simple_value) for step, value in values(path) if value.HasField("simple_value")]


def lines(path: Path) -> str:
    """Return one line for each scalar, in the order of the file."""
    return "".join(f"{tag} {step} {value}\n" for tag, step, value in written(path))


def float32(value: float) -> float:
    """Round a number to float32 as in an event file; numbers that are too large become infinity."""
    with np.errstate(over="ignore"):
        return float(np.array(as_float(value), np.float64).astype(np.float32))
