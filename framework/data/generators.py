"""Random generators that a dataset or a sampler holds as attributes: found, seeded, and put back as they were."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState


def held_generators(*holders: object) -> list[Generator]:
    """List the generators among the attributes of ``holders``, of the datasets that these wrap, and so on.

    A dataset is wrapped by another if it is an attribute of it, or in a list that is one (torch's ``Subset`` and
    ``ConcatDataset``). Generators elsewhere, inside a transform say, are not found.
    """
    found: dict[int, Generator] = {}
    seen: set[int] = set()
    waiting = list(holders)
    while waiting:
        holder = waiting.pop()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        for value in _attributes(holder):
            if isinstance(value, Generator) and not isinstance(value, random.SystemRandom):
                found[id(value)] = value
            elif isinstance(value, Dataset):
                waiting.append(value)
            elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Dataset):
                waiting.extend(value)
    return list(found.values())


def _attributes(holder: object) -> list[object]:
    try:
        return list(vars(holder).values())
    except TypeError:  # a list, or a class with slots alone
        return []


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


def states_of(generators: Sequence[Generator]) -> list[Any]:
    """Read the state of each generator."""
    return [_state(generator) for generator in generators]


def _state(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def put_back(generators: Sequence[Generator], states: Sequence[Any]) -> None:
    """Give each generator the state that :func:`states_of` read."""
    for generator, state in zip(generators, states, strict=True):
        if isinstance(generator, (torch.Generator, np.random.RandomState)):
            generator.set_state(state)
        elif isinstance(generator, random.Random):
            generator.setstate(state)
        else:
            generator.bit_generator.state = state


@contextmanager
def undisturbed(generators: Sequence[Generator]) -> Iterator[None]:
    """Run the body, then put the generators back, whatever happened."""
    states = states_of(generators)
    try:
        yield
    finally:
        put_back(generators, states)
