"""Derived random streams: each hook call draws from a separate stream, and the run's generators are restored.

The run's generators are those of torch (CPU and every accelerator in use), Python and NumPy, and those of the loader.
Reading the three global generators by public functions takes 10 to 50 µs, and several times that after a training step.
All three are Mersenne Twisters, so their 2500 bytes of state are copied directly, with the second Gaussian that each
may have cached. The memory offsets are determined on import with temporary generators, and verified by the numbers
these draw; if one is not found, the public functions are used.
"""

import ctypes
import random
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from ..errors import UsageError
from ..tensors import bytes_at
from .accelerators import devices_in_use, generator_state, is_present, seed_generators, set_generator_state

WORDS = 624
TWISTER = (WORDS + 1) * 4
"""Bytes of a Mersenne Twister: 624 words and the position in them."""
_NUMPY: Any = np.random  # its stubs lack set_bit_generator
_RANDOM_STATE: Any = np.random.random_sample.__self__  # type: ignore[attr-defined]  # the generator of the module's functions
_PYTHON: Any = random.random.__self__  # type: ignore[attr-defined]  # likewise for random
# The C method that random.Random.seed calls for an integer, after checks for other kinds of seed.
_SEED_PYTHON: Any = random.Random.__base__.seed  # type: ignore[union-attr]


class MemoryBlock(NamedTuple):
    """Memory block of a generator's state: offset from the object's address and size in bytes; size 0 if unknown."""

    offset: int
    size: int


NO_BLOCK = MemoryBlock(0, 0)


def _find_in_python() -> MemoryBlock:
    """Find position and words of Python's generator, which follow the object's header in CPython."""
    # Memory holds the position, then the words; getstate() returns the words, then the position.
    block, twin = MemoryBlock(object.__basicsize__, TWISTER), random.Random(1)
    if sys.implementation.name != "cpython" or random.Random.__base__.__basicsize__ < sum(block):  # type: ignore[union-attr]
        return NO_BLOCK
    position, *words = struct.unpack(f"{WORDS + 1}I", bytes_at(id(twin) + block.offset, block.size))
    return block if (*words, position) == twin.getstate()[1] else NO_BLOCK


def _find_in_numpy() -> MemoryBlock:
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
    return block if flags == [1, 0] else NO_BLOCK


def _find_in_torch() -> MemoryBlock:
    """Find seed, position, words and cached Gaussians of a CPU generator: one block in the C++ object."""
    twin, other = torch.Generator(), torch.Generator()
    address = getattr(twin.manual_seed(1), "_cdata", 0)
    # get_state() widens every word to eight bytes, after three entries of eight bytes: the seed; left and seeded; next.
    first = struct.pack("4I", *[word & 0xFFFFFFFF for word in twin.get_state().view(torch.int64)[3:7].tolist()])
    words = bytes_at(address, 256).find(first) if address else -1  # the object is 2.6 KB large
    torch.randn(1, dtype=torch.float64, generator=twin)
    # Before the words: seed (8 bytes), left, seeded and next (4 each, with padding). After them: padding (4),
    # optional<float> (8) and optional<double> (16), the cached Gaussians.
    start, end = words - 20, words + WORDS * 4 + 28
    block = bytes_at(address + start, end - start) if words >= 20 else b""
    gaussian = torch.randn(1, dtype=torch.float64, generator=twin).item()
    if block[-16:-7] != struct.pack("d?", gaussian, True):
        return NO_BLOCK
    ctypes.memmove(other._cdata + start, block, len(block))  # type: ignore[attr-defined]
    repeats = torch.randn(1, dtype=torch.float64, generator=other).item() == gaussian
    return MemoryBlock(start, len(block)) if repeats and torch.equal(other.get_state(), twin.get_state()) else NO_BLOCK


