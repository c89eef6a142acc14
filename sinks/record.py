"""Plain values for the files of sinks."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from loopscope.hooks import Series

POSITION = ("epoch", "step", "hook_point")
NUMBERS = frozenset({float, int, bool})
# Number of cached layouts, one per set of names; a hook with new names at every call must not fill the memory.
LAYOUTS = 64


def plain(value: Any) -> Any:
    """Convert ``value`` to numbers, text, lists and dicts with text keys.

    Series become ``{"steps": [...], "values": [...]}``, tuples become lists, and NumPy scalars Python numbers. Any
    other object becomes its text, so that one unusual value does not lose the other metrics.

    >>> plain({1: (np.float32(0.5), {2, }), "s": Series([1], [2.0])})
    {'1': [0.5, '{2}'], 's': {'steps': [1], 'values': [2.0]}}
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return float(value)
    if isinstance(value, Series):
        return {"steps": plain(value.steps), "values": plain(value.values)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value)


def _without_series(value: Any) -> Any:
    # The encoder iterates over the lists itself; plain would copy them first.
    return {"steps": value.steps, "values": value.values} if isinstance(value, Series) else plain(value)


_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=_without_series).encode


def json_text(value: Any) -> str:
    """Return a value as JSON; values without a JSON form are converted by :func:`plain`.

    >>> json_text({"a": [0.1, float("inf")], "s": Series([1], [True])})
    '{"a":[0.1,Infinity],"s":{"steps":[1],"values":[true]}}'
    """
    try:
        return _encode(value)
    except TypeError:  # a key is not text, number, boolean or None
        return _encode(plain(value))
