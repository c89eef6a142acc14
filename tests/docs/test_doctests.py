"""The examples in docstrings, run as a user would: from the installed package, under its own name."""

import doctest
from importlib import import_module
from pkgutil import walk_packages

import pytest

PACKAGES = ("loopscope", "loopscope.training_hooks", "loopscope.sinks", "loopscope.experiments")
MODULES = sorted(
    {
        found.name
        for package in PACKAGES
        for found in walk_packages(import_module(package).__path__, f"{package}.")
        if not found.name.endswith("__main__")
    }
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_print_what_they_say(name: str) -> None:
    assert doctest.testmod(import_module(name)).failed == 0


def test_there_are_examples() -> None:
    assert sum(doctest.testmod(import_module(name)).attempted for name in MODULES) > 50
