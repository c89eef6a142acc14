"""A program that calls the command with the small experiment and a hook that makes single runs fail."""

import os
import signal
import sys
import time
from typing import Any

from loopscope.__main__ import main
from loopscope.hooks import ExperimentRegistry, HookPoint, HookRegistry, TrainingHook

from tests.framework.runs.small_experiment import Small


class Trouble(TrainingHook):
    """Waits, prints, raises in one of several runs, and kills the process of another.

    Args:
        seconds: waiting time per epoch.
        raises: seed of the run in which the hook raises.
        kills: seed of the run whose process the hook kills.
    """

    name = "trouble"
    hook_points = {HookPoint.POST_EPOCH}

    def __init__(self, *, seconds: float = 0.0, raises: int = -1, kills: int = -1) -> None:
        self.seconds, self.raises, self.kills = seconds, raises, kills

    def start(self, run: Any) -> None:
        self.seed = run.seed

    def compute(self, ctx: Any) -> dict[str, Any]:
        time.sleep(self.seconds)
        if ctx.epoch == 0:
            sys.stdout.write(f"printed by {self.seed}\n")
            sys.stdout.flush()
        if ctx.epoch == 1 and self.seed == self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        if ctx.epoch == 1 and self.seed == self.raises:
            raise ValueError("as configured")
        return {}

    def describe_metrics(self) -> list[Any]:
        return []


if __name__ == "__main__":
    ExperimentRegistry.register(Small)
    HookRegistry.register(Trouble)
    sys.exit(main())
