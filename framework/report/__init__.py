"""Curves, plots and pages of recorded runs; matplotlib and plotly are imported only when needed."""

from typing import TYPE_CHECKING

from ..names_on_demand import names_on_demand

if TYPE_CHECKING:
    from .comparison import compare_runs, differing_parts, evaluations
    from .curves import EVALUATED_BY, MetricCurve, read_curves
    from .folder_curves import BinnedCurve
    from .folder_page import MOST_RUNS, FolderRuns, page_of_folder
    from .record_scan import MetricSummary, Scan, first_difference, scan
    from .run_index import FoundRun, inspect_run, read_run
    from .page import MARK, explained, page_of
    from .panels import elided, Look, Picture, hook_panels, hook_picture, matcher, metric_picture, run_labels
    from .plotting import picture_of, plot, read_runs, save_picture, seeds_picture
    from .relevance import LOSSES, direction_of, ordered
    from .run_reader import ShownRun, read_shown
else:
    __getattr__ = names_on_demand(__name__)

__all__ = [
    "EVALUATED_BY", "LOSSES", "MARK", "MOST_RUNS", "BinnedCurve", "FolderRuns", "FoundRun", "Look", "MetricCurve",
    "MetricSummary", "Picture", "Scan", "ShownRun", "compare_runs", "differing_parts", "direction_of", "elided",
    "evaluations", "explained", "first_difference", "hook_panels", "hook_picture", "inspect_run", "matcher",
    "metric_picture", "ordered", "page_of", "page_of_folder", "picture_of", "plot", "read_curves", "read_run",
    "read_runs", "read_shown", "run_labels", "save_picture", "scan", "seeds_picture",
]
