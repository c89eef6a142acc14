"""What a finished run shows: curves and pictures; only ``drawing.py``, which nothing else needs, imports matplotlib."""

from .comparison import compare_runs, differing_parts
from .curves import read_curves
from .found import FoundRun, find_runs, look_at, read_run
from .panels import Look, Picture, hook_panels, hook_picture, matcher, metric_picture, run_labels
from .saving import save_picture

__all__ = [
    "FoundRun", "Look", "Picture", "compare_runs", "differing_parts", "find_runs", "hook_panels", "hook_picture",
    "look_at", "matcher", "metric_picture", "read_curves", "read_run", "run_labels", "save_picture",
]
