"""The audit: a digest of every byte of the training state before and after every call, for proof."""

from torch import Tensor

from ..state import TrainingState, differing
from .guardian import Objects
from .tripwire import mutation, unreadable


class Audit:
    """Compares digests, and the identity of every object of the state; switched off it does nothing."""

    def __init__(self, state: TrainingState, *, enabled: bool) -> None:
        self._state = state
        self.enabled = enabled
        self._before: dict[str, int] = {}
        self._objects: Objects | None = None
        self._gradients: dict[Tensor, Tensor | None] = {}

    def begin(self) -> None:
        """Take the baseline."""
        if self.enabled:
            self._before = self._state.digest()
            self._gradients = {parameter: parameter.grad for parameter in self._state.model.parameters()}
            self._objects = Objects((*self._state.roots, self._gradients), lasting=False)

    def check(self, culprit: object) -> None:
        """Compare; raises :class:`StateMutationError` that names ``culprit`` and what differs."""
        if self.enabled:
            try:
                changes = differing(self._before, self._state.digest()) or self._replaced()
            except Exception as error:
                raise unreadable(culprit, error) from error
            if changes:
                raise mutation(culprit, changes)

    def _replaced(self) -> list[str]:
        """Name the objects that hold the same as before, but are others, or hold others."""
        changed = self._objects.changed() if self._objects is not None else []
        changed += [parameter for parameter, gradient in self._gradients.items() if parameter.grad is not gradient]
        names = self._state.names() if changed else {}
        return [f"{names.get(id(item), 'a container')} (replaced)" for item in changed]
