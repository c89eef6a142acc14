"""What several tests of runs share."""

from collections.abc import Iterator

import pytest
from loopscope.checkpoints import Checkpointing

from tests.framework.checkpoints.crash_runs import patiently
from tests.framework.runs.small_experiment import Small, SmallSteps, registered


@pytest.fixture(scope="module")
def patient_small() -> Iterator[None]:
    """Have the small experiments in the registry, and let their loops wait for each checkpoint to be written."""
    with registered(Small, SmallSteps), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpointing, "take", patiently(Checkpointing.take))
        yield
