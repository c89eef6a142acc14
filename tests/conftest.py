"""Shared test set-up: fixed random seeds for every test, reproducible Hypothesis examples, and resource limits."""

import gc
import os
import platform
import random
import re
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from loopscope.runs.provenance import git_state

from tests.support.resources import ResourceGuard


class _OneName(MetaPathFinder):
    """Refuses imports of the source folders under their own names: a second copy would have separate registries."""

    def find_spec(self, name, path, target=None):  # type: ignore[no-untyped-def]
        if name in ("framework", "training_hooks", "sinks", "experiments"):
            raise ImportError(f"The folder {name}/ is imported as loopscope or a part of it, never by its own name.")


sys.meta_path.insert(0, _OneName())
if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)  # like the Makefile: tests compare bytes with processes of one thread
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs with SIGINT ignored, and every process of the tests would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The examples are the same in every run, so that results and times are reproducible; make slow draws new ones.
settings.register_profile("same examples", deadline=None, max_examples=40, derandomize=True)
settings.register_profile("new examples", deadline=None, max_examples=40)
settings.load_profile("same examples")


platform.platform()  # starts the program uname, once per process; later calls use its cache
git_state()  # starts git, once per process
guard = ResourceGuard()
guard.install()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for quick tests that ``make fast`` sets."""
    parser.addoption("--quick-limit", type=float, help="fail quick tests that take more seconds of processor time")


def pytest_configure(config: pytest.Config) -> None:
    guard.quick_limit = config.option.quick_limit
    _keep_folders_in_memory()


def _keep_folders_in_memory() -> None:
    """Put the folders of tests on a file system in memory, if there is one: runs wait for the disk 10,000 times."""
    memory = Path("/dev/shm")
    if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 4 << 30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(memory))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files whose tests are all deselected, because trainers and browsers take seconds to import."""
    excluded = _excluded_markers(config.option.markexpr)
    if not excluded or collection_path.suffix != ".py":
        return None
    found = re.search(r"^pytestmark = (?:\[.*?^\]|.*?$)", collection_path.read_text(encoding="utf-8"), re.M | re.S)
    marks = set(re.findall(r"pytest\.mark\.(\w+)", found.group())) if found else set()
    return True if marks & excluded else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Omit the deselected rows of a matrix, because creating them would take most of the time."""
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
    """Return the markers that an expression such as ``not slow and not ranks`` excludes; for any other form none."""
    parts = [part.split() for part in expression.split(" and ")]
    return {name for _, name in parts} if all(len(part) == 2 and part[0] == "not" for part in parts) else set()


def _markers(value: object) -> set[str]:
    return {mark.name for mark in getattr(value, "marks", ())}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the rows slow that ``some_rows`` leaves out or ``slow_rows`` names; slow ones do not count as rows."""
    numbers: Counter[str] = Counter()
    for item in items:
        named = item.get_closest_marker("slow_rows")
        if named is not None and item.name.partition("[")[2][:-1] in named.args:
            item.add_marker("slow")
        mark = item.get_closest_marker("some_rows")
        if mark is None or item.get_closest_marker("slow"):
            continue
        test = item.nodeid.partition("[")[0]
        if numbers[test] % mark.args[0]:
            item.add_marker("slow")
        numbers[test] += 1


_NEW_MODULES = 50
"""The number of imported modules after which existing objects are frozen."""
_frozen_modules = 0
_frozen_for: Path | None = None


def _freeze_objects(path: Path | None) -> None:
    """Exclude the objects that exist before the tests of a file, or after an import of a library, from collections.

    Otherwise every full collection, and every search for optimizers among all objects, would visit the millions of
    objects that libraries and earlier tests keep.
    """
    global _frozen_modules, _frozen_for
    if path != _frozen_for or len(sys.modules) - _frozen_modules >= _NEW_MODULES:
        _frozen_modules, _frozen_for = len(sys.modules), path
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed the global random generators before every test, and check the test against its markers."""
    _freeze_objects(item.path)
    random.seed(0)
    np.random.seed(0)
    # Without an accelerator, torch.manual_seed would note the stack for each kind of device, half a millisecond.
    torch.manual_seed(0) if torch.accelerator.is_available() else torch.default_generator.manual_seed(0)
    guard.begin(item)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Iterator[None]:
    """Exclude the time of a shared fixture from the time of the first test that uses it."""
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
    """Return the versions of torch and Python, and the number of threads."""
    return f"torch {torch.__version__} on Python {platform.python_version()}, {torch.get_num_threads()} threads"
