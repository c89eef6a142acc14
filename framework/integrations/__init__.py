"""Hooks in the loops that people already have: their own, Hugging Face's Trainer, Lightning's."""

from .attach import attach
from .scope import Scope

__all__ = ["Scope", "attach"]
