"""What a finished run shows: curves and pictures; only ``drawing.py``, which nothing else needs, imports matplotlib."""

from .curves import read_curves
from .panels import Look, Picture, hook_panels, hook_picture, matcher, metric_picture
from .saving import save_picture

__all__ = [
    "Look", "Picture", "hook_panels", "hook_picture", "matcher", "metric_picture", "read_curves", "save_picture",
]
