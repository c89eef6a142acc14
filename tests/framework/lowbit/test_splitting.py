"""Split layers keep their function, have the state dict of a plain layer, and can be merged."""

import copy
import io

import pytest
import torch
from loopscope.errors import UsageError
from loopscope.lowbit import (
    RECIPES,
    ROLES,
    BitLinear,
    MetisOptions,
    Recipe,
    dequantize_model,
    find_recipe,
    low_rank_cast,
    quantize_model,
    split_weight,
)
from loopscope.lowbit.casts import Cast
from loopscope.lowbit.metis import SplitLinear
from loopscope.lowbit.recipes import uniform
from torch import Tensor, nn
from torch.nn import functional

from tests.support import TiedModel

FULL = Recipe("full", metis=MetisOptions(rank=4))
FP4 = find_recipe("fp4_metis")
BLOCK = Cast("e2m1", "block")


def layer_of(recipe: Recipe = FULL, *, bias: bool = True, dtype: torch.dtype = torch.float32) -> BitLinear:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(12, 8, bias=bias, dtype=dtype))
    quantize_model(model, recipe)
    (layer,) = model
    assert isinstance(layer, BitLinear)
    return layer


def split(layer: SplitLinear) -> SplitLinear:
    """Split a layer as the hook does at a step boundary."""
    assert layer.factors is not None
    parts, residual = split_weight(layer.merged_weight(), len(layer.factors.s), 0, torch.Generator().manual_seed(2))
    with torch.no_grad():
        for parameter, value in zip(layer.factors.decomposition, parts, strict=True):
            parameter.copy_(value).requires_grad_(True)
        layer.weight.copy_(residual)
    return layer


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(12,), (5, 12), (2, 5, 12)])
def test_splitting_keeps_the_layer_output(shape, bias):
    """The inputs have one to three dimensions, and the layer has a bias or none."""
    layer, x = layer_of(bias=bias), inputs(*shape)
    before = layer(x)
    torch.testing.assert_close(split(layer)(x), before)


def test_second_split_keeps_the_trained_function():
    """Splitting a trained layer again keeps its output and changes its factors."""
    layer, x = split(layer_of()), inputs(5, 12)
    layer(x).square().sum().backward()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.sub_(0.01 * parameter.grad)
    before, old = layer(x), layer.factors.s.detach().clone()
    torch.testing.assert_close(split(layer)(x), before)
    assert not torch.equal(layer.factors.s, old)


def test_split_layer_gradients_match_the_formula():
    """Autograd differentiates the factored formula in float64 as the reference."""
    layer, x = split(layer_of()), inputs(5, 12).double()
    layer(x.float()).square().sum().backward()
    u, s, v, weight, bias = (
        p.detach().double().requires_grad_() for p in (*layer.factors.decomposition, layer.weight, layer.bias)
    )
    (x @ (u @ torch.diag(s) @ v + weight).T + bias).square().sum().backward()
    found = (*layer.factors.decomposition, layer.weight, layer.bias)
    for live, expected in zip(found, (u, s, v, weight, bias), strict=True):
        torch.testing.assert_close(live.grad, expected.grad.float(), rtol=1e-4, atol=1e-5)


def test_residual_gradient_equals_whole_weight_gradient():
    plain, x = layer_of(), inputs(5, 12)
    apart = split(copy.deepcopy(plain))
    for layer in (plain, apart):
        layer(x).sum().backward()
    torch.testing.assert_close(apart.weight.grad, plain.weight.grad)


def test_quantized_split_layer_casts_all_but_s():
    """The layer casts every matrix, but not the vector of singular values."""
    layer, x = split(layer_of(FP4)), inputs(5, 12)
    u, s, v = layer.factors.decomposition
    expected = functional.linear(BLOCK(functional.linear(BLOCK(x), BLOCK(v)) * s), BLOCK(u))
    expected = expected + functional.linear(BLOCK(x), BLOCK(layer.weight), layer.bias)
    assert torch.equal(layer(x), expected)


def test_output_gradient_is_decomposed_before_both_products():
    """The weight and input gradients use the same decomposed and quantized output gradient."""
    recipe = Recipe("backward", output_grad=BLOCK, metis=MetisOptions(2, forward=False))
    layer, x = layer_of(recipe), inputs(6, 12).double().requires_grad_()
    layer.double()
    gradient = inputs(6, 8).double()
    layer(x).backward(gradient)
    used = (layer.weight.grad @ torch.linalg.pinv(x.detach())).mT
    torch.testing.assert_close(x.grad, used @ layer.weight.detach())
    best = min(
        (low_rank_cast(gradient, BLOCK, recipe.metis, torch.Generator().manual_seed(seed)) - used).norm()
        for seed in layer_seeds(layer)
    )
    assert best < 1e-9
    assert (BLOCK(gradient) - used).norm() > 0.01


def layer_seeds(layer: BitLinear) -> list[int]:
    """Return the seeds that the layer's newest call can have used, one for each role."""
    return [layer.calls.newest["weight"].seed + role for role in range(len(ROLES))]


