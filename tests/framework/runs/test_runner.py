"""Base classes of experiments: optimizers, decay, evaluation in batches, the target, and groups of hooks."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from loopscope import training_hooks
from loopscope.checkpoints import open_checkpoint
from loopscope.experiments import GrokkingRunner
from loopscope.hooks import HookRegistry
from loopscope.hooks.selection import GROUPS, hook_kind
from torch import Tensor, nn
from torch.nn import functional

from tests.framework.runs.small_experiment import Small, SmallConfig, session

assert training_hooks.__all__


def runner(**options: Any) -> Small:
    return Small(SmallConfig(**options))


def test_hook_groups_have_expected_kinds() -> None:
    """The groups match the design, and none contains a committing or debug hook."""
    groups = runner().hook_sets
    assert list(groups) == list(GROUPS)
    assert (groups["none"], groups["minimal"]) == ([], ["training_metrics"])
    kinds = {name: {hook_kind(HookRegistry.get(hook)) for hook in hooks} for name, hooks in groups.items()}
    assert kinds["observers"] == {"observer"}
    assert kinds["interventions"] == {"intervention"}
    assert kinds["full"] == {"observer", "intervention"}
    assert set(groups["full"]) == {*groups["observers"], *groups["interventions"]}


@pytest.mark.parametrize(
    ("name", "kind"), [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)]
)
def test_the_optimizer_is_the_configured_one(name: str, kind: type) -> None:
    experiment = runner(optimizer=name, lr=0.25, weight_decay=0.5, beta2=0.9)
    optimizer = experiment.build_optimizer(experiment.build_model())
    (group,) = optimizer.param_groups
    assert type(optimizer) is kind
    assert (group["lr"], group["weight_decay"]) == (0.25, 0.5)
    assert group["momentum"] == 0.9 if name == "sgd" else group["betas"] == (0.9, 0.9)


def test_learning_rate_decays_by_cosine() -> None:
    """The learning rate decays from lr to min_lr over the epochs."""
    experiment = runner(epochs=8, lr=1.0, min_lr=0.2)
    optimizer = experiment.build_optimizer(experiment.build_model())
    scheduler = experiment.build_scheduler(optimizer)
    rates = []
    for _ in range(9):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    expected = [0.2 + 0.4 * (1 + math.cos(math.pi * epoch / 8)) for epoch in range(9)]
    assert rates == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("options", "length"),
    [({"epochs": 8}, 8), ({"epochs": 8, "max_epochs": 3}, 3), ({"epochs": 2, "max_epochs": 3}, 2)],
)
def test_max_epochs_only_shortens_training(options: dict[str, int], length: int) -> None:
    assert runner(**options).length == length


def test_evaluation_in_batches_equals_full_evaluation() -> None:
    class InPieces(Small):
        evaluation_batch = 7

    experiment = InPieces(SmallConfig())
    model = experiment.build_model().eval()
    inputs, targets = experiment.data()
    with torch.no_grad():
        found = experiment.evaluate(model)
        logits = model(inputs).double()
    assert found["val_acc"] == (logits.argmax(1) == targets).sum().item() / len(targets)
    assert found["val_loss"] == pytest.approx(functional.cross_entropy(logits, targets).item(), rel=1e-6)


def test_training_stops_at_the_target_and_not_before() -> None:
    class Real(Small):
        should_stop = GrokkingRunner.should_stop

    experiment = Real(SmallConfig(target_acc=0.75))
    assert experiment.should_stop({"val_acc": 0.75})
    assert not experiment.should_stop({"val_acc": 0.7499})
    assert not experiment.should_stop({"val_acc": math.nan})


class Counting(Small):
    """An experiment with a state that its loss depends on."""

    name = "counting"
    batches = 0

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.batches += 1
        return super().compute_loss(model, batch) * self.batches

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: Any) -> None:
        self.batches = state["batches"]


@pytest.mark.longer
def test_experiment_state_survives_hooks_and_checkpoints(tmp_path: Path) -> None:
    """Interventions leave the state of the experiment unchanged, and checkpoints contain it."""
    weights = []
    for hooks in ([], ["hessian", "counterfactual"]):
        folder = tmp_path / str(len(hooks))
        session(folder, Counting, strategies=["plain"], hooks=hooks, audit_hooks=True, save_checkpoints=1).run()
        weights.append((folder / "counting/plain/plain_final.pt").read_bytes())
    assert weights[0] == weights[1]
    content = open_checkpoint(folder / "counting/plain/checkpoints/step_000000006").content()
    assert content["state"]["extras"]["experiment"] == {"batches": 6}


@pytest.mark.longer
def test_experiment_state_restarts_per_strategy(tmp_path: Path) -> None:
    """A strategy gives the same weights alone and after another strategy."""
    session(tmp_path / "both", Counting, strategies=["plain", "other-order"]).run()
    session(tmp_path / "alone", Counting, strategies=["other-order"]).run()
    both, alone = (tmp_path / name / "counting/other-order/other-order_final.pt" for name in ("both", "alone"))
    assert both.read_bytes() == alone.read_bytes()
