"""The states of the global generators as bytes of memory, which are copied faster than documented functions read them.

Reading the three generators by documented functions takes 10 to 50 µs, and several times that after a training step.
All three are Mersenne Twisters, so their 2500 bytes of state are copied directly, with the second Gaussian that each
may have cached: saving and restoring all of them takes a twentieth of the time (docs/decisions/0001). The memory
offsets are determined on import with temporary generators, and verified by the numbers these draw; if one is not found,
the documented functions are used.
"""

import ctypes
import random
import struct
import sys
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...tensors import bytes_at
from .global_generators import TWISTER, WORDS, DocumentedAccess, GlobalStates

_RANDOM_STATE: Any = np.random.random_sample.__self__  # type: ignore[attr-defined]  # the generator of the module's functions
_PYTHON: Any = random.random.__self__  # type: ignore[attr-defined]  # likewise for random
_NUMPY: Any = np.random  # its stubs lack get_bit_generator
WORDS_IN_TORCH = 20
"""Bytes before the words in torch's block: the seed (8), left, seeded and next (4 each)."""
UNUSED = struct.pack("i", WORDS)
"""The position of NumPy's generator after seeding: no word is left, so the next draw computes new ones."""


def _memory(address: int, size: int) -> Any:
    """Return an array on the bytes at an address, whose attribute ``raw`` reads and writes them."""
    return (ctypes.c_char * size).from_address(address)


class MemoryBlock(NamedTuple):
    """Memory block of a generator's state: offset from the object's address and size in bytes."""

    offset: int
    size: int


def find_in_python() -> MemoryBlock | None:
    """Find position and words of Python's generator, which follow the object's header in CPython."""
    # Memory holds the position, then the words; getstate() returns the words, then the position.
    block, twin = MemoryBlock(object.__basicsize__, TWISTER), random.Random(1)
    if sys.implementation.name != "cpython" or random.Random.__base__.__basicsize__ < sum(block):  # type: ignore[union-attr]
        return None
    position, *words = struct.unpack(f"{WORDS + 1}I", bytes_at(id(twin) + block.offset, block.size))
    return block if (*words, position) == twin.getstate()[1] else None


def find_in_numpy() -> MemoryBlock | None:
    """Find NumPy's cached Gaussian: a flag (int), then the number (double)."""
    twin: Any = np.random.RandomState(1)
    twin.standard_normal()  # the polar method draws two numbers and caches the second for the next call
    gaussian = twin.get_state(legacy=False)["gauss"]
    earlier_bytes = bytes_at(id(twin), type(twin).__basicsize__)
    block = MemoryBlock(earlier_bytes.find(struct.pack("d", gaussian)) - 8, 16)
    twin.standard_normal()
    later_bytes = bytes_at(id(twin), type(twin).__basicsize__)
    memories = (earlier_bytes, later_bytes) if block.offset > 0 else ()
    flags = [struct.unpack_from("i", memory, block.offset)[0] for memory in memories]
    return block if flags == [1, 0] else None


def _gaussian(generator: torch.Generator) -> float:
    # on the CPU, also if the script has set another default device before this module is imported
    return torch.randn((), dtype=torch.float64, device="cpu", generator=generator).item()


def find_in_torch() -> MemoryBlock | None:
    """Find seed, position, words and cached Gaussians of a CPU generator: one block in the C++ object."""
    twin, other = torch.Generator(), torch.Generator()
    address = getattr(twin.manual_seed(1), "_cdata", 0)
    # get_state() widens every word to eight bytes, after three entries of eight bytes: the seed; left and seeded; next.
    first = struct.pack("4I", *[word & 0xFFFFFFFF for word in twin.get_state().view(torch.int64)[3:7].tolist()])
    words = bytes_at(address, 256).find(first) if address else -1  # the object is 2.6 KB large
    _gaussian(twin)
    # After the words: padding (4 bytes), optional<float> (8) and optional<double> (16), the cached Gaussians.
    start, end = words - WORDS_IN_TORCH, words + WORDS * 4 + 28
    block = bytes_at(address + start, end - start) if words >= WORDS_IN_TORCH else b""
    gaussian = _gaussian(twin)
    if block[-16:-7] != struct.pack("d?", gaussian, True):
        return None
    ctypes.memmove(other._cdata + start, block, len(block))  # type: ignore[attr-defined]
    repeats = _gaussian(other) == gaussian
    return MemoryBlock(start, len(block)) if repeats and torch.equal(other.get_state(), twin.get_state()) else None