def test_gradient_decomposition_draws_from_model_generator():
    """The global generator is unchanged, and restoring the model's generator repeats the gradient."""
    layer, x, before = layer_of(FP4), inputs(6, 12), torch.get_rng_state()
    own = layer.generator.get_state()
    first, second = (gradient_of(layer, x) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    layer.generator.set_state(own)
    assert torch.equal(gradient_of(layer, x), first)
    assert not torch.equal(first, second)


def gradient_of(layer: BitLinear, x: Tensor) -> Tensor:
    layer.zero_grad()
    layer(x).cos().sum().backward()
    return layer.weight.grad.clone()


def test_infinite_output_gradient_gives_nonfinite_gradients():
    layer, x = split(layer_of(FP4)), inputs(6, 12)
    (layer(x) * torch.inf).sum().backward()
    assert not any(parameter.grad.isfinite().all() for parameter in layer.parameters())


@pytest.mark.parametrize(
    "recipe", [FP4, uniform("stochastic", Cast("e2m1", "block", "stochastic"))], ids=lambda r: r.name
)
def test_activation_checkpointing_keeps_split_layer_gradients(recipe):
    """All gradients equal those without checkpointing bit for bit."""
    recipe = Recipe(recipe.name, *recipe.casts.values(), metis=MetisOptions(4))
    layer, x = split(layer_of(recipe)), inputs(6, 12).requires_grad_()
    own, found = layer.generator.get_state(), []
    for run in (layer, lambda x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)):
        layer.generator.set_state(own)
        layer.zero_grad()
        run(x).cos().sum().backward()
        found.append([parameter.grad.clone() for parameter in layer.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# State dicts


def test_split_layer_state_dict_matches_plain_layer():
    """The names are equal, and the weight agrees within rounding."""
    layer = layer_of()
    names, weight = [*nn.Linear(12, 8).state_dict()], layer.weight.detach().clone()
    assert [*layer.state_dict()] == names
    assert [*split(layer).state_dict()] == names
    torch.testing.assert_close(layer.state_dict()["weight"], weight, rtol=1e-6, atol=1e-7)


def test_split_state_dict_loads_into_plain_layer():
    """The plain layer computes the same output."""
    layer, plain, x = split(layer_of()), nn.Linear(12, 8), inputs(5, 12)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    plain.load_state_dict(torch.load(file, weights_only=True))
    torch.testing.assert_close(plain(x), layer(x))


def test_loading_plain_weight_ends_the_split():
    layer, plain = split(layer_of()), nn.Linear(12, 8)
    layer.load_state_dict(plain.state_dict())
    assert not layer.is_split
    assert torch.equal(layer(inputs(5, 12)), plain(inputs(5, 12)))
    assert [name for name, parameter in layer.named_parameters() if parameter.requires_grad] == ["weight", "bias"]


def test_loading_only_the_bias_keeps_the_split():
    layer = split(layer_of())
    layer.load_state_dict({"bias": torch.zeros(8)}, strict=False)
    assert layer.is_split


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_merged_weight_matches_original_within_rounding(dtype):
    layer = layer_of(dtype=dtype)
    weight = layer.weight.detach().clone()
    merged = split(layer).merged_weight()
    assert merged.dtype == dtype
    torch.testing.assert_close(merged, weight, rtol=2 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


def test_dequantising_merges_the_factors():
    model = nn.Sequential(nn.Linear(12, 8))
    weight = model[0].weight
    quantize_model(model, FULL)
    split(model[0])
    merged = model[0].merged_weight()
    dequantize_model(model)
    assert type(model[0]) is nn.Linear
    assert model[0].weight is weight
    assert torch.equal(weight, merged)
    assert [*dict(model.named_parameters())] == ["0.weight", "0.bias"]


def test_a_deep_copy_is_split_and_independent():
    layer = split(layer_of())
    copied = copy.deepcopy(layer)
    assert copied.is_split
    copied.load_state_dict(nn.Linear(12, 8).state_dict())
    assert layer.is_split


# Which layers have factors


def test_factors_are_frozen_zeros_until_the_split():
    layer = layer_of()
    assert all(not p.requires_grad and not p.any() for p in layer.factors.parameters())
    assert [tuple(p.shape) for p in layer.factors.parameters()] == [(8, 4), (4,), (4, 12)]


def test_shared_weight_has_no_factors():
    model = TiedModel()
    quantize_model(model, "fp4_metis")
    assert model.decoder.factors is None
    assert model.mix.factors is not None


def test_recipes_without_metis_give_no_factors():
    assert all(layer_of(recipe).factors is None for recipe in RECIPES.values() if recipe.metis is None)


def test_too_large_rank_is_refused_without_changes():
    """The error names the layer and the largest possible rank, and no layer is replaced."""
    model = nn.Sequential(nn.Linear(80, 70), nn.Linear(70, 8))
    with pytest.raises(
        UsageError, match="The rank of Metis is 60, but the weight of '1' is a 8 x 70 matrix; choose at most 8,"
    ):
        quantize_model(model, Recipe("large", metis=MetisOptions(rank=60)))
    assert all(type(layer) is nn.Linear for layer in model)


def test_split_layer_matches_the_formula():
    layer, x = layer_of(dtype=torch.float64), inputs(5, 12).double()
    for parameter in (*layer.factors.parameters(), layer.weight, layer.bias):
        parameter.data = inputs(*parameter.shape).double()
    layer.factors.requires_grad_(True)
    u, s, v = layer.factors.decomposition
    torch.testing.assert_close(layer(x), x @ (u @ torch.diag(s) @ v + layer.weight).T + layer.bias)
