"""The audit: a digest of every byte of the training state before and after every call, for proof."""

from framework.training_state import TrainingState, differing
from framework.tripwire import mutation


class Audit:
    """Compares digests; switched off it does nothing."""

    def __init__(self, state: TrainingState, *, enabled: bool) -> None:
        self._state = state
        self.enabled = enabled
        self._before: dict[str, int] = {}

    def begin(self) -> None:
        """Digest the state as the baseline."""
        if self.enabled:
            self._before = self._state.digest()

    def check(self, culprit: object) -> None:
        """Digest again; raises :class:`StateMutationError` that names ``culprit`` and the entries that differ."""
        if self.enabled:
            changes = differing(self._before, self._state.digest())
            if changes:
                raise mutation(culprit, changes)
