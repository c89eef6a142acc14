"""What a finished run shows: curves and pictures; only ``drawing.py``, which nothing else needs, imports matplotlib."""

from .curves import read_run
from .naming import file_stem
from .panels import Look, Picture, matcher, metric_picture
from .provenance import WANTED, provenance_picture

__all__ = [
    "WANTED",
    "Look",
    "Picture",
    "file_stem",
    "matcher",
    "metric_picture",
    "provenance_picture",
    "read_run",
]
