"""Random generators that a dataset or a sampler holds as attributes: found, seeded, and put back as they were."""

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
    """List the generators among the attributes of ``holders``, of the datasets that these wrap, and so on.

    Generators elsewhere, inside a transform say, are not found.
    """
    held = [value for holder in all_holders(*holders, kinds=(Dataset,)) for value in attributes(holder).values()]
    found = [value for value in held if isinstance(value, Generator) and not isinstance(value, random.SystemRandom)]
    return list({id(value): value for value in found}.values())


def all_holders(*holders: object, kinds: tuple[type, ...]) -> list[object]:
    """List ``holders``, the objects of these ``kinds`` that they wrap, and so on.

    One is wrapped by another if it is an attribute of it, or in a list that is one (torch's ``Subset`` and
    ``ConcatDataset``).
    """
    found: dict[int, object] = {}
    waiting = list(holders)
    while waiting:
        holder = waiting.pop()
        if id(holder) in found:
            continue
        found[id(holder)] = holder
        for value in list(attributes(holder).values()):
            if isinstance(value, kinds):
                waiting.append(value)
            elif isinstance(value, (list, tuple)) and value and isinstance(value[0], kinds):
                waiting.extend(value)
    return list(found.values())


def attributes(holder: object) -> dict[str, Any]:
    """Return the ``__dict__`` of an object; a list, or an object of a class with slots alone, has none."""
    return getattr(holder, "__dict__", {})


def seed_all(generators: Sequence[Generator]) -> None:
    """Start each generator from a number drawn from the global generator of torch."""
    for generator in generators:
        seed(generator, int(torch.empty((), dtype=torch.int64).random_().item()))


def seed(generator: Generator, number: int) -> None:
    """Start a generator from ``number``, an integer in [0, 2**64)."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(number)
    elif isinstance(generator, random.Random):
        generator.seed(number)
    elif isinstance(generator, np.random.RandomState):
        generator.seed(number & 0xFFFFFFFF)
    else:
        kind: Any = type(generator.bit_generator)
        generator.bit_generator.state = kind(number).state


def restorer(generators: Sequence[Generator]) -> Callable[[], None]:
    """Return a function that puts the generators back to where they are now."""
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
    """Run the body, then put the generators back, whatever happened."""
    restore = restorer(generators)
    try:
        yield
    finally:
        restore()
