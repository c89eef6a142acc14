"""Runs that were trained to their end, but whose record lacks rows."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..console import lost_rows_text
from ..errors import LoopscopeError
from ..runs import INCOMPLETE


def require_all_rows(summaries: Sequence[Mapping[str, Any]]) -> None:
    """Raise :class:`LoopscopeError`, after which the command ends with status 1, if sinks have lost rows."""
    incomplete = [summary for summary in summaries if summary["status"] == INCOMPLETE]
    texts = [f"{run['strategy']}: the training is complete, but {lost_rows_text(run)}." for run in incomplete]
    if texts:
        raise LoopscopeError(" ".join(texts))
