"""What the weights have learnt: frequencies, heads, token directions."""

from .attention import Attention
from .fourier import Fourier
from .token_gradient import TokenGradient

__all__ = ["Attention", "Fourier", "TokenGradient"]
