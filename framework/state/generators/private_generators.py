"""Private random generators that functions draw from, such as the noise of a loss, found by the names in their code."""

import random
from collections.abc import Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ..values import ATOMS, LIBRARIES, is_of_library, read_native, write_native

Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState
ENTRIES = ("forward", "__call__", "compute_loss", "training_step")
"""Methods through which a training computes its losses."""
LONGEST = 100
"""Longer collections hold data."""
DEEPEST = 4
"""Depth of the objects and collections that are searched, counted from a function or a module."""
_SKIPPED = (type, Tensor, Dataset, DataLoader)


def seed_generator(generator: Generator, number: int) -> None:
    """Seed a generator with ``number``, an integer in [0, 2**64)."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(number)
    elif isinstance(generator, random.Random):
        generator.seed(number)
    elif isinstance(generator, np.random.RandomState):
        # NumPy takes seeds of 32 bits.
        generator.seed(number & 0xFFFFFFFF)
    else:
        # A bit generator has no public method that seeds it again, so it gets the state of a new one.
        kind: Any = type(generator.bit_generator)
        generator.bit_generator.state = kind(number).state


def read_generator(generator: Generator) -> Any:
    """Return the state of a generator, a tensor or plain values."""
    return generator.get_state() if isinstance(generator, torch.Generator) else read_native(generator)


def write_generator(generator: Generator, state: Any) -> None:
    """Restore a result of :func:`read_generator`."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    else:
        write_native(generator, state)


def generators_of(*roots: Any) -> list[Generator]:
    """Return the generators that functions, methods, modules or objects draw from, if their code names them.

    Searched are enclosing variables, defaults, arguments of partial functions, objects of methods, attributes, and the
    global variables that the code names, also through other functions and methods that it names. Functions of installed
    packages are not searched, nor are data sets.
    """
    search = _Search()
    for root in roots:
        search.visit(root, 0)
    return [*search.found.values()]


def generators_of_methods(modules: Iterable[nn.Module]) -> list[Generator]:
    """Return the generators that methods of modules draw from, without those in attributes of the modules."""
    search = _Search()
    for module in modules:
        search.visit_methods(module, 0)
    return [*search.found.values()]


class _Search:
    def __init__(self) -> None:
        self.found: dict[int, Generator] = {}
        self._visited: dict[Any, Any] = {}

    def visit(self, value: Any, depth: int) -> None:
        if type(value) in ATOMS or isinstance(value, _SKIPPED) or depth > DEEPEST or id(value) in self._visited:
            return
        self._visited[id(value)] = value
        if isinstance(value, Generator):
            if not isinstance(value, random.SystemRandom):
                self.found[id(value)] = value
        elif isinstance(value, FunctionType):
            self._visit_function(value, None, depth)
        elif isinstance(value, MethodType):
            self.visit(value.__self__, depth)
            self._visit_function(value.__func__, value.__self__, depth)
        elif isinstance(value, partial):
            self._visit_all((value.func, *value.args, *value.keywords.values()), depth)
        elif isinstance(value, (list, tuple, dict)):
            items = [*value.values()] if isinstance(value, dict) else [*value]
            self._visit_all(items if len(items) <= LONGEST else (), depth + 1)
        elif not isinstance(value, ModuleType):
            self._visit_object(value, depth)

    def _visit_all(self, values: Any, depth: int) -> None:
        for value in values:
            self.visit(value, depth)

    def _visit_object(self, value: Any, depth: int) -> None:
        for owner in value.modules() if isinstance(value, nn.Module) else (value,):
            self.visit_methods(owner, depth)
            self._visit_all([*getattr(owner, "__dict__", {}).values()], depth + 1)

    def visit_methods(self, owner: Any, depth: int) -> None:
        for name in ENTRIES:
            self._visit_function(getattr(type(owner), name, None), owner, depth)

    def _visit_function(self, function: Any, owner: Any, depth: int) -> None:
        key = (id(function), type(owner))
        if not isinstance(function, FunctionType) or key in self._visited:
            return
        self._visited[key] = function
        for cell in function.__closure__ or ():
            self._visit_all(_contents(cell), depth)
        if function.__code__.co_filename.startswith(LIBRARIES) or is_of_library(function):
            return
        self._visit_all((*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()), depth)
        self._visit_all(vars(function).values(), depth)
        # In the order of the code, since checkpoints number the generators.
        names, space = dict.fromkeys(_names(function.__code__)), function.__globals__
        for value in [space[name] for name in names if name in space]:
            if isinstance(value, ModuleType):
                path = getattr(value, "__file__", None)
                if path is not None and not path.startswith(LIBRARIES):
                    self._visit_all([vars(value)[name] for name in names if name in vars(value)], depth + 1)
            else:
                self.visit(value, depth + 1)
        for name in names if owner is not None else ():
            self._visit_function(getattr(type(owner), name, None), owner, depth)


def _contents(cell: Any) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # the variable has no value yet
        return ()


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names of global variables and attributes in a function's code, and in functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
