"""Folders of many runs: the index of what was computed from their files, and the values that it keeps."""

from typing import TYPE_CHECKING

from ..names_on_demand import names_on_demand

if TYPE_CHECKING:
    from .run_index import NAME
    from .run_paths import find_runs
    from .run_values import IndexedRun, IndexedRuns, indexed_runs
else:
    __getattr__ = names_on_demand(__name__)

__all__ = ["NAME", "IndexedRun", "IndexedRuns", "find_runs", "indexed_runs"]
