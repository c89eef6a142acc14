"""What a test draws does not depend on the tests before it, and how long drawn examples take is not its subject."""

import gc
import os
import platform
import random
import re
import signal
import sys
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

from tests.support.resources import ResourceGuard


class _OneName(MetaPathFinder):
    """Refuses our folders under their own names: a second copy of a module would have registries of its own."""

    def find_spec(self, name, path, target=None):  # type: ignore[no-untyped-def]
        if name in ("framework", "training_hooks", "sinks", "experiments"):
            raise ImportError(f"The folder {name}/ is imported as loopscope or a part of it, never by its own name.")


sys.meta_path.insert(0, _OneName())
if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)  # as the Makefile: tests compare bytes with those of processes that have one
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs so, and every process of the tests would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The same examples in every run, so that one run's result and time do not differ from the next; make slow draws others.
settings.register_profile("same examples", deadline=None, max_examples=40, derandomize=True)
settings.register_profile("new examples", deadline=None, max_examples=40)
settings.load_profile("same examples")


platform.platform()  # asks the program uname for the processor, once per process
guard = ResourceGuard()
guard.install()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the limit on the processor time of quick tests, which ``make fast`` sets."""
    parser.addoption("--quick-limit", type=float, help="fail quick tests that take more seconds of processor time")


def pytest_configure(config: pytest.Config) -> None:
    guard.quick_limit = config.option.quick_limit


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a file all of whose tests are deselected: trainers and browsers take seconds to import."""
    excluded = _excluded_markers(config.option.markexpr)
    if not excluded or collection_path.suffix != ".py":
        return None
    found = re.search(r"^pytestmark = (?:\[.*?^\]|.*?$)", collection_path.read_text(encoding="utf-8"), re.M | re.S)
    marks = set(re.findall(r"pytest\.mark\.(\w+)", found.group())) if found else set()
    return True if marks & excluded else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Leave out the rows of a matrix that the marker expression deselects: making them would take most of the time."""
    excluded = _excluded_markers(metafunc.config.option.markexpr)
    parametrize = metafunc.parametrize

    def without_excluded(names, values, *args, ids=None, **options):  # type: ignore[no-untyped-def]
        values = list(values)
        kept = [index for index, value in enumerate(values) if not excluded & _markers(value)] or range(len(values))
        ids = [ids[index] for index in kept] if isinstance(ids, (list, tuple)) else ids
        parametrize(names, [values[index] for index in kept], *args, ids=ids, **options)

    if excluded:
        metafunc.parametrize = without_excluded  # type: ignore[method-assign]


def _excluded_markers(expression: str) -> set[str]:
    """Return the markers that an expression such as ``not slow and not ranks`` excludes; none for any other form."""
    parts = [part.split() for part in expression.split(" and ")]
    return {name for _, name in parts} if all(len(part) == 2 and part[0] == "not" for part in parts) else set()


def _markers(value: object) -> set[str]:
    return {mark.name for mark in getattr(value, "marks", ())}


def pytest_collection_finish() -> None:
    """Leave what was collected, some million objects, out of every later search for garbage."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start every test with the same global random numbers, and hold it to the resources that its markers name."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    guard.begin(item)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Iterator[None]:
    """Leave the time of a fixture that several tests share out of the time of the first of them."""
    if fixturedef.scope == "function":
        return (yield)
    with guard.uncounted():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Fail a test that used a resource without its marker, or too much time."""
    result = yield
    guard.end()
    return result


def pytest_report_header() -> str:
    """Say which torch and Python the tests ran on."""
    return f"torch {torch.__version__} on Python {platform.python_version()}, {torch.get_num_threads()} threads"
