import random
from contextlib import suppress

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from loopscope.errors import UsageError
from loopscope.state import RandomStreams, seed_everything
from loopscope.state.generators import random_streams
from loopscope.state.generators.generator_memory import find_access
from loopscope.state.generators.global_generators import DocumentedAccess

DRAWS = {
    "torch": lambda: torch.rand(1).item(),
    "torch normal": lambda: torch.randn(1).item(),
    "torch integers": lambda: int(torch.randint(10**9, ())),
    "torch permutation": lambda: torch.randperm(7).tolist(),
    "python": random.random,
    "python Gaussian": lambda: random.gauss(0, 1),
    "python bits": lambda: random.getrandbits(70),
    "numpy": np.random.rand,
    "numpy Gaussian": np.random.standard_normal,
    "numpy integers": lambda: int(np.random.randint(2**31)),
    "numpy bytes": lambda: np.random.bytes(3),
    "numpy choice": lambda: np.random.permutation(5).tolist(),
}


@pytest.fixture(scope="module", params=[find_access, DocumentedAccess], ids=["found", "documented"], autouse=True)
def _state_access(request):
    original = random_streams._ACCESS
    random_streams._ACCESS = request.param()
    yield
    random_streams._ACCESS = original


sequences = st.lists(st.sampled_from(sorted(DRAWS)), max_size=8)


def draw(names):
    return [DRAWS[name]() for name in names]


@settings(deadline=None)
@given(sequences, sequences, sequences)
def test_isolated_draws_do_not_affect_the_run(earlier, inside, later):
    streams = RandomStreams(1)
    seed_everything(5)
    expected = draw(earlier + later)
    seed_everything(5)
    numbers = draw(earlier)
    with streams.preserved():
        streams.derive("hook", "POST_STEP", 3)
        draw(inside)
    assert numbers + draw(later) == expected


@pytest.mark.longer
@settings(deadline=None)
@given(sequences, sequences)
def test_restored_streams_repeat_the_draws(earlier, later):
    seed_everything(7)
    draw(earlier)
    state = RandomStreams(1).save()
    drawn = draw(later)
    state.restore()
    assert draw(later) == drawn
    state.restore()
    assert draw(later) == drawn


@pytest.mark.parametrize("gaussians", [0, 1, 2, 3])
def test_cached_second_gaussian_is_restored(gaussians):
    names = ["numpy Gaussian", "python Gaussian"]
    seed_everything(2)
    draw(names * gaussians)
    expected = draw(names)
    seed_everything(2)
    draw(names * gaussians)
    with RandomStreams(1).preserved():
        draw(names * 2)
        np.random.seed(0)
        random.seed(0)
    assert draw(names) == expected


def test_streams_are_restored_after_an_error():
    seed_everything(3)
    expected = draw(DRAWS)
    seed_everything(3)
    with suppress(KeyError), RandomStreams(1).preserved():
        draw(DRAWS)
        raise KeyError
    assert draw(DRAWS) == expected


def test_numpy_bit_generator_is_restored():
    bit_generator = np.random.get_bit_generator()
    with RandomStreams(1).preserved():
        np.random.set_bit_generator(np.random.PCG64(3))
        np.random.rand()
    assert np.random.get_bit_generator() is bit_generator


def test_other_numpy_bit_generator_is_refused():
    """The error names NumPy's PCG64 before the run starts."""
    bit_generator = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        with pytest.raises(UsageError, match="PCG64"):
            RandomStreams(1)
    finally:
        np.random.set_bit_generator(bit_generator)


def derived(seed, name, point, step, past=()):
    owned = torch.Generator()
    streams = RandomStreams(seed, owned=[owned])
    with streams.preserved():
        draw(past)
        torch.rand(len(past), generator=owned)
        streams.derive(name, point, step)
        return [*draw(DRAWS), torch.rand(1, generator=owned).item()]


@pytest.mark.longer
@settings(deadline=None)
@given(sequences)
def test_derived_stream_ignores_earlier_draws(past):
    assert derived(1, "norms", "POST_STEP", 4, past) == derived(1, "norms", "POST_STEP", 4)


def test_derived_stream_depends_on_every_key_part():
    """Seed, hook name, hook point and step each change the draws."""
    keys = [(1, "norms", "POST_STEP", 4), (2, "norms", "POST_STEP", 4), (1, "norm", "POST_STEP", 4)]
    keys += [(1, "norms", "PRE_STEP", 4), (1, "norms", "POST_STEP", 5), (14, "norms", "POST_STEP", 1)]
    drawn = [derived(*key) for key in keys]
    for position in range(len(DRAWS) + 1):
        values = [str(row[position]) for row in drawn]
        assert len(set(values)) == len(keys) or list(DRAWS)[position : position + 1] == ["numpy choice"]


def test_derived_stream_seed_is_portable():
    """The seed is an XXH3 hash of the key, which is equal on every machine."""
    generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(b"7/norms/POST_EPOCH/12"))
    assert derived(7, "norms", "POST_EPOCH", 12)[0] == torch.rand(1, generator=generator).item()


def test_owned_generators_are_saved_and_restored():
    owned = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    streams = RandomStreams(1, owned=owned)
    state = streams.save()
    drawn = [torch.rand(3, generator=generator).tolist() for generator in owned]
    state.restore()
    assert [torch.rand(3, generator=generator).tolist() for generator in owned] == drawn
