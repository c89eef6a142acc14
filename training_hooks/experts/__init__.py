"""Hooks that measure mixtures of experts."""

from .moe_router import MoeRouter

__all__ = ["MoeRouter"]
