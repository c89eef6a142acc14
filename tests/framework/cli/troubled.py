"""A program that calls the command: the experiment small, and a hook that brings one of several runs into trouble."""

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
        seconds: how long it waits in each epoch.
        raises: the seed of the run in which it raises.
        kills: the seed of the run whose process it kills.
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
            raise ValueError("as told")
        return {}

    def describe_metrics(self) -> list[Any]:
        return []


if __name__ == "__main__":
    ExperimentRegistry.register(Small)
    HookRegistry.register(Trouble)
    sys.exit(main())
