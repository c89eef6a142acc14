"""Hooks that measure policies: in reinforcement learning, and in the post-training of language models."""

from .policy_health import PolicyHealth

__all__ = ["PolicyHealth"]
