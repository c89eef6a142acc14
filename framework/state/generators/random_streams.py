"""Derived random streams: each hook call draws from a separate stream, and the run's generators are restored.

The run's generators are those of torch (CPU and every accelerator in use), Python and NumPy, and those of the loader.
"""

import random
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from ...accelerators import devices_in_use, generator_state, is_present, seed_generators, set_generator_state
from ...errors import UsageError, notice
from ...preserved_streams import threads_of_script
from .generator_memory import find_access
from .global_generators import TWISTER, GlobalStates
from .private_generators import Generator, read_generator, seed_generator, write_generator

_NUMPY: Any = np.random  # its stubs lack set_bit_generator
_PYTHON: Any = random.random.__self__  # type: ignore[attr-defined]  # the generator of the module's functions
# The C method that random.Random.seed calls for an integer, after other checks: 4.3 instead of 5.7 µs.
_SEED_PYTHON: Any = random.Random.__base__.seed  # type: ignore[union-attr]
_ACCESS = find_access()


@dataclass(slots=True)  # not frozen, since each visit creates one, and a frozen one takes three times as long
class StreamState:
    """The states of all of the run's generators at one time, never changed."""

    global_states: GlobalStates
    accelerators: tuple[tuple[torch.device, Tensor], ...]
    owned: tuple[tuple[Generator, Any], ...]

    def restore(self) -> None:
        """Restore every generator."""
        states = self.global_states
        if _NUMPY.get_bit_generator() is not states.bit_generator:
            # This drops the Gaussian that NumPy has cached; it is restored below.
            _NUMPY.set_bit_generator(states.bit_generator)
        _ACCESS.write(states)
        for device, state in self.accelerators:
            set_generator_state(device, state)
        for generator, state in self.owned:
            write_generator(generator, state)

    def equals(self, other: "StreamState") -> bool:
        """Return whether no generator has been used between the two times."""
        pairs = [*zip(self.accelerators, other.accelerators, strict=False), *zip(self.owned, other.owned, strict=True)]
        are_equal = [torch.equal(a[1], b[1]) if isinstance(a[1], Tensor) else a[1] == b[1] for a, b in pairs]
        return self.global_states == other.global_states and all(are_equal)

    @property
    def torch_cpu(self) -> Tensor:
        """The state of torch's CPU generator, in the format of its ``get_state``."""
        return _ACCESS.torch_state(self.global_states.of_torch)


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
    states = streams.global_states
    return {
        "torch": streams.torch_cpu,
        "python": _as_tensor(states.of_python),
        "python_gaussian": states.python_gaussian,
        "numpy": _as_tensor(states.of_numpy),
        "numpy_gaussian": states.second_gaussian,
        "accelerators": [state for _, state in streams.accelerators],
        "owned": [state for _, state in streams.owned],
    }


def from_plain(stored: Mapping[str, Any], now: StreamState) -> StreamState:
    """Return the states in a result of :func:`plain`, for the generators of ``now``."""
    gaussian = stored["numpy_gaussian"]
    states = GlobalStates(
        _ACCESS.torch_content(stored["torch"]),
        _twister_bytes(stored["python"]),
        stored["python_gaussian"],
        now.global_states.bit_generator,
        _twister_bytes(stored["numpy"]),
        struct.pack("i4xd", gaussian is not None, gaussian or 0.0),
    )
    return StreamState(
        states,
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

    def __init__(self, seed: int, owned: Iterable[Generator] = ()) -> None:
        """Read all generators; raise :class:`UsageError` if NumPy's global one is not of the default kind."""
        self.seed = seed
        self.owned = (*{id(generator): generator for generator in owned}.values(),)
        self.derivations = 0
        """The number of streams that were derived up to now."""
        self._has_reported_threads = False
        self.save()

    def save(self) -> StreamState:
        """Read the state of every generator."""
        bits = _NUMPY.get_bit_generator()
        twister = bits if type(bits) is np.random.MT19937 else _twister_of(bits)
        devices = devices_in_use() if is_present() else ()
        return StreamState(
            _ACCESS.read(twister),
            (*zip(devices, map(generator_state, devices), strict=True),),
            (*zip(self.owned, map(read_generator, self.owned), strict=True),),
        )

    def derive(self, name: str, point: str, step: int) -> None:
        """Seed every generator for one call of one hook."""
        # The seed is the xxh3_64 hash of the text "run seed/name/point/step".
        seed = xxhash.xxh3_64_intdigest(b"%d/%b/%b/%d" % (self.seed, name.encode(), point.encode(), step))
        self.derivations += 1
        seed_everything(seed)
        for generator in self.owned:
            seed_generator(generator, seed)

    @contextmanager
    def preserved(self) -> Iterator[StreamState]:
        """Run the body, then restore every generator, also after an error."""
        state = self.save()
        try:
            yield state
        finally:
            if threads_of_script():
                self.report_threads(state)
            state.restore()

    def report_threads(self, earlier: StreamState | None) -> None:
        """Report, once, that a thread of the script was running while other code drew numbers since ``earlier``.

        It is unknown whether the thread has drawn numbers meanwhile.
        """
        if self._has_reported_threads or (earlier is not None and self.save().equals(earlier)):
            return
        if names := threads_of_script():
            self._has_reported_threads = True
            notice(
                f"The thread {names[0]!r} runs while hooks or evaluations draw random numbers: if it draws from the "
                "global generators of torch, NumPy or Python, it gets other numbers than without loopscope, and the "
                "weights may differ; give it separate generators, such as torch.Generator() and "
                "numpy.random.default_rng()."
            )


def seed_everything(seed: int) -> None:
    """Seed the global generators of torch, Python and NumPy; ``seed`` is an integer in [0, 2**64)."""
    # Not torch.manual_seed, which takes 130 µs instead of 1 µs; accelerators are seeded below.
    torch.default_generator.manual_seed(seed)
    _SEED_PYTHON(_PYTHON, seed)  # as random.seed does for an integer, without its Python function
    _PYTHON.gauss_next = None
    _ACCESS.seed_numpy(seed)
    if is_present() and (devices := devices_in_use()):
        seed_generators(devices[0], seed)
