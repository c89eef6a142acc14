"""Both ways to read and write the global generators: as bytes of memory, and by documented functions."""

import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from loopscope.state import RandomStreams, seed_everything
from loopscope.state.generators import generator_memory
from loopscope.state.generators.generator_memory import MemoryAccess, find_access
from loopscope.state.generators.global_generators import DocumentedAccess

DOCUMENTED = DocumentedAccess()


@pytest.fixture
def memory() -> MemoryAccess:
    access = find_access()
    assert isinstance(access, MemoryAccess), "the states are not found in the memory of these versions"
    return access


def draw(count: int) -> list[float]:
    """Draw numbers and Gaussians of all generators; after an odd number, each has cached a Gaussian."""
    numbers: list[float] = []
    for _ in range(count):
        numbers += [torch.randn((), dtype=torch.float64).item(), random.gauss(0, 1), np.random.standard_normal()]
        numbers += [torch.rand(()).item(), random.random(), np.random.rand()]
    return numbers


@pytest.mark.parametrize("draws", [0, 1, 2, 700])
def test_both_ways_read_equal_states(memory: MemoryAccess, draws: int) -> None:
    with RandomStreams(0).preserved():
        seed_everything(3)
        draw(draws)
        bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
        fast, slow = memory.read(bits), DOCUMENTED.read(bits)
    torch_state = DOCUMENTED.torch_state(slow.of_torch)
    assert memory.torch_state(fast.of_torch).equal(torch_state)
    assert memory.torch_state(memory.torch_content(torch_state)).equal(torch_state)
    assert fast[1:5] == slow[1:5]
    assert fast.second_gaussian == slow.second_gaussian


@pytest.mark.parametrize("way", ["memory", "documented"])
@pytest.mark.parametrize("draws", [0, 1, 2])
def test_both_ways_restore_the_draws(memory: MemoryAccess, way: str, draws: int) -> None:
    access = memory if way == "memory" else DOCUMENTED
    with RandomStreams(0).preserved():
        seed_everything(3)
        draw(draws)
        states = access.read(np.random.get_bit_generator())  # type: ignore[attr-defined]
        expected = draw(3)
        seed_everything(4)
        draw(1)
        access.write(states)
        assert draw(3) == expected


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**64 - 1])
def test_both_ways_seed_numpy_alike(memory: MemoryAccess, seed: int, replaced: bool) -> None:
    """The cached Gaussian of an odd number of draws is dropped; another bit generator is seeded, too."""
    draws = []
    with RandomStreams(0).preserved():
        for access in (memory, DOCUMENTED):
            memory.read(np.random.get_bit_generator())  # type: ignore[attr-defined]
            if replaced:
                np.random.set_bit_generator(np.random.MT19937(5))  # type: ignore[attr-defined]
            draw(1)
            torch.default_generator.manual_seed(seed)
            access.seed_numpy(seed)
            draws.append([np.random.standard_normal(), np.random.rand(), *np.random.randint(99, size=700)])
    assert memory._seeds_alike
    assert draws[0] == draws[1]


@pytest.mark.parametrize("name", ["find_in_python", "find_in_numpy", "find_in_torch"])
def test_missing_block_selects_documented_functions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator_memory, name, lambda: None)
    assert type(find_access()) is DocumentedAccess


IMPORTS = """
import torch
torch.set_default_device("meta")
torch.set_default_dtype(torch.float64)
with torch.inference_mode():
    from loopscope import cli, experiments, integrations, report, runs, sinks, training_hooks
    from loopscope.state.generators import random_streams
assert type(random_streams._ACCESS).__name__ == "MemoryAccess"
"""


@pytest.mark.slow
@pytest.mark.process
def test_imports_ignore_default_device_and_dtype() -> None:
    """A script may set them before it imports loopscope; tensors on the device "meta" have no values."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
