"""The states of the global generators of torch (CPU), Python and NumPy, read and written by documented functions."""

import random
import struct
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

WORDS = 624
TWISTER = (WORDS + 1) * 4
"""Bytes of a Mersenne Twister: 624 words and the position in them."""


class GlobalStates(NamedTuple):
    """The states of the three global generators at one time, and NumPy's generator itself."""

    of_torch: bytes
    of_python: bytes
    python_gaussian: float | None
    bit_generator: Any
    """The bit generator object of NumPy's global generator."""
    of_numpy: bytes
    numpy_gaussian: bytes
    """Whether a Gaussian is cached, and its value: an int and a double in 8 bytes each."""

    @property
    def second_gaussian(self) -> float | None:
        """The Gaussian that NumPy's generator has cached, if any."""
        is_cached, gaussian = struct.unpack("i4xd", self.numpy_gaussian)
        return gaussian if is_cached else None


class DocumentedAccess:
    """Reads and writes the global generators by documented functions."""

    def read(self, bit_generator: Any) -> GlobalStates:
        """Return the states of all three generators; ``bit_generator`` is NumPy's."""
        _, (*words, position), gaussian = random.getstate()
        numpy_state: Any = np.random.get_state(legacy=False)
        return GlobalStates(
            self.torch_content(torch.default_generator.get_state()),
            struct.pack(f"{WORDS + 1}I", position, *words),
            gaussian,
            bit_generator,
            struct.pack(f"{WORDS + 1}I", *numpy_state["state"]["key"], numpy_state["state"]["pos"]),
            struct.pack("i4xd", numpy_state["has_gauss"], numpy_state["gauss"]),
        )

    def write(self, states: GlobalStates) -> None:
        """Restore all three generators; NumPy's must be the one in ``states``."""
        torch.default_generator.set_state(self.torch_state(states.of_torch))
        position, *words = struct.unpack(f"{WORDS + 1}I", states.of_python)
        # 3 is the version of Python's format; with this version, setstate() takes the words unchanged.
        random.setstate((3, (*words, position), states.python_gaussian))
        *key, position = struct.unpack(f"{WORDS + 1}I", states.of_numpy)
        np.random.set_state(("MT19937", key, position, *struct.unpack("i4xd", states.numpy_gaussian)))

    def seed_numpy(self, seed: int) -> None:
        """Seed NumPy's generator, after torch's was seeded with the same ``seed``, an integer in [0, 2**64)."""
        # NumPy takes seeds of 32 bits; the lower half of a hash is as random as all of it.
        np.random.seed(seed & 0xFFFFFFFF)

    def torch_state(self, content: bytes) -> Tensor:
        """Return ``of_torch`` in the format of a torch generator's ``get_state``."""
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def torch_content(self, state: Tensor) -> bytes:
        """Return a result of a torch generator's ``get_state`` in the format of ``of_torch``."""
        content: bytes = state.numpy().tobytes()
        return content