def seeds_alike(in_torch: MemoryBlock) -> bool:
    """Return whether NumPy's legacy seeding fills a generator with the words with which torch fills its own.

    Both use init_genrand of the reference implementation, from the lower 32 bits of the seed.
    """
    seed = 0xFEDCBA9876543210
    in_numpy: Any = np.random.RandomState(seed & 0xFFFFFFFF)
    generator = torch.Generator().manual_seed(seed)
    address = generator._cdata + in_torch.offset + WORDS_IN_TORCH  # type: ignore[attr-defined]
    state = bytes_at(in_numpy._bit_generator.ctypes.state_address, TWISTER)
    return bool(state == bytes_at(address, WORDS * 4) + UNUSED)


class MemoryAccess(DocumentedAccess):
    """Copies the states of the global generators to and from their memory.

    ``of_torch`` is in another format than by documented functions; :meth:`torch_state` converts it.

    The memory is read and written through the attribute ``raw`` of arrays of ctypes. After a training step, with cold
    caches, a foreign function, such as memmove, takes several times as long: it converts its arguments one by one.
    """

    def __init__(self, in_python: MemoryBlock, in_numpy: MemoryBlock, in_torch: MemoryBlock) -> None:
        self._in_torch = in_torch
        # id() is the address in CPython. Their modules keep these objects alive, so the addresses stay valid; NumPy's
        # set_bit_generator() changes the bit generator within the RandomState, not the RandomState itself.
        at_torch = torch.default_generator._cdata + in_torch.offset  # type: ignore[attr-defined]
        self._torch = _memory(at_torch, in_torch.size)
        self._torch_words = _memory(at_torch + WORDS_IN_TORCH, WORDS * 4)
        self._python = _memory(id(_PYTHON) + in_python.offset, TWISTER)
        self._gaussian = _memory(id(_RANDOM_STATE) + in_numpy.offset, in_numpy.size)
        self._no_gaussian = bytes(in_numpy.size)
        self._bit_generator: Any = None
        """NumPy's generator at the last read, whose state never moves."""
        self._numpy = self._numpy_words = self._numpy_position = _memory(0, 0)
        self._seeds_alike = seeds_alike(in_torch)

    def read(self, bit_generator: Any) -> GlobalStates:
        """Return the states of all three generators; ``bit_generator`` is NumPy's."""
        if bit_generator is not self._bit_generator:
            self._find_numpy(bit_generator)
        return GlobalStates(
            self._torch.raw, self._python.raw, _PYTHON.gauss_next, bit_generator, self._numpy.raw, self._gaussian.raw
        )

    def _find_numpy(self, bit_generator: Any) -> None:
        address = bit_generator.ctypes.state_address
        self._numpy = _memory(address, TWISTER)
        self._numpy_words, self._numpy_position = _memory(address, WORDS * 4), _memory(address + WORDS * 4, 4)
        self._bit_generator = bit_generator

    def write(self, states: GlobalStates) -> None:
        """Restore all three generators; NumPy's must be the one in ``states``."""
        if states.bit_generator is not self._bit_generator:
            self._find_numpy(states.bit_generator)
        self._torch.raw = states.of_torch
        self._python.raw = states.of_python
        self._numpy.raw = states.of_numpy
        self._gaussian.raw = states.numpy_gaussian
        _PYTHON.gauss_next = states.python_gaussian

    def seed_numpy(self, seed: int) -> None:
        """Seed NumPy's generator as ``np.random.seed`` does, after torch's was seeded with the same ``seed``."""
        if self._seeds_alike and _NUMPY.get_bit_generator() is self._bit_generator:
            self._numpy_words.raw = self._torch_words.raw
            self._numpy_position.raw = UNUSED
            self._gaussian.raw = self._no_gaussian
        else:
            super().seed_numpy(seed)

    def torch_state(self, content: bytes) -> Tensor:
        """Return ``of_torch`` in the format of a torch generator's ``get_state``."""
        twin = torch.Generator()
        ctypes.memmove(twin._cdata + self._in_torch.offset, content, self._in_torch.size)  # type: ignore[attr-defined]
        return twin.get_state()

    def torch_content(self, state: Tensor) -> bytes:
        """Return a result of a torch generator's ``get_state`` in the format of ``of_torch``."""
        twin = torch.Generator()
        twin.set_state(state)
        return bytes_at(twin._cdata + self._in_torch.offset, self._in_torch.size)  # type: ignore[attr-defined]


def find_access() -> DocumentedAccess:
    """Return the access by memory if all three states are found, otherwise the documented one."""
    in_python, in_numpy, in_torch = find_in_python(), find_in_numpy(), find_in_torch()
    if in_python is None or in_numpy is None or in_torch is None:
        return DocumentedAccess()
    return MemoryAccess(in_python, in_numpy, in_torch)
