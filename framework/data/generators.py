"""Functions that find, seed and restore random generators in attributes of datasets and samplers."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState


def dataset_generators(*holders: object) -> list[Generator]:
    """Return the generators among the attributes of ``holders`` and, recursively, of the datasets that they wrap.

    Generators in other objects, such as a transform, are not found.
    """
    values = [value for holder in all_holders(*holders, kinds=(Dataset,)) for value in attributes(holder).values()]
    generators = [
        value for value in values if isinstance(value, Generator) and not isinstance(value, random.SystemRandom)
    ]
    return list({id(value): value for value in generators}.values())


def all_holders(*holders: object, kinds: tuple[type, ...]) -> list[object]:
    """Return ``holders`` and, recursively, the objects of these ``kinds`` that they wrap.

    A wrapped object is an attribute, or an item of a list in an attribute (torch's ``Subset`` and ``ConcatDataset``).
    """
    visited: dict[int, object] = {}
    waiting = list(holders)
    while waiting:
        holder = waiting.pop()
        if id(holder) in visited:
            continue
        visited[id(holder)] = holder
        for value in list(attributes(holder).values()):
            if isinstance(value, kinds):
                waiting.append(value)
            elif isinstance(value, (list, tuple)) and value and isinstance(value[0], kinds):
                waiting.extend(value)
    return list(visited.values())


def attributes(holder: object) -> dict[str, Any]:
    """Return the ``__dict__`` of an object, or an empty dict for a list or an object that only has slots."""
    return getattr(holder, "__dict__", {})


def seed_all(generators: Sequence[Generator]) -> None:
    """Seed each generator with a number from torch's global generator."""
    for generator in generators:
        seed(generator, int(torch.empty((), dtype=torch.int64).random_().item()))


def seed(generator: Generator, number: int) -> None:
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


def restorer(generators: Sequence[Generator]) -> Callable[[], None]:
    """Return a function that restores the current states of the generators."""
    steps: list[Callable[[], object]] = []
    for generator in generators:
        if isinstance(generator, torch.Generator):
            steps.append(partial(generator.set_state, generator.get_state()))
        elif isinstance(generator, random.Random):
            steps.append(partial(generator.setstate, generator.getstate()))
        elif isinstance(generator, np.random.RandomState):
            steps.append(partial(generator.set_state, generator.get_state(legacy=False)))
        else:
            steps.append(partial(setattr, generator.bit_generator, "state", generator.bit_generator.state))

    def restore() -> None:
        for step in steps:
            step()

    return restore


@contextmanager
def undisturbed(generators: Sequence[Generator]) -> Iterator[None]:
    """Run the body, then restore the generators, also after an error."""
    restore = restorer(generators)
    try:
        yield
    finally:
        restore()
