"""Tests of findings in branches from the present state of an attached loop."""

from collections.abc import Mapping
from typing import Any

from ..data import rows_if_any
from ..doctor import Diagnosis
from ..errors import require
from ..hooks import HookRegistry, InterventionHook
from ..laboratory.questions import HOOK, TrialPlan, diagnosis_with_tests
from .attached_loop import AttachedLoop

FEWEST_ROWS = 8
"""Rows of the last batch from which its halves can stand for the batches of a loop whose data are unknown."""


def check_testable(attached: AttachedLoop) -> None:
    """Raise :class:`UsageError` if branches of the loop cannot be trained, or not at this moment."""
    call, lacks = "scope.diagnose(test=True)", attached.lacks
    require(attached.is_started, f"{call} was called before the first step; call it after one.")
    require(not attached.is_closed, f"This scope is closed; call {call} while the loop trains.")
    require(not attached.is_in_step(), f"{call} was called within a step; call it after optimizer.step().")
    require("needs_loss" not in lacks, f"{call} trains branches: {lacks.get('needs_loss')}.")
    has_one_process = not attached.manager.task.ranks.are_many
    require(has_one_process, f"{call} needs a training in one process; call scope.diagnose() without test=True.")
    if "needs_loader" in lacks:
        is_kept = (rows_if_any(attached.manager.state.loop.batch) or 0) >= FEWEST_ROWS
        require(is_kept, f"{call} needs batches, and no last one with {FEWEST_ROWS} rows: {lacks['needs_loader']}.")


def with_tests(attached: AttachedLoop, diagnosis: Diagnosis, branches: int, steps: int) -> Diagnosis:
    """Return the diagnosis with tests of its findings; the training state is restored bit for bit.

    Raises:
        UsageError: for a number of branches or steps that the hook does not accept.
    """
    history = attached.run.diagnosis.history

    def measure(plan: TrialPlan) -> Mapping[str, Any]:
        hook = HookRegistry.get(HOOK)(**plan.options(history, branches, steps))
        assert isinstance(hook, InterventionHook)
        with attached.hook_calls:
            return attached.manager.call_between_steps(hook)

    return diagnosis_with_tests(diagnosis, measure, from_present=True, left_out=[*attached.treatments])
