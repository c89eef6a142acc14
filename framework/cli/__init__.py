"""The words after ``loopscope``; importing this room brings in neither torch nor anything else that takes time."""

from .main import STDERR, STDOUT, lost_output, main, outlast_readers, without_traceback

__all__ = ["STDERR", "STDOUT", "lost_output", "main", "outlast_readers", "without_traceback"]
