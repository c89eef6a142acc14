"""Names of keys and tensors in error messages, in a few words for every content."""

from typing import Any

from torch import Tensor

from ...errors import shortened
from .objects import ATOMS

LONGEST_NAME = 40


def short_name(key: Any) -> str:
    """Return a key in one short line: of a tensor its kind and shape, of another object its class.

    >>> short_name("exp_avg"), short_name("k" * 50)
    ('exp_avg', 'kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk...')
    """
    if isinstance(key, Tensor):
        return described_tensor(key)
    if type(key) in ATOMS:
        return shortened(" ".join(str(key).split()), LONGEST_NAME)
    if isinstance(key, tuple):
        return shortened(f"({', '.join(map(short_name, key[:4]))})", LONGEST_NAME)
    return f"a {type(key).__qualname__}"


def described_tensor(tensor: Tensor) -> str:
    """Return the class, the dtype and the shape of a tensor, without its contents."""
    try:
        shape = tuple(tensor.shape)
    except RuntimeError:  # a nested tensor has no shape
        return f"{type(tensor).__name__} of {tensor.layout}"
    return f"{type(tensor).__name__} of shape {shape}, {str(tensor.dtype).removeprefix('torch.')}"
