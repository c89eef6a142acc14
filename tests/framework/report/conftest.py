"""Finished runs that several modules use."""

from pathlib import Path

import pytest

from tests.framework.runs.small_experiment import session


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two strategies, and return the folder of the experiment."""
    folder = tmp_path_factory.mktemp("finished")
    session(folder, strategies=["plain", "clipped"], hooks=["norms"], epochs=5).run()
    return folder / "small"
