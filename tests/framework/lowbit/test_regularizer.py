"""The range penalty against its closed form in float64, value and gradient."""

import math

import pytest
import torch
from loopscope.errors import UsageError
from loopscope.lowbit import OFFSET, RangePenalty, penalised_matrices, quantize_model
from torch import nn


def matrices(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(1)
    shapes = {"small": (2, 3), "large": (20, 30)}
    drawn = {name: torch.randn(shape, generator=source, dtype=torch.float64) for name, shape in shapes.items()}
    return {name: value.sign().mul(0.1 + value.abs()).to(dtype).requires_grad_() for name, value in drawn.items()}


@pytest.mark.parametrize(("large", "small"), [(1.0, 1.0), (0.5, 0.0), (0.0, 2.0)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
def test_penalty_and_gradient_match_closed_form(dtype, tolerance, large, small):
    """The weights of the large and small terms and the dtype vary."""
    given, weight = matrices(dtype), 0.25
    penalty = RangePenalty(weight=weight, large=large, small=small)(given)
    penalty.backward()
    every = torch.cat([value.detach().double().flatten() for value in given.values()])
    expected = weight * (large * every**2 + small / (every + OFFSET) ** 2).mean()
    slope = weight * (2 * large * every - 2 * small / (every + OFFSET) ** 3) / len(every)
    found = torch.cat([value.grad.double().flatten() for value in given.values()])
    torch.testing.assert_close(penalty.double(), expected, rtol=tolerance, atol=0)
    torch.testing.assert_close(found, slope, rtol=tolerance, atol=1e-5 * tolerance)


def test_penalty_is_one_mean_over_all_elements():
    """The penalty is not a sum of the means of the matrices."""
    given = matrices()
    penalty = RangePenalty(weight=1.0)(given)
    apart = [RangePenalty(weight=1.0)({name: value}) for name, value in given.items()]
    sizes = [value.numel() for value in given.values()]
    weighted = sum(each * size for each, size in zip(apart, sizes, strict=True)) / sum(sizes)
    torch.testing.assert_close(penalty, weighted)
    assert not math.isclose(penalty.item(), sum(apart).item(), rel_tol=0.1)


def test_half_precision_is_summed_in_float32():
    given = {"w": torch.full((400, 400), 0.01, dtype=torch.float16)}
    assert RangePenalty(weight=1.0)(given).item() == pytest.approx(1e4, rel=2e-3)


def test_zero_weight_gives_zero_without_gradient():
    given = matrices()
    penalty = RangePenalty()(given)
    assert penalty == 0
    assert not penalty.requires_grad


def test_gradient_step_moves_weights_off_both_ends():
    """A step against the gradient shrinks large magnitudes and grows small ones."""
    given = {"w": torch.tensor([[4.0, 0.2, -4.0, -0.2]], requires_grad=True)}
    RangePenalty(weight=1.0)(given).backward()
    moved = given["w"] - 1e-3 * given["w"].grad
    assert ((moved.abs() < given["w"].abs()) == torch.tensor([[True, False, True, False]])).all()


def test_norms_biases_and_frozen_weights_are_not_penalized():
    """A name pattern restricts the selection further."""
    model = nn.ModuleDict(
        {"a": nn.Linear(3, 4), "norm": nn.LayerNorm(4), "b": nn.Linear(4, 4), "c": nn.Embedding(5, 3)}
    )
    model["b"].weight.requires_grad_(False)
    assert [*penalised_matrices(model)] == ["a.weight", "c.weight"]
    assert [*penalised_matrices(model, "a.*")] == ["a.weight"]


class Experts(nn.Module):
    """Matrices of experts in one parameter, with tables and a convolution of as many dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 6, 3))
        self.down_proj = nn.Parameter(torch.randn(4, 3, 6))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, 3))
        self.cls_token = nn.Parameter(torch.randn(1, 1, 3))
        self.mix = nn.Conv1d(3, 3, 2)


def test_experts_are_penalised_but_tables_are_not():
    assert [*penalised_matrices(Experts())] == ["gate_up_proj", "down_proj"]
    assert [*penalised_matrices(Experts(), "down*")] == ["down_proj"]
    parts = {f"{number}": matrix for number, matrix in enumerate(Experts().gate_up_proj)}
    together = RangePenalty(weight=0.1)({"all": torch.stack([*parts.values()])})
    assert together.item() == pytest.approx(RangePenalty(weight=0.1)(parts).item())


def test_factors_are_penalised_once_they_are_trained():
    model = nn.Sequential(nn.Linear(8, 8))
    quantize_model(model, "fp4_metis")
    assert [*penalised_matrices(model)] == ["0.weight"]
    model[0].factors.requires_grad_(True)
    assert [*penalised_matrices(model)] == ["0.weight", "0.factors.u", "0.factors.v"]


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(UsageError, match="matches 'blocks', but no name matches"):
        penalised_matrices(nn.Linear(3, 4), "blocks")


@pytest.mark.parametrize("option", ["weight", "large", "small"])
@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
def test_invalid_options_are_refused(option, value):
    with pytest.raises(UsageError, match=f"The {option} of the range penalty is {value}"):
        RangePenalty(**{option: value})
