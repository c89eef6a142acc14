"""Low-bit linear layers: their products and gradients against compositions by hand, bit for bit."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from loopscope.errors import UsageError
from loopscope.lowbit import RECIPES, ROLES, BitLinear, Recipe, dequantize_model, find_recipe
from loopscope.lowbit.hadamard import hadamard_transform, random_hadamard_matrix
from loopscope.lowbit.linear_function import LayerCall, QuantizedLinear
from loopscope.lowbit.recipes import uniform
from loopscope.training import Precision, compile_model
from scipy.linalg import hadamard
from torch import Tensor, nn
from torch.nn import functional

from tests.framework.lowbit.lowbit_layers import (
    BLOCK,
    DELAYED,
    NARROW,
    SHAPES,
    STOCHASTIC,
    Recorder,
    assert_same,
    drawn,
    lowbit,
    named,
    plain,
    results,
    stack,
)


def by_hand(layer: nn.Linear, recipe: Recipe, x: Tensor) -> list[Tensor]:
    """Return the results of a layer, computed only with casts and matrix products."""
    cast = lambda role, values: recipe.casts[role](values) if role in recipe.casts else values
    if recipe.along_sum:
        return along_the_sum(layer, recipe, x)
    weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
    y = functional.linear(cast("forward_input", x), cast("forward_weight", weight), bias)
    g = drawn(*y.shape, seed=2, dtype=y.dtype).reshape(-1, y.shape[-1])
    rounded = cast("output_grad", g)
    dx = (rounded @ cast("backward_weight", weight)).reshape(x.shape)
    dw = rounded.T @ cast("backward_input", x).reshape(-1, x.shape[-1])
    return [y, dx, dw, *([] if bias is None else [g.sum(0)])]


def along_the_sum(layer: nn.Linear, recipe: Recipe, x: Tensor) -> list[Tensor]:
    """Return the results with blocks along the sum of each product, and the random Hadamard transform in dW."""
    weight, casts = layer.weight.detach(), recipe.casts
    bias = None if layer.bias is None else layer.bias.detach()
    y = functional.linear(casts["forward_input"](x), casts["forward_weight"](weight), bias)
    g = drawn(*y.shape, seed=2, dtype=y.dtype).reshape(-1, y.shape[-1])
    dx = casts["output_grad"](g) @ casts["backward_weight"](weight.T).T
    left, right = (mixed(each.T, recipe.hadamard) for each in (g, x.reshape(-1, x.shape[-1])))
    dw = casts["output_grad"](left) @ casts["backward_input"](right).T
    return [y, dx.reshape(x.shape), dw, *([] if bias is None else [g.sum(0)])]


def mixed(matrix: Tensor, size: int) -> Tensor:
    """Return each ``size`` values of a row times scipy's Hadamard matrix, with the library's signs."""
    if not size:
        return matrix
    signs = random_hadamard_matrix(size)[:, 0].sign()
    turn = (torch.diag(signs) @ torch.from_numpy(hadamard(size)).double() / size**0.5).to(matrix)
    rows = functional.pad(matrix, (0, -matrix.shape[1] % size))
    return (torch.cat([part @ turn for part in rows.split(size, 1)], 1)) if rows.numel() else rows


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_recipe_without_casts_matches_linear_layer(shape, bias):
    """Outputs and gradients are equal bit for bit for every shape."""
    assert_same(results(lowbit("fp32", bias), drawn(*shape)), results(plain(bias), drawn(*shape)))


def no_casts(role: Any, values: Tensor, call: Any) -> Tensor:
    return values


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES[:-1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_quantized_linear_without_casts_matches_linear_layer(shape, bias, dtype):
    """The autograd function alone is exact bit for bit in float32, bfloat16 and float64."""
    run = lambda layer, x: QuantizedLinear.apply(x, layer.weight, layer.bias, no_casts, LayerCall())
    x, layer = drawn(*shape, dtype=dtype), plain(bias, dtype)
    assert_same(results(layer, x, run), results(layer, x))


@pytest.mark.some_rows(3)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NARROW)
def test_results_match_products_of_cast_matrices(name, shape, bias):
    """Outputs and gradients equal a computation by hand bit for bit, up to rare roundings with Hadamard."""
    x, recipe = drawn(*shape), RECIPES[name].with_every(rounding="nearest")
    found, expected = results(lowbit(recipe, bias), x), by_hand(plain(bias), recipe, x)
    if recipe.hadamard:  # its sums in another order may round to another number, here and there
        (dw,), (other,) = found[2:3], expected[2:3]
        assert (dw - other).abs().gt(1e-5).float().mean() <= 0.02
        del found[2], expected[2]
    assert_same(found, expected)


def test_random_hadamard_transform_preserves_products():
    """The matrix is orthogonal with entries of equal size, and spreads an outlier evenly."""
    left, right = drawn(7, 41, dtype=torch.float64), drawn(5, 41, seed=3, dtype=torch.float64)
    for size in (2, 16, 64):
        matrix = random_hadamard_matrix(size)
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64))
        torch.testing.assert_close(hadamard_transform(left, size) @ hadamard_transform(right, size).T, left @ right.T)
    assert random_hadamard_matrix(16).abs().unique().tolist() == [0.25]
    outlier = torch.zeros(1, 16).index_fill(1, torch.tensor([3]), 8.0)
    assert hadamard_transform(outlier, 16).abs().unique().tolist() == [2.0]


@pytest.mark.longer
def test_stochastic_gradient_casts_are_independent_and_unbiased():
    """The two casts use different seeds, and the mean over runs is the full-precision gradient."""
    recipe = replace(Recipe("x"), output_grad=replace(BLOCK, rounding="stochastic"), along_sum=True)
    layer, x = lowbit(recipe), drawn(6, 20)
    runs = [results(layer, x) for _ in range(225)]
    for index, exact in enumerate(results(plain(), x)[:3]):
        found = torch.stack([run[index] for run in runs]).double()
        assert ((found.mean(0) - exact).abs() <= 5 * found.std(0) / 15 + 1e-6).all()
    call = layer.calls.newest["weight"]
    seeds = [each.generator("output_grad", torch.device("cpu")).initial_seed() for each in (call, call.transposed())]
    assert seeds[0] != seeds[1]


@pytest.mark.parametrize("role", ROLES)
def test_each_role_can_be_cast_alone(role):
    """Only the results that depend on the role differ from those of a linear layer."""
    recipe = replace(Recipe("alone"), **{role: BLOCK})
    found = results(lowbit(recipe), drawn(6, 20))
    assert_same(found, by_hand(plain(), recipe, drawn(6, 20)))
    unlike = [not torch.equal(one, other) for one, other in zip(found, results(plain(), drawn(6, 20)), strict=True)]
    affected = {"forward": [True, False, False], "output_grad": [False, True, True]}
    affected |= {"backward_input": [False, False, True], "backward_weight": [False, True, False]}
    assert unlike == [*affected[role if role in affected else "forward"], False]


def test_forward_casts_alone_give_straight_through_gradients():
    """Gradients use the uncast input and weight."""
    layer = lowbit(Recipe("forward", forward_input=BLOCK, forward_weight=BLOCK))
    x = drawn(6, 20)
    y, dx, dw, db = results(layer, x)
    g = drawn(6, 12, seed=2)
    assert torch.equal(y, functional.linear(BLOCK(x), BLOCK(layer.weight.detach()), layer.bias.detach()))
    assert_same([dx, dw, db], [g @ layer.weight.detach(), g.T @ x, g.sum(0)])


def test_q_scalar_reaches_the_products():
    recipe = RECIPES["fp8"].with_every(q_scalar=0.25)
    found = results(lowbit(recipe), drawn(6, 20))
    assert_same(found, by_hand(plain(), recipe, drawn(6, 20)))
    assert not torch.equal(found[0], results(lowbit("fp8"), drawn(6, 20))[0])


def test_noncontiguous_tensors_are_cast_correctly():
    """A transposed input and an expanded gradient give the products of their cast matrices."""
    layer, x = lowbit("fp4_block"), drawn(20, 6).T.requires_grad_(True)
    layer(x).sum().backward()
    g = BLOCK(torch.ones(6, 12))
    assert torch.equal(x.grad, g @ BLOCK(layer.weight.detach()))
    assert torch.equal(layer.weight.grad, g.T @ BLOCK(x.detach()))


def test_gradients_of_several_passes_add_up():
    layer, (first, second) = lowbit(find_recipe("e2m1/nvfp4")), (drawn(6, 20), drawn(6, 20, seed=5))
    alone = [results(layer, x)[2] for x in (first, second)]
    layer.zero_grad()
    for x in (first, second):
        layer(x).backward(drawn(6, 12, seed=2))
    assert torch.equal(layer.weight.grad, alone[0] + alone[1])


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["fp32", "fp8", "fp4_block"])
def test_under_autocast_matrices_are_converted_and_then_cast(name, amp):
    precision = Precision.of(amp, torch.device("cpu"))
    x = drawn(6, 20)
    y, dx, dw, db = results(lowbit(name), x, precision.autocast(lambda layer, x: layer(x)))
    layer = plain().to(precision.dtype)
    expected = by_hand(layer, RECIPES[name], x.to(precision.dtype))
    assert_same([y, dx, dw, db], [expected[0], *[gradient.float() for gradient in expected[1:]]])


def test_float16_overflow_reaches_the_gradients():
    """The rows with infinity are non-finite, so that the loss scaler can detect them; the others stay finite."""
    layer, x = lowbit("fp8", dtype=torch.float16), drawn(6, 20, dtype=torch.float16).requires_grad_(True)
    gradient = torch.ones(6, 12, dtype=torch.float16)
    gradient[2, 3] = torch.inf
    layer(x).backward(gradient)
    assert not layer.weight.grad.isfinite().all()
    assert not x.grad[2].isfinite().any()
    assert x.grad[[0, 1, 3, 4, 5]].isfinite().all()


def test_loss_scaler_skips_the_overflowed_step():
    """The weight stays the same and the loss scale is halved."""
    layer = lowbit("fp4_block", bias=False)
    optimizer, scaler = torch.optim.SGD(layer.parameters(), lr=1.0), torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = layer.weight.detach().clone()
    with torch.autocast("cpu", torch.float16):
        loss = layer(drawn(6, 20)).float().square().sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(layer.weight, before)
    assert scaler.get_scale() == 2.0**39


def kept_for_backward(layer: nn.Module, x: Tensor) -> list[int]:
    """Return the addresses of the tensors with more than one value that a forward pass keeps."""
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.extend([tensor.data_ptr()] if tensor.numel() > 1 else [])
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    return kept


@pytest.mark.parametrize("recipe", ["fp4_block", "nvfp4", "fp8", STOCHASTIC, DELAYED], ids=named)
def test_backward_saves_only_input_and_weight(recipe):
    layer, x = lowbit(recipe), drawn(6, 20).requires_grad_(True)
    assert kept_for_backward(layer, x) == [x.data_ptr(), layer.weight.data_ptr()]
    assert kept_for_backward(layer, x.detach()) == [x.data_ptr()]
    layer.weight.requires_grad_(False)
    assert kept_for_backward(layer, x) == [layer.weight.data_ptr()]


def test_quantization_hook_receives_every_cast():
    """The results stay the same, an inactive hook receives nothing, and removal leaves no hook."""
    layer, recorded, unrecorded = lowbit("fp4_block"), Recorder(), Recorder(recorded=False)
    expected = results(layer, drawn(6, 20))
    handles = [layer.register_quantization_hook(listener) for listener in (recorded, unrecorded)]
    assert_same(results(layer, drawn(6, 20)), expected)
    assert recorded.roles == ["forward_input", "forward_weight", "output_grad", "backward_weight", "backward_input"]
    assert recorded.elements == 2 * 6 * 20 + 2 * 12 * 20 + 6 * 12
    assert unrecorded.roles == []
    for handle in handles:
        handle.remove()
    assert not layer._quantization_hooks


def test_unneeded_matrices_are_not_cast():
    layer, recorded = lowbit("fp4_block"), Recorder()
    layer.register_quantization_hook(recorded)
    layer.weight.requires_grad_(False)
    layer(drawn(6, 20)).sum().backward()
    assert recorded.roles == ["forward_input", "forward_weight"]


def test_integer_inputs_are_refused():
    with pytest.raises(UsageError, match=r"A tensor of torch\.int64 cannot be cast"):
        lowbit("fp4_block")(torch.ones(6, 20, dtype=torch.int64))


def test_the_gradient_can_be_differentiated_straight_through():
    layer, x = lowbit("fp4_block", bias=False), drawn(6, 20)
    weight, v = layer.weight, drawn(12, 20, seed=9)
    (gradient,) = torch.autograd.grad(layer(x).tanh().sum(), weight, create_graph=True)
    t = functional.linear(BLOCK(x), BLOCK(weight.detach())).tanh()
    assert torch.equal(gradient, BLOCK(1 - t**2).T @ BLOCK(x))
    (found,) = torch.autograd.grad((gradient * v).sum(), weight)
    second = -2 * t * (1 - t**2)
    torch.testing.assert_close(found, (second * (BLOCK(x) @ v.T)).T @ BLOCK(x))


def test_standalone_layer_shows_its_recipe():
    layer = BitLinear(20, 12, recipe=uniform("mine", BLOCK))
    assert "recipe='mine'" in repr(layer)
    assert layer(drawn(6, 20)).shape == (6, 12)


@pytest.mark.compile
def test_compiled_model_with_casts_keeps_every_bit():
    """The layers run between the compiled graphs with stochastic rounding."""
    ordinary, compiled = stack(STOCHASTIC), stack(STOCHASTIC)
    compiled.compile(backend="eager", dynamic=False)
    for seed in range(2):
        assert_same(results(compiled, drawn(6, 20, seed=seed)), results(ordinary, drawn(6, 20, seed=seed)))


def compiled_steps(recipe: str, *, listener: Recorder | None = None, convert: bool = True) -> list[Tensor]:
    model = stack(recipe)
    if not convert:
        dequantize_model(model)
    for layer in model[::2]:
        if listener is not None:
            layer.register_quantization_hook(listener)
    compile_model(model)
    results(model, drawn(6, 20))
    return results(model, drawn(6, 20, seed=3))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("recipe", ["e2m1/block/stochastic", "fp4_metis", "fp8"])
def test_quantization_hook_preserves_compiled_model(recipe):
    """Steps of a compiled model have the same bits with and without the hook."""
    recorded = Recorder()
    assert_same(compiled_steps(recipe, listener=recorded), compiled_steps(recipe))
    assert recorded.roles.count("forward_weight") == 2 * 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_compiled_model_without_casts_matches_linear_layers():
    """Several training steps are equal bit for bit."""
    assert_same(compiled_steps("fp32"), compiled_steps("fp32", convert=False))
