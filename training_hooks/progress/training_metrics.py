"""The basic metrics of every record: loss, accuracies, learning rate and other results of the evaluation."""

import math
from types import MappingProxyType
from typing import Any

import numpy as np
from loopscope import HookPoint, HookRegistry, RunDataContext, TrainingHook
from loopscope.hooks import STEP_POINTS, Metrics
from torch import Tensor


def drop_missing(**values: Any) -> dict[str, Any]:
    """Return the values that are not ``None``, so that a run without a validation set reports no empty ``val_acc``.

    >>> drop_missing(loss=0.5, val_acc=None)
    {'loss': 0.5}
    """
    return {name: value for name, value in values.items() if value is not None}


def _known(rate: float | Tensor | None) -> float | Tensor | None:
    """Return a learning rate, ``None`` instead of the NaN of a parameter group without one."""
    return None if isinstance(rate, float) and math.isnan(rate) else rate


@HookRegistry.register
class TrainingMetrics(TrainingHook):
    """Report loss, train and validation accuracy, learning rate; active whenever any hook or record is.

    In the epoch loop the hook reports everything at POST_EPOCH. In the step loop it reports loss and learning rate at
    POST_STEP. Every evaluation is reported at the step after which it was measured, also between these points.

    Assumes that the experiment's evaluation calls its accuracies ``train_acc`` and ``val_acc``.
    """

    name = "training_metrics"
    always = True
    has_fixed_schedule = True
    loop_values = MappingProxyType({"loss": "loss", "lr": "step_lr"})
    reports_evaluations = True
    loop_points = {"epoch": {HookPoint.POST_EPOCH}, "step": {HookPoint.POST_STEP, HookPoint.SNAPSHOT}}
    metrics = """
        loss | loss of the step (POST_STEP), mean of the steps' losses over the epoch (POST_EPOCH)
            | [0, ∞) for cross-entropy
            | Measured on the training batches in train mode, each before its update. NaN or ∞: training diverged.
        train_acc | `train_acc` of the experiment's evaluation | [0, 1]
            | Accuracy in eval mode; reported only after an evaluation.
        val_acc | `val_acc` of the experiment's evaluation | [0, 1]
            | Accuracy on held-out data. Far below train_acc: memorised, not (yet) generalised.
        lr | learning rate of the first parameter group in the newest step that was made | [0, ∞)
            | The learning rate of that step, not the one that the scheduler has set for the next step. Missing if the
            group has no numeric learning rate.
        evaluation | the other numbers of the experiment's evaluation, by name | set by the experiment
            | For example `val_loss`; reported only after an evaluation.
    """

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return the metrics that are available at this hook point."""
        step = drop_missing(loss=ctx.loss, lr=_known(ctx.step_lr))
        if ctx.hook_point in STEP_POINTS:
            return step
        others = {
            name: value.item() if isinstance(value, np.generic) else value
            for name, value in ctx.evaluation.items()
            if name not in ("train_acc", "val_acc") and isinstance(value, (int, float, np.generic, Tensor))
        }
        evaluation = drop_missing(train_acc=ctx.train_acc, val_acc=ctx.val_acc, evaluation=others or None)
        return evaluation if ctx.hook_point is HookPoint.SNAPSHOT else step | evaluation
