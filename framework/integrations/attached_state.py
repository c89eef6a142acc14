"""The state of an attached run: copies for the script's own checkpoint, from which a new run continues."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from ..checkpoints import sync_path
from ..engine import HookManager
from ..errors import UsageError
from ..state import copy_of_batch
from .reported_numbers import REPORTED

ENTRIES = {"loop", "hooks", "metrics", "errors", "left_out", "sinks", "place", "folder"}


def state_of(manager: HookManager, place: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Return copies of the states of hooks, sinks and loop between two steps, as tensors and plain values.

    ``place`` is the position of the loop, in a form of the integration; ``folder`` is the name of the run's folder.
    """
    with manager.between_steps():
        positions, files = manager.delivery.positions(), manager.delivery.files()
        content = {
            "loop": manager.state.loop.state_dict(),
            "hooks": manager.hooks.state_dict(),
            "metrics": manager.delivery.state_dict(),
            "errors": manager.hooks.failures.errors,
            "left_out": manager.hooks.failures.left_out,
            "sinks": positions,
            "place": place,
            "folder": folder,
        }
    for path in files:
        sync_path(path)
    copied: dict[str, Any] = copy_of_batch(content)
    return copied


@dataclass(frozen=True)
class StoredState:
    """A result of :func:`state_of`, for the run that continues from it."""

    content: Mapping[str, Any]

    def __post_init__(self) -> None:
        """Raise :class:`UsageError` for other content."""
        if not isinstance(self.content, Mapping) or self.content.keys() != ENTRIES:
            raise UsageError("This is not a result of scope.state_dict(), so no run can resume from it.")

    @property
    def sinks(self) -> Mapping[str, Any]:
        """The positions of the sinks in their files, by name."""
        positions: Mapping[str, Any] = self.content["sinks"]
        return positions

    @property
    def loop(self) -> Mapping[str, Any]:
        """The position and the accumulators of the loop, by name."""
        position: Mapping[str, Any] = self.content["loop"]
        return position

    def restore(self, manager: HookManager) -> None:
        """Restore loop, hooks and metrics; model and optimizer are restored by the script."""
        content = self.content
        vars(manager.state.loop).update(deepcopy(content["loop"]))
        origins = manager.origins | {REPORTED.name: REPORTED}
        manager.delivery.load_state_dict(content["metrics"], origins)
        manager.hooks.load_state_dict(content["hooks"])
        manager.hooks.failures.earlier = content["errors"], content["left_out"]
