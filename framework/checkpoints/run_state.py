"""Everything that a run needs to go on: training state, random streams, hooks, metrics under way, counters."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..firing import HookManager
from ..isolation import Call
from .content import captured, captured_streams, put_back, put_back_streams
from .writer import Staging

KEYS = {"state", "pre_epoch", "streams", "hooks", "metrics", "samples", "errors", "left_out"}


class RunState:
    """Takes the state of a run between two steps, and puts it back into a run that was just built."""

    def __init__(self, manager: HookManager) -> None:
        self._manager = manager
        self._staging, self._pre_epoch_staging = Staging(), Staging()

    def take(self) -> Mapping[str, Any]:
        """Return a copy of everything; the next call writes over it.

        The random streams are those of the run, whatever hooks and sinks draw meanwhile. Within an epoch at whose end
        a hook will ask for the state before it, that state is part of the copy.
        """
        manager = self._manager
        step = manager.state.loop.step
        with manager.between_steps():
            pre_epoch = None
            if self._within_an_epoch() and manager.state.loop.pre_epoch is not None:
                call = Call("checkpoint", "the start of the epoch", step, "The")
                pre_epoch = manager.isolation.intervene(call, self._take_pre_epoch, mutates=True)
            call = Call("checkpoint", "the loop", step, "The")
            return manager.isolation.observe(call, partial(self._take_now, pre_epoch))

    def _within_an_epoch(self) -> bool:
        """Return whether some, but not all, of the work of an epoch is done."""
        manager, loop = self._manager, self._manager.state.loop
        return manager.counts_epochs and loop.step > loop.epoch * len(manager.task.loader)

    def _take_now(self, pre_epoch: Mapping[str, Any] | None) -> Mapping[str, Any]:
        manager = self._manager
        content = {
            "state": captured(manager.state),
            "streams": captured_streams(manager.isolation.run_streams),
            "hooks": manager.hooks.state_dict(),
            "metrics": manager.dispatch.state_dict(),
            "samples": manager.profiler.samples,
            "errors": manager.hooks.failures.errors,
            "left_out": manager.hooks.failures.left_out,
        }
        return {**self._staging.copy(content), "pre_epoch": pre_epoch}

    def _take_pre_epoch(self) -> Mapping[str, Any]:
        state = self._manager.state
        state.loop.pre_epoch.restore(state)
        staged: Mapping[str, Any] = self._pre_epoch_staging.copy(captured(state))
        return staged

    def put_back(self, content: Mapping[str, Any], where: Path) -> None:
        """Make the run what it was; raises :class:`UsageError`, naming ``where`` the content comes from."""
        manager, state = self._manager, self._manager.state
        if content.keys() != KEYS:
            raise UsageError(f"{where} does not hold a whole run.")
        if content["pre_epoch"] is not None:
            put_back(content["pre_epoch"], state, where)
            state.loop.pre_epoch = manager.pre_epoch_snapshot
            state.loop.pre_epoch.save(state)
        put_back(content["state"], state, where)
        put_back_streams(content["streams"], state, where)
        manager.hooks.load_state_dict(content["hooks"])
        manager.hooks.failures.before = content["errors"], content["left_out"]
        manager.profiler.samples.update(content["samples"])
        manager.dispatch.load_state_dict(content["metrics"], {hook.name: hook for hook in manager.hooks})
