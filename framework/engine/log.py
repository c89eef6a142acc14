"""Messages of a run for Python's ``logging``."""

import logging
from typing import Any

from ..state import RandomStreams

LOGGER = logging.getLogger("loopscope")
"""Receives starts, evaluations, checkpoints, ends of runs and alerts of severity info (INFO), other alerts and left-out
hooks (WARNING), and failures (ERROR). Programs set its level and handlers; without handlers nothing is shown."""
LOGGER.addHandler(logging.NullHandler())  # otherwise Python would print warnings to standard error


def log(streams: RandomStreams, level: int, text: str, *arguments: Any) -> None:
    """Log a message; handlers may draw random numbers without changing those of the run."""
    if LOGGER.isEnabledFor(level):
        with streams.preserved():
            LOGGER.log(level, text, *arguments)
