"""Hooks in existing training loops: custom loops, Hugging Face's Trainer and Lightning's Trainer."""

from .attach import attach
from .scope import Scope

__all__ = ["Scope", "attach"]