_IN_PYTHON, _IN_NUMPY, _IN_TORCH = _find_in_python(), _find_in_numpy(), _find_in_torch()
# Saving and restoring all generators takes 9 µs as bytes and 187 µs by documented functions (docs/decisions/0001).
_BLOCKS_FOUND = NO_BLOCK not in (_IN_PYTHON, _IN_NUMPY, _IN_TORCH)
# id() is the address in CPython. Their modules keep these objects alive, so the addresses stay valid; NumPy's
# set_bit_generator() changes the bit generator within the RandomState, not the RandomState itself.
_AT_PYTHON = id(_PYTHON) + _IN_PYTHON.offset
_AT_GAUSSIAN = id(_RANDOM_STATE) + _IN_NUMPY.offset
_AT_TORCH = torch.default_generator._cdata + _IN_TORCH.offset if _BLOCKS_FOUND else 0  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class StreamState:
    """The states of all of the run's generators at one time, those of the three global ones as bytes."""

    of_torch: bytes
    of_python: bytes
    python_gaussian: float | None
    bit_generator: Any
    """The bit generator object of NumPy's global generator."""
    of_numpy: bytes
    numpy_gaussian: bytes
    """Whether a Gaussian is cached, and its value: an int and a double in 8 bytes each."""
    accelerators: tuple[tuple[torch.device, Tensor], ...]
    owned: tuple[tuple[torch.Generator, Tensor], ...]

    def restore(self) -> None:
        """Restore every generator."""
        if _NUMPY.get_bit_generator() is not self.bit_generator:
            # This drops the Gaussian that NumPy has cached; it is restored below.
            _NUMPY.set_bit_generator(self.bit_generator)
        if _BLOCKS_FOUND:
            ctypes.memmove(_AT_TORCH, self.of_torch, _IN_TORCH.size)
            ctypes.memmove(_AT_PYTHON, self.of_python, TWISTER)
            ctypes.memmove(self.bit_generator.ctypes.state_address, self.of_numpy, TWISTER)
            ctypes.memmove(_AT_GAUSSIAN, self.numpy_gaussian, _IN_NUMPY.size)
            _PYTHON.gauss_next = self.python_gaussian
        else:
            _restore_by_public_functions(self)
        for device, state in self.accelerators:
            set_generator_state(device, state)
        for generator, state in self.owned:
            generator.set_state(state)

    @property
    def second_gaussian(self) -> float | None:
        """The Gaussian that NumPy's generator has cached, if any."""
        is_cached, gaussian = struct.unpack("i4xd", self.numpy_gaussian)
        return gaussian if is_cached else None

    @property
    def torch_cpu(self) -> Tensor:
        """The state of torch's CPU generator, in the format of its ``get_state``."""
        if not _BLOCKS_FOUND:
            return _as_tensor(self.of_torch)
        twin = torch.Generator()
        ctypes.memmove(twin._cdata + _IN_TORCH.offset, self.of_torch, _IN_TORCH.size)  # type: ignore[attr-defined]
        return twin.get_state()


def _torch_bytes(state: Tensor) -> bytes:
    """Return the bytes of torch's CPU generator in a :class:`StreamState`, given a result of ``get_state``."""
    if not _BLOCKS_FOUND:
        content: bytes = state.numpy().tobytes()
        return content
    twin = torch.Generator()
    twin.set_state(state)
    block: bytes = bytes_at(twin._cdata + _IN_TORCH.offset, _IN_TORCH.size)  # type: ignore[attr-defined]
    return block


Globals = tuple[bytes, bytes, float | None, Any, bytes, bytes]
"""The first six fields of a :class:`StreamState`."""


def _global_states(bits: Any) -> Globals:
    """Read the three global generators by public functions; ``bits`` is NumPy's bit generator."""
    _, (*words, position), gaussian = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    return (
        torch.default_generator.get_state().numpy().tobytes(),
        struct.pack(f"{WORDS + 1}I", position, *words),
        gaussian,
        bits,
        struct.pack(f"{WORDS + 1}I", *numpy_state["state"]["key"], numpy_state["state"]["pos"]),
        struct.pack("i4xd", numpy_state["has_gauss"], numpy_state["gauss"]),
    )


def _restore_by_public_functions(state: StreamState) -> None:
    torch.default_generator.set_state(_as_tensor(state.of_torch))
    position, *words = struct.unpack(f"{WORDS + 1}I", state.of_python)
    # 3 is the version of Python's format; with this version, setstate() takes the words unchanged.
    random.setstate((3, (*words, position), state.python_gaussian))
    *key, position = struct.unpack(f"{WORDS + 1}I", state.of_numpy)
    np.random.set_state(("MT19937", key, position, *struct.unpack("i4xd", state.numpy_gaussian)))


def _twister_of(bits: Any) -> Any:
    """Return NumPy's bit generator; raise :class:`UsageError` unless it is of the default kind."""
    if not isinstance(bits, np.random.MT19937):
        raise UsageError(
            f"NumPy's global generator is a {type(bits).__name__}, but loopscope can isolate only the default MT19937; "
            "do not call np.random.set_bit_generator."
        )
    return bits


