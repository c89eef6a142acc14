"""``scope.diagnose(test=True)``: effects from the present state, and a training that continues as without it."""

from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from loopscope import training_hooks
from loopscope.doctor import Diagnosis
from loopscope.errors import UsageError
from torch import Tensor, nn
from torch.nn import functional

FILLED = training_hooks


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(320, 8, generator=generator), torch.randn(8, 3, generator=generator)
    return [*zip(x.split(32), (x @ weights).argmax(1).split(32), strict=True)]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def trained(folder: Path, optimizer: str = "SGD", *, lr: float, at: int = 3, test: bool = True, **given: Any) -> Any:
    """Train 12 steps with a diagnosis after one; return it, and the bytes of weights, optimizer and random streams."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    options = {"momentum": 0.9} if optimizer == "SGD" else {}
    optimizer_of = getattr(torch.optim, optimizer)(model.parameters(), lr=lr, **options)
    given = {"loss": loss_of, "loader": batches(), **given}
    diagnosis = Diagnosis()
    hooks = {"with_hooks": "health", "out": folder, "display": "none"}
    with loopscope.attach(model, optimizer_of, **hooks, **given) as scope:
        for step, batch in enumerate((item for _ in range(2) for item in scope.batches(batches())), 1):
            scope.backward(loss_of(model, batch))
            optimizer_of.step()
            if step == at:
                diagnosis = scope.diagnose(test=test, steps=4)
            optimizer_of.zero_grad()
            if step == 12:
                break
    tensors = [*model.state_dict().values(), *(v for entry in optimizer_of.state.values() for v in entry.values())]
    return diagnosis, [item.clone() for item in tensors if isinstance(item, Tensor)], torch.get_rng_state()


@pytest.mark.some_rows(2)
@pytest.mark.longer
@pytest.mark.guarantee("interventions-are-undone")
@pytest.mark.parametrize(("optimizer", "lr"), [("SGD", 5.0), ("AdamW", 1.0)])
def test_training_continues_bit_for_bit(tmp_path, optimizer, lr):
    """Weights, batch statistics, moments and random streams are those of a training without tests."""
    diagnosis, tensors, streams = trained(tmp_path / "tested", optimizer, lr=lr)
    assert any(item.tests for item in diagnosis)
    _, expected, expected_streams = trained(tmp_path / "plain", optimizer, lr=lr, test=False)
    assert all(torch.equal(one, other) for one, other in zip(tensors, expected, strict=True))
    assert torch.equal(streams, expected_streams)


@pytest.mark.longer
def test_high_learning_rate_is_confirmed(tmp_path):
    diagnosis, *_ = trained(tmp_path, lr=5.0)
    (finding,) = [item for item in diagnosis if item.id == "learning-rate-too-high"]
    assert any(item.confirms for item in finding.tests)
    assert finding.confidence > 0.9
    assert finding.as_dict()["tests"][0].keys() == {"change", "effect", "error", "null", "branches", "confirms", "of"}


@pytest.mark.longer
def test_low_learning_rate_is_confirmed(tmp_path):
    """Without loader= the branches train on halves of the last batch."""
    diagnosis, *_ = trained(tmp_path, lr=1e-7, at=8, loader=None)
    (finding,) = [item for item in diagnosis if item.id == "learning-rate-too-low"]
    assert [(item.change, item.confirms, item.of) for item in finding.tests] == [
        ("ten times the learning rate", True, "loss")
    ]


@pytest.mark.longer
def test_missing_loss_is_reported(tmp_path):
    sentence = r"scope.diagnose\(test=True\) trains branches: give loss=function\(model, batch\)"
    with pytest.raises(UsageError, match=sentence):
        trained(tmp_path, lr=0.1, loss=None)


def test_tests_before_the_first_step_are_refused(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        loopscope.attach(model, optimizer, out=tmp_path, loss=loss_of, display="none") as scope,
        pytest.raises(UsageError, match="before the first step"),
    ):
        scope.diagnose(test=True)


def test_tests_within_a_step_are_refused(tmp_path):
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with loopscope.attach(model, optimizer, out=tmp_path, loss=loss_of, display="none") as scope:
        for batch in scope.batches(batches()):
            scope.backward(loss_of(model, batch))
            with pytest.raises(UsageError, match="within a step"):
                scope.diagnose(test=True)
            optimizer.step()
            break
