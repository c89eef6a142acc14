"""Passes in a wider precision compared with full precision, with gradients in the dtype of the parameters."""

import copy

import pytest
import torch
from loopscope.training_hooks.laboratory.wider_precision import Widened, widen_layer
from torch import Tensor, nn


def model_and_batch() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(4, 8), attention, nn.LayerNorm(8), nn.Linear(8, 2)), torch.randn(5, 3, 4)


def gradients(model: nn.Module, x: Tensor, *, autocast: bool) -> list[Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(x).float().square().mean()
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def test_autocast_in_float32_is_float32_bit_for_bit():
    model, x = model_and_batch()
    expected, low = gradients(model, x, autocast=False), gradients(model, x, autocast=True)
    with (mode := Widened()):
        found = gradients(model, x, autocast=True)
    assert mode.converted_count
    assert all(map(torch.equal, found, expected))
    assert not any(map(torch.equal, low, expected))


def test_bfloat16_model_computes_in_float32():
    """Outputs equal those of a float32 copy, and gradients keep the dtype of the parameters."""
    model, x = model_and_batch()
    low = copy.deepcopy(model).bfloat16()
    expected = gradients(copy.deepcopy(low).float(), x.bfloat16().float(), autocast=False)
    with Widened():
        assert torch.equal(low(x.bfloat16()), copy.deepcopy(low).float()(x.bfloat16().float()))
        found = gradients(low, x.bfloat16(), autocast=False)
    assert {each.dtype for each in found} == {torch.bfloat16}
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.float() - theirs).norm() < 0.01 * theirs.norm()


@pytest.mark.parametrize(("wide", "is_finite"), [(torch.float32, False), (torch.float64, True)])
def test_float64_prevents_overflow_of_float32(wide, is_finite):
    x = torch.full((3,), 1e38, requires_grad=True)
    with Widened(wide):
        y = (x * 100) / 1e38
        y.sum().backward()
    assert bool(y.isfinite().all()) == is_finite
    assert x.grad.dtype == torch.float32


def test_single_layer_is_widened():
    model, x = model_and_batch()
    mode = Widened()
    with torch.autocast("cpu", torch.bfloat16), widen_layer(model[0], mode):
        hidden = model[0](x)
        assert hidden.dtype == torch.float32
        assert model[3](hidden).dtype == torch.bfloat16
    assert mode.converted_count
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks


def test_mode_ends_when_layer_raises():
    model, x = model_and_batch()
    mode = Widened()
    with widen_layer(model[0], mode), pytest.raises(RuntimeError):
        model[0](x[..., :2])
    assert (x.bfloat16() + 1).dtype == torch.bfloat16
