"""Derived random streams: each hook call draws from its own, and the run's own streams never notice.

The run's generators are those of torch (CPU and every accelerator in use), Python and NumPy, and the ones a
loader owns. Reading Python's and NumPy's states the documented way takes 10 and 50 us and as many small objects, so
both Mersenne Twisters are copied as the 2500 bytes that they are. NumPy shows them (``BitGenerator.ctypes``); in
CPython they follow the object's header, which is checked against ``getstate()`` on import, with ``getstate()`` itself
as the way out. NumPy's cached second Gaussian, which no cheap interface shows, is found by drawing once: a draw that
moves no byte was the cached one.
"""

import ctypes
import random
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from ..errors import UsageError

MT19937_BYTES = 625 * 4  # 624 words of key and the position
_NUMPY: Any = np.random  # whose stubs leave out set_bit_generator
# Asked once, since torch may ask the driver each time and this is read several times a fire.
_there_is_an_accelerator = cache(torch.accelerator.is_available)


@dataclass(frozen=True, slots=True)
class NumpyState:
    """The state of NumPy's global generator: which bit generator it is, its bytes, its cached Gaussian."""

    bit_generator: Any
    key: bytes
    cached_gaussian: float | None

    def restore(self) -> None:
        """Make this the state of NumPy's global generator again."""
        _NUMPY.set_bit_generator(self.bit_generator)  # drops a cached Gaussian
        ctypes.memmove(self.bit_generator.ctypes.state_address, self.key, MT19937_BYTES)
        if self.cached_gaussian is not None:
            full: Any = np.random.get_state(legacy=False)
            np.random.set_state({**full, "has_gauss": 1, "gauss": self.cached_gaussian})


_PYTHON: Any = random.random.__self__  # type: ignore[attr-defined]  # the object behind the module's functions
# The C method that random.Random.seed comes to for an integer, after it has tried the other kinds of seed.
_SEED_PYTHON: Any = random.Random.__base__.seed  # type: ignore[union-attr]
_PYTHON_ADDRESS = id(_PYTHON) + object.__basicsize__


def _python_state_is_inline() -> bool:
    """Return whether the object behind ``random`` holds its position and its 624 words right after its header."""
    if type(_PYTHON).__basicsize__ < object.__basicsize__ + MT19937_BYTES:
        return False
    position, *words = struct.unpack("625I", ctypes.string_at(_PYTHON_ADDRESS, MT19937_BYTES))
    return bool((*words, position) == random.getstate()[1])


_INLINE = sys.implementation.name == "cpython" and _python_state_is_inline()


@dataclass(frozen=True, slots=True)
class PythonState:
    """The state of Python's global generator: position and words as bytes, and its cached Gaussian."""

    key: bytes
    cached_gaussian: float | None

    @classmethod
    def take(cls) -> "PythonState":
        """Read the state."""
        if _INLINE:
            return cls(ctypes.string_at(_PYTHON_ADDRESS, MT19937_BYTES), _PYTHON.gauss_next)
        _, (*words, position), gaussian = random.getstate()
        return cls(struct.pack("625I", position, *words), gaussian)

    def restore(self) -> None:
        """Make this the state of Python's global generator again."""
        if _INLINE:
            ctypes.memmove(_PYTHON_ADDRESS, self.key, MT19937_BYTES)
            _PYTHON.gauss_next = self.cached_gaussian
        else:
            position, *words = struct.unpack("625I", self.key)
            random.setstate((3, (*words, position), self.cached_gaussian))


def _take_numpy_state() -> NumpyState:
    """Read the state of NumPy's global generator, leaving it one draw further."""
    bits: Any = _NUMPY.get_bit_generator()
    if not isinstance(bits, np.random.MT19937):
        raise UsageError(
            f"NumPy's global generator is a {type(bits).__name__}, but loopscope can isolate only the default MT19937; "
            "leave out np.random.set_bit_generator."
        )
    address = bits.ctypes.state_address
    key = ctypes.string_at(address, MT19937_BYTES)
    # The polar method draws two Gaussians at a time and keeps the second for the next call.
    drawn = float(np.random.standard_normal())
    was_cached = ctypes.string_at(address, MT19937_BYTES) == key
    return NumpyState(bits, key, drawn if was_cached else None)


def accelerator_devices() -> list[torch.device]:
    """List the accelerator devices whose generators exist in this process."""
    if not _there_is_an_accelerator():
        return []
    kind = torch.accelerator.current_accelerator()
    module = torch.get_device_module(kind)
    # A device that nobody has used has no generator; asking for one would start a context of hundreds of MiB on it.
    if kind is None or not module.is_initialized():
        return []
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]


