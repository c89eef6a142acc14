"""What a test draws does not depend on the tests before it, and how long drawn examples take is not its subject."""

import gc
import os
import platform
import random
import sys
from importlib.abc import MetaPathFinder

import numpy as np
import pytest
import torch
from hypothesis import settings


class _OneName(MetaPathFinder):
    """Refuses our folders under their own names: a second copy of a module would have registries of its own."""

    def find_spec(self, name, path, target=None):  # type: ignore[no-untyped-def]
        if name in ("framework", "training_hooks", "sinks", "experiments"):
            raise ImportError(f"The folder {name}/ is imported as loopscope or a part of it, never by its own name.")


sys.meta_path.insert(0, _OneName())
if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)  # as the Makefile: tests compare bytes with those of processes that have one
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make no slow rows of a matrix where none is run: there are more of them than of all others."""
    if metafunc.config.option.markexpr != "not slow":
        return
    parametrize = metafunc.parametrize

    def without_slow(names, values, *args, ids=None, **options):  # type: ignore[no-untyped-def]
        values = list(values)
        kept = [place for place, value in enumerate(values) if not _is_slow(value)] or range(len(values))
        ids = [ids[place] for place in kept] if isinstance(ids, (list, tuple)) else ids
        parametrize(names, [values[place] for place in kept], *args, ids=ids, **options)

    metafunc.parametrize = without_slow  # type: ignore[method-assign]


def _is_slow(value: object) -> bool:
    return any(mark.name == "slow" for mark in getattr(value, "marks", ()))


def pytest_collection_finish() -> None:
    """Leave what was collected, some million objects, out of every later search for garbage."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Begin every test with the same global random numbers, in whatever order and process it runs."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_report_header() -> str:
    """Say which torch and Python the tests ran on."""
    return f"torch {torch.__version__} on Python {platform.python_version()}, {torch.get_num_threads()} threads"
