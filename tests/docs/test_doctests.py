"""Doctests, run from the installed package under its own name."""

import doctest
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import walk_packages

import pytest

PACKAGES = ("loopscope", "loopscope.training_hooks", "loopscope.sinks", "loopscope.experiments")
MODULES = sorted(
    {
        module.name
        for package in PACKAGES
        for module in walk_packages(import_module(package).__path__, f"{package}.")
        if not module.name.endswith("__main__")
    }
)


def source(name: str) -> str:
    return Path(find_spec(name).origin).read_text(encoding="utf-8")


WITH_EXAMPLES = [name for name in MODULES if ">>> " in source(name)]
"""The modules with examples. The search for them takes most of the time, so the others are left out."""


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_docstring_examples_print_their_output(name: str) -> None:
    result = doctest.testmod(import_module(name))
    assert result.attempted
    assert not result.failed


def test_many_modules_have_examples() -> None:
    assert len(WITH_EXAMPLES) > 30
