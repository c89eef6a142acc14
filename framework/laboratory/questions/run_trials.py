"""Tests of the findings about a recorded run: branches from the state before each finding's step."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...checkpoints import checkpoints_by_moment
from ...doctor import Diagnosis, History
from ...errors import LoopscopeError
from ...hooks import HookRegistry
from ...runs import DivergedError, RunFolder, StepRange
from .repeated_steps import TrainAgain, measure
from .trial_plan import HOOK, TrialPlan, diagnosis_with_tests

MOST_REPEATED = 500
"""Steps that are trained again from the start of a run if no checkpoint precedes the branches."""


def try_changes(
    train_again: TrainAgain,
    folder: Path,
    diagnosis: Diagnosis,
    history: History,
    *,
    branches: int,
    steps: int,
    left_out: Sequence[str] = (),
) -> Diagnosis:
    """Return the diagnosis of a run with tests of its findings, in the order of their new confidences.

    Args:
        train_again: trains a stretch of the run again.
        folder: the run's folder; the measurements are in its subfolder ``rewinds/hypotheses_step_N``.
        diagnosis: the findings.
        history: what the run has recorded.
        branches: number of unchanged branches, and of branches with each change.
        steps: number of steps of a branch.
        left_out: names of the run's committing hooks, which are disabled in the branches.

    Raises:
        UsageError: for a number of branches or steps that the hook does not accept.
    """

    def measure_plan(plan: TrialPlan) -> Mapping[str, Any] | str:
        options = plan.options(history, branches, steps)
        HookRegistry.get(HOOK)(**options)  # raises an error for wrong numbers before the run is trained again
        moments = checkpoints_by_moment(RunFolder(folder, folder.name).checkpoints)
        if plan.step - 1 > MOST_REPEATED and not any(saved < plan.step for _, saved in moments):
            return (
                f"the run has no checkpoint before step {plan.step:,}, and is too far from its start; train it with "
                "--save-checkpoints"
            )
        stretch = StepRange(plan.step, plan.step, label=f"hypotheses_step_{plan.step}")
        try:
            measured = measure(train_again, stretch, HOOK, options)
        except DivergedError as error:
            return f"the same program does not reproduce the run. {str(error).rstrip('.')}"
        except LoopscopeError as error:
            return f"the run cannot be repeated from there. {str(error).rstrip('.')}"
        return measured or f"the hook {HOOK!r} recorded nothing at step {plan.step:,}"

    return diagnosis_with_tests(diagnosis, measure_plan, from_present=False, left_out=left_out)
