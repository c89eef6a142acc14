"""Dropout functions that are active in eval mode are found, and the evaluation computes the same numbers."""

from collections.abc import Callable

import loopscope
import pytest
import torch
from loopscope.engine.evaluation_dropout import EvaluationDropout
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
    with EvaluationDropout(model).watched() as names:
        watched = model(inputs)
    assert names == expected
    assert torch.equal(watched, bare)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_only_the_first_call_is_watched():
    model = Applied(lambda module, x: functional.dropout(x))
    found = EvaluationDropout(model)
    with found.watched() as names:
        model.train()(torch.ones(1, 4))
    assert names == set()
    with found.watched() as names:
        model.eval()(torch.ones(1, 4))
    assert names == set()


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
    with EvaluationDropout(model).watched() as names:
        model(torch.ones(1, 3, 4))
    assert names == set()


@pytest.mark.parametrize(("training", "expected"), [(True, ["dropout-in-evaluation"]), (False, [])])
def test_the_doctor_names_active_dropout(training, expected, tmp_path):
    """An evaluation of a custom loop is watched, and the finding has the step of the evaluation."""
    torch.manual_seed(0)
    model = Applied(lambda module, x: functional.dropout(x, 0.5, module.training or training))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with loopscope.attach(model, optimizer, hooks=[], out=tmp_path / "run", loop="step", display="none") as scope:
        for batch in scope.batches([torch.randn(8, 4)] * 3):
            scope.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        scope.evaluate(lambda: {"val_loss": float(model(torch.ones(2, 4)).square().mean())})
    found = scope.diagnose()
    assert [item.id for item in found if item.id == "dropout-in-evaluation"] == expected
