"""What a test draws does not depend on the tests before it, and how long drawn examples take is not its subject."""

import platform
import random

import numpy as np
import pytest
import torch
from hypothesis import settings

settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Begin every test with the same global random numbers, in whatever order and process it runs."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_report_header() -> str:
    """Say which torch and Python the tests ran on."""
    return f"torch {torch.__version__} on Python {platform.python_version()}, {torch.get_num_threads()} threads"
