"""What a finished run shows: curves and pictures."""

from .curves import RecordedRun, read_run
from .drawing import figure_of, save
from .naming import file_stem
from .panels import Look, Picture, matcher, metric_picture
from .provenance import WANTED, provenance_picture

__all__ = [
    "WANTED",
    "Look",
    "Picture",
    "RecordedRun",
    "figure_of",
    "file_stem",
    "matcher",
    "metric_picture",
    "provenance_picture",
    "read_run",
    "save",
]
