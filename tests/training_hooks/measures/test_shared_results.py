"""Results that observers of one visit share."""

import pytest
import torch
from loopscope.training_hooks.checks import TrainingChecks
from loopscope.training_hooks.clipping import GradClip
from loopscope.training_hooks.gradients import Norms
from loopscope.training_hooks.measures import compute_once, weight_norms
from loopscope.training_hooks.updates import OptimizerHealth, ParameterNorms, WeightTracking
from torch import nn

from tests.support import Case, train
from tests.training_hooks.epoch_end import epoch_end


def test_one_visit_computes_a_result_once() -> None:
    model = nn.Linear(2, 2)
    ctx = epoch_end(model)
    assert compute_once(ctx, weight_norms) is compute_once(ctx, weight_norms)


def test_the_next_visit_computes_results_again() -> None:
    """A write through ``data``, which leaves no trace, does not keep the earlier result."""
    model = nn.Linear(2, 2)
    earlier = compute_once(epoch_end(model), weight_norms)
    model.weight.data.fill_(3.0)
    later = compute_once(epoch_end(model), weight_norms)
    assert later["weight"] == 6
    assert later["weight"] != earlier["weight"]


def test_two_models_share_no_results() -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    first, second = (compute_once(epoch_end(model), weight_norms) for model in models)
    assert first["weight"] != second["weight"]


HOOKS = {
    "training_checks": TrainingChecks,
    "parameter_norms": ParameterNorms,
    "optimizer_health": OptimizerHealth,
    "norms": Norms,
    "weight_tracking": WeightTracking,
}


@pytest.mark.longer
@pytest.mark.guarantee
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_report_alone_what_they_report_together(name: str) -> None:
    """Every value is the same bit for bit, also if a committing hook clips gradients between two visits."""

    def rows(names):
        hooks = [GradClip(max_norm=0.1), *(HOOKS[item]() for item in names)]
        reported = train(Case("transformer", "adamw_foreach"), hooks, steps=4).sink.rows()
        return {row[:3]: float(row[3]) for row in reported if row[0].startswith(f"{name}/")}

    alone, together = rows([name]), rows(HOOKS)
    assert alone
    assert torch.equal(torch.tensor([*alone.values()]), torch.tensor([together[key] for key in alone]))
