"""Objects whose state lies in C and can be asked for: arrays, random generators, byte arrays; what such a state is."""

import random
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch


class Native(NamedTuple):
    """How the state of such an object is read, as plain values that are equal for equal states, and written."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object]


def _read_array(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    return array.dtype.str, array.shape, array.tobytes()


def _write_array(array: Any, saved: tuple[str, tuple[int, ...], bytes]) -> None:
    _, shape, content = saved
    if array.shape != tuple(shape):
        array.resize(shape, refcheck=False)
    if content:  # frombuffer refuses an empty one
        np.copyto(array, np.frombuffer(content, array.dtype).reshape(shape))


def _plainly(state: Any) -> Any:
    """Return the state of a bit generator of NumPy with lists for its arrays."""
    if isinstance(state, dict):
        return {key: _plainly(item) for key, item in state.items()}
    return state.tolist() if isinstance(state, (np.ndarray, np.generic)) else state


def _as_now(state: Any, now: Any) -> Any:
    """Return a plain state with arrays where there are some now."""
    if isinstance(now, dict):
        return {key: _as_now(item, now[key]) for key, item in state.items()}
    return np.array(state, now.dtype) if isinstance(now, np.ndarray) else state


def _set_bits(generator: Any, saved: Any) -> None:
    generator.bit_generator.state = _as_now(saved, generator.bit_generator.state)


def _read_torch(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


def _write_torch(generator: torch.Generator, saved: bytes) -> None:
    generator.set_state(torch.frombuffer(bytearray(saved), dtype=torch.uint8))


_KINDS: dict[type, Native] = {
    np.ndarray: Native(_read_array, _write_array),
    np.random.Generator: Native(lambda generator: _plainly(generator.bit_generator.state), _set_bits),
    np.random.RandomState: Native(
        lambda generator: _plainly(generator.get_state(legacy=False)),
        lambda generator, saved: generator.set_state(_as_now(saved, generator.get_state(legacy=False))),
    ),
    random.Random: Native(random.Random.getstate, random.Random.setstate),
    torch.Generator: Native(_read_torch, _write_torch),
    bytearray: Native(bytes, lambda value, saved: value.__setitem__(slice(None), saved)),
}
# the operating system's randomness has no state, and a memory map shows a file
_WITHOUT = (random.SystemRandom, np.memmap)


def kind_of(value: Any) -> Any:
    """Return the class of a value, as what mypy takes for hashable."""
    return type(value)


def native_of(value: Any) -> Native | None:
    """Return how the state of a value is read and written, ``None`` for a value that is of no such kind."""
    native = _of_kind(kind_of(value))
    if native is not None and isinstance(value, np.ndarray) and value.dtype.hasobject:
        return None
    return native


@cache
def _of_kind(kind: type) -> Native | None:
    if issubclass(kind, _WITHOUT):
        return None
    return next((native for known, native in _KINDS.items() if issubclass(kind, known)), None)


def read_native(value: Any) -> Any:
    """Return the state of a value of one of these kinds."""
    native = _of_kind(kind_of(value))
    return None if native is None else native.read(value)


def write_native(value: Any, saved: Any) -> None:
    """Make the state of a value what :func:`read_native` returned, unless it is."""
    native = _of_kind(kind_of(value))
    if native is not None and native.read(value) != saved:
        native.write(value, saved)