def plain(streams: StreamState) -> dict[str, Any]:
    """Return the states of the generators as tensors and plain values, for checkpoints."""
    return {
        "torch": streams.torch_cpu,
        "python": _as_tensor(streams.of_python),
        "python_gaussian": streams.python_gaussian,
        "numpy": _as_tensor(streams.of_numpy),
        "numpy_gaussian": streams.second_gaussian,
        "accelerators": [state for _, state in streams.accelerators],
        "owned": [state for _, state in streams.owned],
    }


def from_plain(stored: Mapping[str, Any], now: StreamState) -> StreamState:
    """Return the states in a result of :func:`plain`, for the generators of ``now``."""
    gaussian = stored["numpy_gaussian"]
    return StreamState(
        _torch_bytes(stored["torch"]),
        _twister_bytes(stored["python"]),
        stored["python_gaussian"],
        now.bit_generator,
        _twister_bytes(stored["numpy"]),
        struct.pack("i4xd", gaussian is not None, gaussian or 0.0),
        tuple((device, saved) for (device, _), saved in zip(now.accelerators, stored["accelerators"], strict=False)),
        tuple((generator, saved) for (generator, _), saved in zip(now.owned, stored["owned"], strict=True)),
    )


def _as_tensor(key: bytes) -> Tensor:
    return torch.frombuffer(bytearray(key), dtype=torch.uint8)


def _twister_bytes(tensor: Tensor) -> bytes:
    """Return the state of a Mersenne Twister; raise ``ValueError`` for another size, since it is copied as bytes."""
    key = tensor.numpy().tobytes()
    if len(key) != TWISTER:
        raise ValueError(f"a random generator's state has {len(key)} bytes instead of {TWISTER}")
    return key


class RandomStreams:
    """The run's generators, and the streams derived from its seed.

    A derived stream depends only on the run seed and (name, point, step), so that adding or removing a hook does not
    change the random numbers of other hooks.
    """

    def __init__(self, seed: int, owned: Iterable[torch.Generator] = ()) -> None:
        """Read all generators; raise :class:`UsageError` if NumPy's global one is not of the default kind."""
        self.seed = seed
        self.owned = tuple(owned)
        self.save()

    def save(self) -> StreamState:
        """Read the state of every generator."""
        bits = _NUMPY.get_bit_generator()
        twister = bits if type(bits) is np.random.MT19937 else _twister_of(bits)
        global_states: Globals = (
            (
                bytes_at(_AT_TORCH, _IN_TORCH.size),
                bytes_at(_AT_PYTHON, TWISTER),
                _PYTHON.gauss_next,
                twister,
                bytes_at(twister.ctypes.state_address, TWISTER),
                bytes_at(_AT_GAUSSIAN, _IN_NUMPY.size),
            )
            if _BLOCKS_FOUND
            else _global_states(twister)
        )
        devices = devices_in_use() if is_present() else ()
        return StreamState(
            *global_states,
            (*zip(devices, map(generator_state, devices), strict=True),),
            (*zip(self.owned, map(torch.Generator.get_state, self.owned), strict=True),),
        )

    def derive(self, name: str, point: str, step: int) -> None:
        """Seed every generator for one call of one hook."""
        # The seed is the xxh3_64 hash of the text "run seed/name/point/step".
        seed = xxhash.xxh3_64_intdigest(b"%d/%b/%b/%d" % (self.seed, name.encode(), point.encode(), step))
        seed_everything(seed)
        for generator in self.owned:
            generator.manual_seed(seed)

    @contextmanager
    def preserved(self) -> Iterator[StreamState]:
        """Run the body, then restore every generator, also after an error."""
        state = self.save()
        try:
            yield state
        finally:
            state.restore()


def seed_everything(seed: int) -> None:
    """Seed the global generators of torch, Python and NumPy; ``seed`` is an integer in [0, 2**64)."""
    # Not torch.manual_seed, which takes 130 µs instead of 1 µs; accelerators are seeded below.
    torch.default_generator.manual_seed(seed)
    _SEED_PYTHON(_PYTHON, seed)  # as random.seed does for an integer, without its Python function
    _PYTHON.gauss_next = None
    # NumPy takes seeds of 32 bits; the lower half of a hash is as random as all of it.
    np.random.seed(seed & 0xFFFFFFFF)
    if is_present() and (devices := devices_in_use()):
        seed_generators(devices[0], seed)
