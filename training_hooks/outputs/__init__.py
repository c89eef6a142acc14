"""Hooks that measure the outputs of a model: its logits, and the loss of its tokens."""

from .output_logits import OutputLogits
from .token_loss import TokenLoss

__all__ = ["OutputLogits", "TokenLoss"]
