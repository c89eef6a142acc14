"""``--validate-checkpoints``: trains again, and compares the state bit for bit with a run's checkpoints."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from ..checkpoints import Moment, Parting, RunState, content_of, differing, moments_of, open_checkpoint
from ..errors import LoopscopeError, UsageError
from ..firing import HookManager
from ..loops import epoch_loop, step_loop
from ..state import LoopState
from .records import RunRecord
from .resuming import refuse_another_run
from .run_folder import RunFolder
from .strategy_run import StrategyRun


class PartedError(LoopscopeError):
    """A run is not the one whose checkpoints it was compared with."""


@dataclass
class Validation:
    """Compares at every moment of which there is a checkpoint, and ends the run after the last one."""

    manager: HookManager
    moments: Mapping[Moment, Path]
    before: Mapping[str, Any]
    """The hooks of the first run, by name."""
    compared: list[int] = field(default_factory=list)

    def pause(self, loop: LoopState, *, unit_ended: bool) -> None:
        """Compare; raises :class:`PartedError` that names the first step and tensor, and the hooks of both runs."""
        path = self.moments.get((loop.epoch, loop.step))
        if path is None:
            return
        manager, ranks = self.manager, self.manager.task.ranks
        content = content_of(open_checkpoint(path), manager.state.model, ranks)
        names = differing(content, RunState(manager).take())
        if names := [*dict.fromkeys(chain.from_iterable(ranks.gather(names)))]:
            hooks = [
                ", ".join(sorted(run)) or "none" for run in (self.before, [hook.name for hook in self.manager.hooks])
            ]
            raise PartedError(
                f"This run parts from the one in {path.parent.parent} {Parting(loop.epoch, loop.step, names)}. Its "
                f"hooks: {hooks[1]}; those of the first run: {hooks[0]}."
            )
        self.compared.append(loop.step)
        loop.stopped = len(self.compared) == len(self.moments)


def checkpoints_to_compare(folder: RunFolder, now: RunRecord) -> tuple[Mapping[Moment, Path], Mapping[str, Any]]:
    """Return the intact checkpoints of an earlier run and its hooks.

    Raises :class:`UsageError` where there are none, or where the run that is compared with them is another one.
    """
    moments, before = moments_of(folder.checkpoints), folder.record()
    if before is None or not moments:
        raise UsageError(f"{folder.path} holds no intact checkpoints to compare with.")
    refuse_another_run(folder.path, before, now)
    return moments, before.hooks


def validate(run: StrategyRun, moments: Mapping[Moment, Path], before: Mapping[str, Any]) -> Sequence[int]:
    """Train a strategy that was just prepared and return the steps at which it is the same as the checkpoints."""
    manager = run.manager
    validation = Validation(manager, moments, before)
    loop = epoch_loop if run.run_info.loop == "epoch" else step_loop
    run.folder.make()
    manager.start_hooks(run.run_info)
    try:
        loop(run.task, manager, pauses=validation)
    finally:
        manager.end("completed")
    if len(validation.compared) < len(moments):
        raise PartedError(
            f"The run ended before it reached the checkpoints {sorted(moments)[len(validation.compared) :]}."
        )
    return validation.compared
