"""Measurements of the structure of the source code, printed by ``make shape``."""
