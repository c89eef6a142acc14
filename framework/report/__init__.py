"""What a finished run shows: curves and pictures; only ``drawing.py``, which nothing else needs, imports matplotlib."""

from .curves import Curve, RecordedRun, read_curves
from .folders import FoundRun, find_runs, look_at
from .frames import RecordedFrames, no_metric, read_run
from .panels import Look, Picture, hook_panels, hook_picture, matcher, metric_picture
from .saving import save_picture

__all__ = [
    "Curve", "FoundRun", "Look", "Picture", "RecordedFrames", "RecordedRun", "find_runs", "hook_panels", "hook_picture",
    "look_at", "matcher", "metric_picture", "no_metric", "read_curves", "read_run", "save_picture",
]
