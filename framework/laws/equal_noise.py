"""Random numbers that are equal in all rows, with which a batch of other rows, or in another order, is compared."""

from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..state import RandomStreams

SEED = 20250607
NORMAL = {"randn", "randn_like", "normal", "normal_"}
UNIFORM = {"rand", "rand_like", "uniform_"}
EXPONENTIAL = {"exponential_"}
INTEGERS = {"randint", "randint_like"}
SMALLEST = 1e-30
DEFAULTS = (0.0, 1.0)
"""The parameters of a standard distribution."""
DRAWS = NORMAL | UNIFORM | EXPONENTIAL | INTEGERS


class EqualNoise(TorchFunctionMode):
    """Gives every row the random numbers of the first row, which do not depend on the number of rows.

    Functions that draw from a distribution of each row, such as ``torch.bernoulli``, and permutations are left as they
    are: the random streams show that they have drawn.

    Args:
        streams: the random streams, which the replaced draws leave as they were.
        dimension: the dimension that is the batch.
    """

    def __init__(self, streams: RandomStreams, dimension: int = 0) -> None:
        super().__init__()
        self._streams, self._dimension = streams, dimension
        self._generator = torch.Generator()

    def __enter__(self) -> Self:
        """Start the same numbers again."""
        self._generator.manual_seed(SEED)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, and replace what it has drawn."""
        name, options = getattr(func, "__name__", ""), kwargs or {}
        if name not in DRAWS:
            return func(*args, **options)
        start = self._streams.save()
        result = func(*args, **options)
        if isinstance(result, Tensor) and result.ndim > self._dimension:
            start.restore()
            with torch.no_grad():
                result.copy_(self._row(name, result, args, options).expand(result.shape))
        return result

    def _row(self, name: str, result: Tensor, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """Return numbers with one row, of the distribution of a call."""
        shape = [1 if place == self._dimension else size for place, size in enumerate(result.shape)]
        numbers: Callable[..., Any] = torch.randn if name in NORMAL else torch.rand
        drawn: Tensor = numbers(shape, generator=self._generator).to(result.device)
        given = args[1:] if name.endswith(("_", "_like")) else args
        if name in INTEGERS:
            limits = [*takewhile(_is_integer, given), *(options[key] for key in ("low", "high") if key in options)]
            low, high = limits if len(limits) > 1 else (0, limits[0])
            return (low + drawn * (high - low)).floor().clamp(low, high - 1)
        if name in EXPONENTIAL:
            rate, *_ = (*given, options.get("lambd", 1.0))
            return -drawn.clamp_min(SMALLEST).log() / rate
        if name in ("normal", "normal_", "uniform_"):
            keys = ("from", "to") if name == "uniform_" else ("mean", "std")
            first, second = (*given, *(options[key] for key in keys if key in options), *DEFAULTS[len(given) :])[:2]
            return first + drawn * (second - first if name == "uniform_" else second)
        return drawn


def _is_integer(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)
