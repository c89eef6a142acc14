"""Messages of a run for Python's ``logging``."""

import logging
from contextlib import nullcontext
from typing import Any

from ..preserved_streams import threads_of_script
from ..state import RandomStreams

LOGGER = logging.getLogger("loopscope")
"""Receives starts, evaluations, checkpoints, ends of runs and alerts of severity info (INFO), other alerts and left-out
hooks (WARNING), and failures (ERROR). Programs set its level and handlers; without handlers nothing is shown."""
LOGGER.addHandler(logging.NullHandler())  # otherwise Python would print warnings to standard error


def log(streams: RandomStreams, level: int, text: str, *arguments: Any) -> None:
    """Log a message; handlers may draw random numbers without changing those of the run.

    If a thread of the script is running, nothing is restored, since the thread may have drawn meanwhile.
    """
    if LOGGER.isEnabledFor(level):
        with nullcontext() if threads_of_script() else streams.preserved():
            LOGGER.log(level, text, *arguments)
