"""Everything that a run needs to go on: training state, random streams, hooks, metrics under way, counters."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..firing import HookManager
from ..isolation import Call
from .content import captured, put_back, refusals
from .writer import Staging

KEYS = {"state", "pre_epoch", "hooks", "metrics", "samples", "errors", "left_out"}


class RunState:
    """Takes the state of a run between two steps, and puts it back into a run that was just built."""

    def __init__(self, manager: HookManager) -> None:
        self._manager = manager
        self._staging, self._pre_epoch_staging = Staging(), Staging()

    def refusals(self) -> list[str]:
        """Say in a sentence each what of the present state no checkpoint can hold."""
        with self._manager.between_steps():
            return refusals(self._content())

    def refusals_of_the_last(self) -> list[str]:
        """Say in a sentence each what :meth:`take` could not copy and no checkpoint can hold."""
        return self.refusals() if self._staging.foreign or self._pre_epoch_staging.foreign else []

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
        return {**self._staging.copy(self._content()), "pre_epoch": pre_epoch}

    def _content(self) -> dict[str, Any]:
        """Return everything, by reference, but the state before the epoch."""
        manager = self._manager
        return {
            "state": captured(manager.state, manager.isolation.run_streams),
            "hooks": manager.hooks.state_dict(),
            "metrics": manager.dispatch.state_dict(),
            "samples": manager.profiler.samples,
            "errors": manager.hooks.failures.errors,
            "left_out": manager.hooks.failures.left_out,
        }

    def _take_pre_epoch(self) -> Mapping[str, Any]:
        state = self._manager.state
        state.loop.pre_epoch.restore(state)
        staged: Mapping[str, Any] = self._pre_epoch_staging.copy(captured(state, self._manager.isolation.run_streams))
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
        manager.hooks.load_state_dict(content["hooks"])
        manager.hooks.failures.before = content["errors"], content["left_out"]
        manager.profiler.samples.update(content["samples"])
        manager.dispatch.load_state_dict(content["metrics"], {hook.name: hook for hook in manager.hooks})
