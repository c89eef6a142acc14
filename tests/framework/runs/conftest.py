"""Shared fixtures for tests of runs."""

from collections.abc import Iterator

import pytest

from tests.framework.runs.patience import patient_experiments


@pytest.fixture(scope="module")
def patient_small() -> Iterator[None]:
    """Register the small experiments, and let their loops wait until each checkpoint is written."""
    with patient_experiments():
        yield
