"""What a finished run shows: curves, pictures, a page; matplotlib and plotly are imported only where one is made."""

from .curves import read_curves
from .found import FoundRun, find_runs, look_at, read_run
from .page import MARK, ShownRun, page_of, shown_runs
from .panels import Look, Picture, hook_panels, hook_picture, matcher, metric_picture
from .saving import save_picture

__all__ = [
    "MARK", "FoundRun", "Look", "Picture", "ShownRun", "find_runs", "hook_panels", "hook_picture", "look_at", "matcher",
    "metric_picture", "page_of", "read_curves", "read_run", "save_picture", "shown_runs",
]
