"""The metrics about the size of updates: no two hooks report the same number under different names."""

import math
from itertools import combinations

import pytest
from loopscope.training_hooks.checks import TrainingChecks
from loopscope.training_hooks.curvature import Hessian
from loopscope.training_hooks.progress import TrainingDiagnostics
from loopscope.training_hooks.updates import (
    AdamDynamics,
    MatrixUpdates,
    OptimizerHealth,
    ParameterDelta,
    ParameterNorms,
    PathLength,
    WeightUpdates,
)

from tests.support import Case, train

LOOK_ALIKES = {
    # What Adam computes, and what changes; they differ for weights in low precision.
    ("adam_dynamics/update_norm", "parameter_norms/total_update_norm"),
    # Of sampled elements, and of all; they differ for parameters that are larger than the sample.
    ("parameter_norms/update_ratio", "weight_updates/topk_frozen"),
}


def hooks():
    every = {"interval": 1, "names": "*"}
    return [
        TrainingChecks(**every),
        ParameterNorms(**every),
        OptimizerHealth(**every),
        MatrixUpdates(**every),
        WeightUpdates(interval=1),
        AdamDynamics(every_n_steps=1),
        ParameterDelta(),
        PathLength(every=1),
        Hessian(every_n_steps=9, burst_length=9),
        TrainingDiagnostics(window=4, lags=1),
    ]


def series_by_name() -> dict[str, dict[int, float]]:
    """Return the numbers of a run by metric and step, without metrics that hardly vary."""
    run = train(Case("transformer", "adamw_foreach", loop="step"), hooks(), steps=9, snapshot_every=3)
    series: dict[str, dict[int, float]] = {}
    for name, _, step, value in run.sink.rows():
        series.setdefault(name, {})[step] = float(value)
    return {name: values for name, values in series.items() if len({*values.values()}) > 2}


@pytest.mark.longer
def test_no_size_of_updates_has_two_names() -> None:
    """Two metrics count as one if they agree to 1e-4 at all common steps, of which there are at least three."""
    alike = set()
    for (first, values), (second, others) in combinations(sorted(series_by_name().items()), 2):
        words = ("update", "delta", "displacement", "path", "frozen")
        hooks, steps = {name.partition("/")[0] for name in (first, second)}, values.keys() & others.keys()
        if len(hooks) == 1 or len(steps) < 3 or not any(word in first + second for word in words):
            continue
        if all(math.isclose(values[step], others[step], rel_tol=1e-4) for step in steps):
            alike.add(tuple("/".join(name.split("/")[:2]) for name in (first, second)))
    assert alike == LOOK_ALIKES
