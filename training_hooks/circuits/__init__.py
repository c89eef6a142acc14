"""Hooks for learned structure: Fourier frequencies, attention heads, token gradients."""

from .attention import Attention
from .attention_logits import AttentionLogits
from .fourier import Fourier
from .qk_clip import QKClip
from .token_gradient import TokenGradient

__all__ = ["Attention", "AttentionLogits", "Fourier", "QKClip", "TokenGradient"]
