"""What a session tells the user."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..hooks import RunInfo, TrainingHook
from ..loops import NoProgress, Progress
from ..training import TrainingTask


class Display:
    """The display of a session; this one shows nothing."""

    def strategy_started(self, run: RunInfo, task: TrainingTask, hooks: Sequence[TrainingHook]) -> Progress:
        """Announce a strategy and return the display of its progress."""
        return NoProgress()

    def strategy_ended(self, summary: Mapping[str, Any]) -> None:
        """Show how a strategy ended."""

    def ended(self, summaries: Sequence[Mapping[str, Any]]) -> None:
        """Compare the strategies."""