@dataclass(frozen=True, slots=True)
class StreamState:
    """The states of all of the run's generators at one moment."""

    torch_cpu: Tensor
    python: PythonState
    numpy: NumpyState
    accelerators: tuple[tuple[torch.device, Tensor], ...]
    owned: tuple[tuple[torch.Generator, Tensor], ...]

    def restore(self) -> None:
        """Put every generator back."""
        torch.default_generator.set_state(self.torch_cpu)
        self.python.restore()
        self.numpy.restore()
        for device, state in self.accelerators:
            torch.get_device_module(device).set_rng_state(state, device)
        for generator, state in self.owned:
            generator.set_state(state)


def plain(streams: StreamState) -> dict[str, Any]:
    """Return the states of the generators as tensors and plain values, which checkpoints can hold."""
    return {
        "torch": streams.torch_cpu,
        "python": _as_tensor(streams.python.key),
        "python_gaussian": streams.python.cached_gaussian,
        "numpy": _as_tensor(streams.numpy.key),
        "numpy_gaussian": streams.numpy.cached_gaussian,
        "accelerators": [state for _, state in streams.accelerators],
        "owned": [state for _, state in streams.owned],
    }


def from_plain(stored: Mapping[str, Any], now: StreamState) -> StreamState:
    """Return the states that :func:`plain` gave, for the generators of ``now``."""
    return StreamState(
        stored["torch"],
        PythonState(_as_bytes(stored["python"]), stored["python_gaussian"]),
        NumpyState(now.numpy.bit_generator, _as_bytes(stored["numpy"]), stored["numpy_gaussian"]),
        tuple((device, saved) for (device, _), saved in zip(now.accelerators, stored["accelerators"], strict=False)),
        tuple((generator, saved) for (generator, _), saved in zip(now.owned, stored["owned"], strict=True)),
    )


def _as_tensor(key: bytes) -> Tensor:
    return torch.frombuffer(bytearray(key), dtype=torch.uint8)


def _as_bytes(tensor: Tensor) -> bytes:
    """Return the state of a Mersenne Twister; raises ``ValueError`` for another size, since it is copied raw."""
    key = tensor.numpy().tobytes()
    if len(key) != MT19937_BYTES:
        raise ValueError(f"a random generator's state has {len(key)} bytes instead of {MT19937_BYTES}")
    return key


class RandomStreams:
    """The run's generators, and the streams derived from its seed.

    A derived stream depends on the run seed and on (name, point, step) alone, so that adding or removing a hook
    changes no number of any other hook.
    """

    def __init__(self, seed: int, owned: Iterable[torch.Generator] = ()) -> None:
        """Raise :class:`UsageError` if NumPy's global generator is of a kind that cannot be isolated."""
        self.seed = seed
        self.owned = tuple(owned)
        self.save()

    def save(self) -> StreamState:
        """Read the state of every generator and leave all of them as they are."""
        state = self.take()
        state.numpy.restore()
        return state

    def take(self) -> StreamState:
        """Read the state of every generator, for a caller who reseeds them next and restores them in the end."""
        devices = accelerator_devices()
        return StreamState(
            torch.default_generator.get_state(),
            PythonState.take(),
            _take_numpy_state(),
            tuple([(device, torch.get_device_module(device).get_rng_state(device)) for device in devices]),
            tuple([(generator, generator.get_state()) for generator in self.owned]),
        )

    def derive(self, name: str, point: str, step: int) -> None:
        """Seed every generator for one call of one hook."""
        seed = xxhash.xxh3_64_intdigest(b"%d/%b/%b/%d" % (self.seed, name.encode(), point.encode(), step))
        seed_everything(seed)
        for generator in self.owned:
            generator.manual_seed(seed)

    @contextmanager
    def isolated(self) -> Iterator[StreamState]:
        """Run the body, then put every generator back, whatever happened."""
        state = self.save()
        try:
            yield state
        finally:
            state.restore()


def seed_everything(seed: int) -> None:
    """Seed the global generators of torch, Python and NumPy; ``seed`` is an integer in [0, 2**64)."""
    torch.default_generator.manual_seed(seed)
    _SEED_PYTHON(_PYTHON, seed)  # random.seed of an integer, but for the detour through Python
    _PYTHON.gauss_next = None
    # NumPy takes seeds of 32 bits; the lower half of a hash is as good as the whole.
    np.random.seed(seed & 0xFFFFFFFF)
    if devices := accelerator_devices():
        torch.get_device_module(devices[0]).manual_seed_all(seed)
