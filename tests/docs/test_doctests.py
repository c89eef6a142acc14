"""Doctests, run from the installed package under its own name."""

import doctest
from importlib import import_module
from itertools import groupby
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


FOLDERS = {folder: [*names] for folder, names in groupby(MODULES, lambda name: ".".join(name.split(".")[:3]))}
"""Modules by the folder of their package."""


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstring_examples_print_their_output(folder: str) -> None:
    for name in FOLDERS[folder]:
        assert doctest.testmod(import_module(name)).failed == 0, name


@pytest.mark.longer
def test_docstrings_have_examples() -> None:
    examples = [
        example for name in MODULES for example in doctest.DocTestFinder().find(import_module(name)) if example.examples
    ]
    assert len(examples) > 30
