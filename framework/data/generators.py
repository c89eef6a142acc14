"""Functions that find, seed and restore random generators in attributes of datasets and samplers."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import Dataset

from ..state.generators import Generator, read_generator, seed_generator, write_generator


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
        seed_generator(generator, int(torch.empty((), dtype=torch.int64).random_().item()))


def restorer(generators: Sequence[Generator]) -> Callable[[], None]:
    """Return a function that restores the current states of the generators."""
    states = [(generator, read_generator(generator)) for generator in generators]

    def restore() -> None:
        for generator, state in states:
            write_generator(generator, state)

    return restore


@contextmanager
def undisturbed(generators: Sequence[Generator]) -> Iterator[None]:
    """Run the body, then restore the generators, also after an error."""
    restore = restorer(generators)
    try:
        yield
    finally:
        restore()
