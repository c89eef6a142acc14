"""What a session tells the user."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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


@dataclass
class OfSeed(Display):
    """Passes on what one seed's runs tell, under names that tell them from those of other seeds."""

    display: Display
    seed: str

    def strategy_started(self, run: RunInfo, task: TrainingTask, hooks: Sequence[TrainingHook]) -> Progress:
        """Announce a strategy by its name and seed."""
        return self.display.strategy_started(replace(run, strategy=f"{run.strategy} {self.seed}"), task, hooks)

    def strategy_ended(self, summary: Mapping[str, Any]) -> None:
        """Show how a strategy ended with this seed."""
        self.display.strategy_ended({**summary, "strategy": f"{summary['strategy']} {self.seed}"})
