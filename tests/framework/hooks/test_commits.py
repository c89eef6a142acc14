import pytest
import torch
from loopscope.engine import CommitRecord
from loopscope.engine.commits import (
    blend,
    check_factors,
    check_vector,
    clamp,
    clipping_of,
    replace_gradients,
    scale,
    scale_each,
)
from loopscope.errors import LoopscopeError, UsageError
from loopscope.hooks import StatePart, UndeclaredCommitError
from loopscope.tensors import copied, trainable
from torch import nn


def record(*parts: StatePart) -> CommitRecord:
    return CommitRecord("smoother", frozenset(parts))


def test_recorded_changes_apply_in_order():
    """A change takes effect only at apply, in the order of recording."""
    commits, applied = record(StatePart.GRADIENTS, StatePart.PARAMETERS), []
    commits.record(StatePart.PARAMETERS, "blend_parameters", lambda: applied.append("parameters"))
    commits.record(StatePart.GRADIENTS, "scale_gradients", lambda: applied.append("gradients"))
    assert applied == []
    commits.apply()
    assert applied == ["parameters", "gradients"]


def test_undeclared_change_is_refused_with_remedy():
    """The error names the hook and the missing declaration, and nothing is recorded."""
    commits = record(StatePart.GRADIENTS)
    with pytest.raises(
        UndeclaredCommitError, match=r"'smoother' does not declare; add commits = \{StatePart.PARAMETERS"
    ):
        commits.record(StatePart.PARAMETERS, "blend_parameters", lambda: None)
    assert commits.changes == []


@pytest.mark.parametrize("norm", [0.0, 0.3, 1.0, 7.0, float("inf"), float("nan")])
def test_clip_factor_equals_that_of_torch(norm):
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.full((1,), norm)
    torch.nn.utils.clip_grad_norm_([parameter], 0.5)
    gradient = torch.full((1,), norm)
    scale([gradient], clipping_of([gradient], 0.5).factor)
    assert torch.equal(gradient.view(torch.int32), parameter.grad.view(torch.int32))


@pytest.mark.parametrize("factor", [0.25, torch.tensor(0.25)])
def test_scaling_multiplies_in_place_and_keeps_dtypes(factor):
    tensors = [torch.full((3,), 4.0), torch.full((2,), 4.0, dtype=torch.bfloat16)]
    scale(tensors, factor)
    scale([], factor)
    assert [tensor.tolist() for tensor in tensors] == [[1.0] * 3, [1.0] * 2]
    assert [tensor.dtype for tensor in tensors] == [torch.float32, torch.bfloat16]


def test_each_gradient_gets_its_own_factor():
    """Other gradients, dtypes and missing gradients do not change."""
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 2).bfloat16())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 4.0)
    model[1].bias.grad = None
    scale_each(model, {"0.weight": 0.5, "1.weight": torch.tensor(0.25, dtype=torch.float64), "1.bias": 0.0})
    assert model[1].weight.grad.dtype is torch.bfloat16
    assert [model[0].weight.grad.tolist(), model[0].bias.grad.tolist()] == [[[2.0] * 2], [4.0]]
    assert (model[1].weight.grad.tolist(), model[1].bias.grad) == ([[1.0]] * 2, None)


def test_invalid_factor_or_name_is_refused():
    """A factor must be a scalar, and an unknown parameter name gets a suggestion."""
    model = nn.Linear(2, 1)
    check_factors(model, {"weight": 0.5, "bias": torch.tensor(0.5)})
    with pytest.raises(UsageError, match=r"Unknown parameter 'weigth'\. Did you mean 'weight'"):
        check_factors(model, {"weigth": 1.0})
    with pytest.raises(LoopscopeError, match=r"The factor of 'bias' has shape \(1,\); a factor is a number or"):
        check_factors(model, {"bias": torch.ones(1)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_clamping_equals_that_of_torch(dtype):
    values = torch.tensor([0.0, 0.3, -0.3, 2.0, -2.0, torch.inf, -torch.inf, torch.nan], dtype=dtype)
    ours, theirs = (nn.Parameter(torch.zeros(8, dtype=dtype)) for _ in range(2))
    ours.grad, theirs.grad = values.clone(), values.clone()
    clamp([ours, nn.Parameter(torch.zeros(3))], 0.3)
    torch.nn.utils.clip_grad_value_([theirs], 0.3)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0, equal_nan=True)
    clamp([], 0.3)


def test_replacing_gradients_writes_in_place():
    """Existing gradients are overwritten in place, and missing ones are created as copies."""
    model = nn.Linear(2, 1)
    model.weight.grad = existing = torch.zeros(1, 2)
    values = {"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.tensor([3.0])}
    replace_gradients(model, values)
    assert model.weight.grad is existing
    assert model.bias.grad is not values["bias"]
    assert [model.weight.grad.tolist(), model.bias.grad.tolist()] == [[[1.0, 2.0]], [3.0]]


@pytest.mark.parametrize(("weight", "expected"), [(0.0, 1.0), (0.25, 1.5), (1.0, 3.0)])
def test_blending_moves_parameters_by_the_weight(weight, expected):
    model = nn.Linear(2, 1)
    nn.init.ones_(model.weight)
    bias = model.bias.detach().clone()
    blend(model, {"weight": torch.full((1, 2), 3.0)}, weight)
    assert model.weight.tolist() == [[expected] * 2]
    assert torch.equal(model.bias, bias)


def test_blending_towards_a_float32_shadow_is_rounded_once():
    model = nn.Linear(64, 64).bfloat16()
    before, target = model.weight.detach().clone(), torch.randn(64, 64)
    blend(model, {"weight": target}, 0.3)
    assert torch.equal(model.weight.detach(), before.float().lerp(target, 0.3).bfloat16())


def test_mismatched_vector_is_refused():
    """An unknown name gets a suggestion, and a wrong shape is reported with both shapes."""
    model = nn.Linear(2, 1)
    check_vector(model, copied(trainable(model)))
    with pytest.raises(UsageError, match=r"Unknown parameter 'weigth'\. Did you mean 'weight'"):
        check_vector(model, {"weigth": torch.zeros(1, 2)})
    with pytest.raises(LoopscopeError, match=r"'weight' has shape \(2,\), but the parameter has \(1, 2\)"):
        check_vector(model, {"weight": torch.zeros(2)})
