"""Generators of datasets and samplers are found, seeded and restored."""

import random
from contextlib import suppress

import numpy as np
import pytest
import torch
from loopscope.data.generators import dataset_generators, restorer, undisturbed
from loopscope.state.generators.private_generators import seed_generator
from torch.utils.data import ConcatDataset, Dataset, Subset

KINDS = {
    "torch": (lambda: torch.Generator().manual_seed(1), lambda generator: torch.randn(3, generator=generator).tolist()),
    "python": (lambda: random.Random(1), lambda generator: [generator.gauss(0, 1) for _ in range(3)]),
    "numpy": (lambda: np.random.default_rng(1), lambda generator: generator.standard_normal(3).tolist()),
    "another bit generator": (
        lambda: np.random.Generator(np.random.MT19937(1)),
        lambda generator: generator.random(3).tolist(),
    ),
    "numpy, legacy": (lambda: np.random.RandomState(1), lambda generator: generator.standard_normal(3).tolist()),
}


@pytest.mark.parametrize(("make", "draw"), KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("number", [0, 5, 2**63 + 12345, 2**64 - 1])
def test_seeding_is_independent_of_earlier_draws(make, draw, number):
    one, other = make(), make()
    draw(other)
    seed_generator(one, number)
    seed_generator(other, number)
    drawn = draw(one)
    assert drawn == draw(other)
    seed_generator(one, 7)
    assert draw(one) != drawn


@pytest.mark.parametrize(("make", "draw"), KINDS.values(), ids=KINDS)
def test_generator_is_restored_after_an_error(make, draw):
    """A seeded generator continues where it was, including a cached Gaussian draw."""
    generator = make()
    draw(generator)  # an odd number of Gaussians leaves one cached
    restore = restorer([generator])
    expected = draw(generator)
    restore()
    with suppress(KeyError), undisturbed([generator]):
        seed_generator(generator, 3)
        raise KeyError
    assert draw(generator) == expected


class Holder(Dataset):
    """An object with the given attributes."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def __len__(self):
        return 2


class Slots:
    """Has no dictionary of attributes."""

    __slots__ = ()


def test_generators_in_wrapped_datasets_are_found_once():
    """The search follows nested and cyclic objects and omits random.SystemRandom."""
    one, two, three = np.random.default_rng(1), random.Random(2), torch.Generator()
    inner = Holder(rng=one, again=one, name="x", rows=[1, 2], system=random.SystemRandom())
    inner.loop = Holder(up=inner)
    wrapped = ConcatDataset([Subset(inner, [0]), Holder(rng=two)])
    generators = dataset_generators(wrapped, inner, Holder(rng=three), [3, 4], Slots())
    assert {id(generator) for generator in generators} == {id(one), id(two), id(three)}
    assert len(generators) == 3
