"""The interface of observers of a run's evaluations."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

from ..hooks import Alert


class EvaluationListener(Protocol):
    """An observer of evaluations, which must not change what the model computes."""

    def watched(self) -> AbstractContextManager[object]:
        """Return a context manager for one evaluation, which is entered with the model in eval mode."""

    def alerts(self, step: int) -> Iterable[Alert]:
        """Return alerts about the evaluation that has just ended, after ``step``."""
