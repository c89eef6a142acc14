"""The states of the global generators as bytes of memory, which are copied faster than documented functions read them.

Reading the three generators by documented functions takes 10 to 50 µs, and several times that after a training step.
All three are Mersenne Twisters, so their 2500 bytes of state are copied directly, with the second Gaussian that each
may have cached: saving and restoring all of them takes 9 µs instead of 187 µs (docs/decisions/0001). The memory offsets
are determined on import with temporary generators, and verified by the numbers these draw; if one is not found, the
documented functions are used.
"""

import ctypes
import random
import struct
import sys
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..tensors import bytes_at
from .global_generators import TWISTER, WORDS, DocumentedAccess, GlobalStates

_RANDOM_STATE: Any = np.random.random_sample.__self__  # type: ignore[attr-defined]  # the generator of the module's functions
_PYTHON: Any = random.random.__self__  # type: ignore[attr-defined]  # likewise for random


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
    flags = [
        struct.unpack_from("i", memory, block.offset)[0] for memory in (earlier_bytes, later_bytes) if block.offset > 0
    ]
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
    # Before the words: seed (8 bytes), left, seeded and next (4 each, with padding). After them: padding (4),
    # optional<float> (8) and optional<double> (16), the cached Gaussians.
    start, end = words - 20, words + WORDS * 4 + 28
    block = bytes_at(address + start, end - start) if words >= 20 else b""
    gaussian = _gaussian(twin)
    if block[-16:-7] != struct.pack("d?", gaussian, True):
        return None
    ctypes.memmove(other._cdata + start, block, len(block))  # type: ignore[attr-defined]
    repeats = _gaussian(other) == gaussian
    return MemoryBlock(start, len(block)) if repeats and torch.equal(other.get_state(), twin.get_state()) else None


class MemoryAccess(DocumentedAccess):
    """Copies the states of the global generators to and from their memory.

    ``of_torch`` is in another format than by documented functions; :meth:`torch_state` converts it.
    """

    def __init__(self, in_python: MemoryBlock, in_numpy: MemoryBlock, in_torch: MemoryBlock) -> None:
        self._in_torch, self._gaussian_size = in_torch, in_numpy.size
        # id() is the address in CPython. Their modules keep these objects alive, so the addresses stay valid; NumPy's
        # set_bit_generator() changes the bit generator within the RandomState, not the RandomState itself.
        self._at_python = id(_PYTHON) + in_python.offset
        self._at_gaussian = id(_RANDOM_STATE) + in_numpy.offset
        self._at_torch = torch.default_generator._cdata + in_torch.offset  # type: ignore[attr-defined]
        self._bit_generator: Any = None
        """NumPy's generator at the last read, whose state never moves."""
        self._at_numpy = 0

    def read(self, bit_generator: Any) -> GlobalStates:
        """Return the states of all three generators; ``bit_generator`` is NumPy's."""
        if bit_generator is not self._bit_generator:
            self._bit_generator, self._at_numpy = bit_generator, bit_generator.ctypes.state_address
        return GlobalStates(
            bytes_at(self._at_torch, self._in_torch.size),
            bytes_at(self._at_python, TWISTER),
            _PYTHON.gauss_next,
            bit_generator,
            bytes_at(self._at_numpy, TWISTER),
            bytes_at(self._at_gaussian, self._gaussian_size),
        )

    def write(self, states: GlobalStates) -> None:
        """Restore all three generators; NumPy's must be the one in ``states``."""
        ctypes.memmove(self._at_torch, states.of_torch, self._in_torch.size)
        ctypes.memmove(self._at_python, states.of_python, TWISTER)
        ctypes.memmove(states.bit_generator.ctypes.state_address, states.of_numpy, TWISTER)
        ctypes.memmove(self._at_gaussian, states.numpy_gaussian, self._gaussian_size)
        _PYTHON.gauss_next = states.python_gaussian

    def torch_state(self, content: bytes) -> Tensor:
        """Return ``of_torch`` in the format of a torch generator's ``get_state``."""
        twin = torch.Generator()
        ctypes.memmove(twin._cdata + self._in_torch.offset, content, self._in_torch.size)  # type: ignore[attr-defined]
        return twin.get_state()

    def torch_content(self, state: Tensor) -> bytes:
        """Return a result of a torch generator's ``get_state`` in the format of ``of_torch``."""
        twin = torch.Generator()
        twin.set_state(state)
        content: bytes = bytes_at(twin._cdata + self._in_torch.offset, self._in_torch.size)  # type: ignore[attr-defined]
        return content


def find_access() -> DocumentedAccess:
    """Return the access by memory if all three states are found, otherwise the documented one."""
    in_python, in_numpy, in_torch = find_in_python(), find_in_numpy(), find_in_torch()
    if in_python is None or in_numpy is None or in_torch is None:
        return DocumentedAccess()
    return MemoryAccess(in_python, in_numpy, in_torch)
