"""The command line; importing this package imports neither torch nor other slow packages."""

from .main import STDERR, STDOUT, lost_output, main, outlast_readers, without_traceback

__all__ = ["STDERR", "STDOUT", "lost_output", "main", "outlast_readers", "without_traceback"]
