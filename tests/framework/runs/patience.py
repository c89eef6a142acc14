"""Experiments whose loops wait until each checkpoint is written."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from loopscope.checkpoints import Checkpointing

from tests.framework.checkpoints.crash_runs import patiently
from tests.framework.runs.small_experiment import Small, SmallSteps, registered


@contextmanager
def patient_experiments() -> Iterator[None]:
    """Register the small experiments in the body, and let every loop wait for its checkpoints."""
    with registered(Small, SmallSteps), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpointing, "take", patiently(Checkpointing.take))
        yield
