"""Tests of findings in branches from the present state of an attached loop."""

from ..data import rows
from ..doctor import HOOK, Diagnosis, diagnosis_with_tests, trial_plans
from ..errors import LoopscopeError, require
from ..hooks import HookRegistry
from .attached_loop import AttachedLoop

FEWEST_ROWS = 8


def check_testable(attached: AttachedLoop) -> None:
    """Raise :class:`UsageError` if branches of the loop cannot be trained, or not at this moment."""
    lacks, loop = attached.lacks, attached.manager.state.loop if attached.is_built else None
    require(attached.is_started, "scope.diagnose(test=True) was called before the first step; call it after one.")
    require(not attached.is_closed, "This scope is closed; call scope.diagnose(test=True) while the loop trains.")
    require(not attached.is_in_step(), "scope.diagnose(test=True) was called within a step; call it after the update.")
    require("needs_loss" not in lacks, f"scope.diagnose(test=True) trains branches: {lacks.get('needs_loss')}.")
    many = attached.manager.task.ranks.are_many
    require(not many, "scope.diagnose(test=True) needs a training in one process.")
    if "needs_loader" in lacks and loop is not None:
        is_kept = loop.batch is not None and _row_count(loop.batch) >= FEWEST_ROWS
        sentence = (
            f"scope.diagnose(test=True) needs batches, and the last one has too few rows: {lacks['needs_loader']}."
        )
        require(is_kept, sentence)


def _row_count(batch: object) -> int:
    try:
        return rows(batch)
    except LoopscopeError:  # a batch without rows
        return 0


def with_tests(attached: AttachedLoop, diagnosis: Diagnosis, branches: int, steps: int) -> Diagnosis:
    """Return the diagnosis with tests of its findings; the training state is restored bit for bit."""
    plans, untested = trial_plans(diagnosis, from_present=True)
    history, results = attached.run.diagnosis.history, []
    for plan in plans:
        hook = HookRegistry.get(HOOK)(**plan.options(history, branches, steps))
        with attached.hook_calls:
            results.append((plan, attached.manager.call_between_steps(hook)))
    return diagnosis_with_tests(diagnosis, results, untested)
