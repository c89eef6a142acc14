"""Hooks in existing training loops: custom loops, Hugging Face's Trainer and Lightning's Trainer."""

from .attach import attach
from .scope import AttachedScope, Scope

__all__ = ["AttachedScope", "Scope", "attach"]
