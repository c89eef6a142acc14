"""Digests by separate plain code, so that a change of loopscope's digests cannot hide a change of bytes."""

import json
import random
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

LENGTH = 12
"""Hexadecimal digits of a stored digest; 48 bits detect changes, but do not withstand an attack."""


def described(value: Any) -> Iterable[bytes]:
    """Yield bytes that determine a value: tensors by dtype, shape and bytes, containers by items sorted by key."""
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        yield f"tensor {plain.dtype} {tuple(plain.shape)} ".encode()
        yield plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray):
        yield f"array {value.dtype} {value.shape} ".encode()
        yield value.tobytes()
    elif isinstance(value, Mapping):
        yield f"mapping {len(value)} ".encode()
        for key in sorted(value, key=repr):
            yield f"{key!r}: ".encode()
            yield from described(value[key])
    elif isinstance(value, (list, tuple)):
        yield f"sequence {len(value)} ".encode()
        for item in value:
            yield from described(item)
    elif isinstance(value, (str, bytes, int, float, bool, type(None))):
        yield f"{type(value).__name__} {value!r} ".encode()
    else:
        raise TypeError(f"The oracle cannot digest a {type(value).__name__}; describe it in tests/oracle/digests.py.")


def digest(value: Any) -> str:
    """Return the digest of plain values and tensors in containers.

    >>> digest({"a": 1, "b": [2.0]}) == digest({"b": [2.0], "a": 1}) != digest({"a": 1, "b": [2]})
    True
    """
    summary = sha256()
    for part in described(value):
        summary.update(part)
    return summary.hexdigest()[:LENGTH]


def digest_of_values(pairs: Iterable[tuple[int, Any]]) -> str:
    """Return the digest of (step, value) pairs; the JSON format of floats preserves their bits."""
    return digest(json.dumps(list(pairs), sort_keys=True))


def digest_of_generators(*others: torch.Generator) -> str:
    """Return the digest of the generators of torch, Python and NumPy, and of others."""
    states = [torch.get_rng_state(), *(generator.get_state() for generator in others)]
    return digest([states, random.getstate(), list(np.random.get_state())])
