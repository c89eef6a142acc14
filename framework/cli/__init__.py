"""The words after ``loopscope``."""

from .main import main, without_traceback

__all__ = ["main", "without_traceback"]
