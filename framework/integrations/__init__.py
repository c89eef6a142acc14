"""Hooks in the loops that people already have: their own, Hugging Face's Trainer, Lightning's."""

from .attach import attach
from .scope import AttachedScope, Scope

__all__ = ["AttachedScope", "Scope", "attach"]
