"""Hooks that explain a step: sizes of its quantities, branches, passes in wider precision."""
