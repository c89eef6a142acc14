"""What a finished run shows: curves and pictures; only ``drawing.py``, which nothing else needs, imports matplotlib."""

from .curves import read_curves
from .found import FoundRun, find_runs, look_at, read_run
from .panels import Look, Picture, hook_panels, hook_picture, matcher, metric_picture
from .saving import save_picture

__all__ = [
    "FoundRun", "Look", "Picture", "find_runs", "hook_panels", "hook_picture", "look_at", "matcher", "metric_picture",
    "read_curves", "read_run", "save_picture",
]
