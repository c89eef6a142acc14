"""Taps on quantisers: what they count reaches a hook without any of its code running inside the pass."""

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import nn
from torch.utils.hooks import RemovableHandle

from .casts import Counts, QuantizationListener


@runtime_checkable
class Quantized(Protocol):
    """A module that quantises, outside of compiled graphs, and says what was lost to those who listen."""

    def register_quantization_hook(self, listener: QuantizationListener) -> RemovableHandle:
        """Have a listener told of every quantisation while it is heard."""
        ...


@dataclass(frozen=True)
class QuantizationTap:
    """Counts of what the quantisers of one module lose, in the run's own passes and no others.

    Args:
        target: the name of the module in the model; a :class:`Quantized` one.
        counts: filled by role; the hook reads it and clears it.
    """

    target: str
    counts: MutableMapping[str, Counts]


def quantized_modules(model: nn.Module) -> list[str]:
    """Return the names of the modules that quantise, in the order of the model, each once."""
    return [name for name, module in model.named_modules() if isinstance(module, Quantized)]
