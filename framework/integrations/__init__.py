"""Hooks in existing training loops: custom loops, Hugging Face's Trainer and Lightning's Trainer."""

from .attach import attach
from .callback import Callback
from .scope import AttachedScope, Scope

__all__ = ["AttachedScope", "Callback", "Scope", "attach"]
