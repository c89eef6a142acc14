"""A run with a hook in one go, and the same run in two parts, the second from a checkpoint of the first."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopscope.checkpoints import load_checkpoint, save_checkpoint
from loopscope.engine import HookManager
from loopscope.hooks import TrainingHook
from loopscope.loops import epoch_loop, step_loop
from loopscope.state import without_on_demand

from tests.support import STEPS_PER_EPOCH, Case, RecordingSink, Saving, build, run_info

EPOCHS = 4


@dataclass
class Half:
    """What came out of a run: the rows of its hook, and the digest at its end."""

    rows: list[tuple[str, Any, int, Any]]
    final: dict[str, int]

    def after(self, step: int) -> list[tuple[str, Any, int, Any]]:
        return [row for row in self.rows if row[2] > step]


def in_one_and_two(case: Case, make: Callable[[], TrainingHook], folder: Path) -> tuple[Half, Half, int]:
    """Return the run in one go, its second part from a checkpoint, and the step in between."""
    middle = EPOCHS // 2 * STEPS_PER_EPOCH
    path = folder / "middle.pt"
    return _run(case, make(), path, write=True), _run(case, make(), path, write=False), middle


def _run(case: Case, hook: TrainingHook, path: Path, *, write: bool) -> Half:
    task, state = build(case, length=EPOCHS * (STEPS_PER_EPOCH if case.loop == "step" else 1))
    every = EPOCHS // 2 * (STEPS_PER_EPOCH if case.loop == "step" else 1) if write else 0
    sink = RecordingSink()
    manager = HookManager([hook], task, state, loop=case.loop, sinks=[sink], audit=True)
    if not write:
        manager.hooks.load_state_dict(load_checkpoint(path, state))
    manager.start(run_info(task, manager, case.loop))

    def checkpoint() -> None:
        if not path.exists():
            save_checkpoint(path, state, manager.hooks.state_dict(), manager.isolation.run_streams)

    loop = epoch_loop if case.loop == "epoch" else step_loop
    loop(task, manager, pauses=Saving(manager, every, checkpoint))
    manager.end("completed")
    return Half(sink.rows(), without_on_demand(state.digest()))
