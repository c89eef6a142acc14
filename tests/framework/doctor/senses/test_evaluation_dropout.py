"""Dropout functions that are active in eval mode are found, and the evaluation computes the same numbers."""

from collections.abc import Callable

import loopscope
import pytest
import torch
from loopscope.doctor.senses.evaluation_modes import EvaluationDropout
from torch import Tensor, nn
from torch.nn import functional


class Applied(nn.Module):
    """A linear layer, and a function of the module and its output."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function
        self.dropout = nn.Dropout()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.function(self, self.layer(inputs))


def attention(probability: float) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda module, x: functional.scaled_dot_product_attention(x[None], x[None], x[None], None, probability)[0]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda module, x: functional.dropout(x, 0.5), {"dropout"}),
        (lambda module, x: functional.dropout(x), {"dropout"}),
        (lambda module, x: functional.dropout(x, 0.0), set()),
        (lambda module, x: functional.dropout(x, 0.5, module.training), set()),
        (lambda module, x: module.dropout(x), set()),
        (lambda module, x: functional.dropout1d(x), {"dropout1d"}),
        (lambda module, x: functional.alpha_dropout(x), set()),
        (attention(0.1), {"scaled_dot_product_attention"}),
        (attention(0.0), set()),
    ],
)
def test_active_functions_are_found(function, expected):
    model, inputs = Applied(function).eval(), torch.ones(3, 4)
    torch.manual_seed(0)
    bare = model(inputs)
    torch.manual_seed(0)
    with EvaluationDropout(model).watched() as active:
        watched = model(inputs)
    assert active == (expected, set())
    assert torch.equal(watched, bare)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


class Listed(Applied):
    """A model that calls dropout in modules of a list, which it does not register."""

    def __init__(self) -> None:
        super().__init__(lambda module, x: module.modules_in_list[0](x))
        self.modules_in_list = [nn.Dropout(), nn.Dropout()]


def test_modules_that_are_not_registered_are_found():
    model = Listed().eval()
    with EvaluationDropout(model).watched() as active:
        model(torch.ones(3, 4))
    assert active == (set(), {"Dropout"})


def test_dropout_that_the_script_keeps_is_left_out():
    """As for estimates by Monte Carlo dropout: the module is in train mode, and model.eval() reaches it."""
    model = Applied(lambda module, x: module.dropout(x)).eval()
    model.dropout.train()
    with EvaluationDropout(model).watched() as active:
        model(torch.ones(3, 4))
    assert active == (set(), set())


def test_only_the_first_call_is_watched():
    model = Applied(lambda module, x: functional.dropout(x))
    found = EvaluationDropout(model)
    with found.watched() as active:
        model.train()(torch.ones(1, 4))
    assert active == (set(), set())
    with found.watched() as active:
        model.eval()(torch.ones(1, 4))
    assert active == (set(), set())


def test_an_error_ends_the_watch():
    def failing(module, x):
        raise ValueError("of the model")

    model = Applied(failing).eval()
    with pytest.raises(ValueError, match="of the model"), EvaluationDropout(model).watched():
        model(torch.ones(1, 4))
    assert torch._C._len_torch_function_stack() == 0
    assert not model._forward_hooks


def test_models_with_fast_paths_are_left_out():
    """Watching functions would disable the fast path of attention layers, which computes other bits."""
    layer = nn.TransformerEncoderLayer(4, 2, dropout=0.0, batch_first=True)
    model = nn.Sequential(layer, Applied(lambda module, x: functional.dropout(x))).eval()
    with EvaluationDropout(model).watched() as active:
        model(torch.ones(1, 3, 4))
    assert active == (set(), set())


def findings_of(model, folder):
    """Train a few steps, evaluate, and return the findings."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with loopscope.attach(model, optimizer, hooks=[], out=folder, loop="step", display="none") as scope:
        for batch in scope.batches([torch.randn(8, 4)] * 3):
            scope.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        scope.evaluate(lambda: {"val_loss": float(model(torch.ones(2, 4)).square().mean())})
    return scope.diagnose()


@pytest.mark.parametrize(("training", "expected"), [(True, ["dropout-in-evaluation"]), (False, [])])
def test_the_doctor_names_active_dropout(training, expected, tmp_path):
    """An evaluation of a custom loop is watched, and the finding has the step of the evaluation."""
    found = findings_of(
        Applied(lambda module, x: functional.dropout(x, 0.5, module.training or training)), tmp_path / "run"
    )
    assert [item.id for item in found if item.id == "dropout-in-evaluation"] == expected


@pytest.mark.parametrize("holds_weights", [True, False])
def test_unregistered_dropout_has_one_finding(holds_weights, tmp_path):
    """A list of blocks with weights is one mistake, and no function is blamed for it."""
    model = Listed()
    if holds_weights:
        model.modules_in_list = [nn.Sequential(nn.Linear(4, 4), nn.Dropout()) for _ in range(2)]
    found = {item.id: item for item in findings_of(model, tmp_path / "run")}
    assert ("layers-not-registered" in found) is holds_weights
    assert ("dropout-in-evaluation" in found) is not holds_weights
    assert not any("functional.dropout" in item.why for item in found.values())
