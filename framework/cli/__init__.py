"""The words after ``loopscope``; importing this room brings in neither torch nor anything else that takes time."""

from .main import main, without_traceback

__all__ = ["main", "without_traceback"]
