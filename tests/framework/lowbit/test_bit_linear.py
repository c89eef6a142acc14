"""Low-bit linear layers: their products and gradients against compositions by hand, bit for bit."""

import copy
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from framework.compilation import compile_model
from framework.curvature import ExactHessian
from framework.errors import LoopscopeError, UsageError
from framework.lowbit.calls import LayerCall
from framework.lowbit.casts import Cast
from framework.lowbit.conversion import dequantize_model, quantize_model
from framework.lowbit.counts import Counts
from framework.lowbit.linear import BitLinear
from framework.lowbit.linear_function import QuantizedLinear
from framework.lowbit.recipes import RECIPES, Recipe, find_recipe, uniform
from framework.lowbit.roles import ROLES
from framework.param_vectors import axpy, dot
from framework.precision import Precision

NARROW = [name for name in RECIPES if name not in ("fp32", "fp4_metis")]
BLOCK = Cast("e2m1", "block")
STOCHASTIC = find_recipe("e2m1/block/stochastic")
DELAYED = find_recipe("fp8").with_every(rule="delayed")
SHAPES = [(6, 20), (2, 3, 20), (2, 1, 3, 20), (0, 20), (20,)]


def named(recipe: Recipe | str) -> str:
    return recipe if isinstance(recipe, str) else "delayed" if recipe is DELAYED else recipe.name


def drawn(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain(bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(20, 12, bias, dtype=dtype)


def lowbit(recipe: Recipe | str, bias: bool = True, dtype: torch.dtype = torch.float32) -> BitLinear:
    layer = plain(bias, dtype)
    quantize_model(layer, recipe)
    assert isinstance(layer, BitLinear)
    return layer


def results(
    layer: nn.Module, x: Tensor, run: Callable[[nn.Module, Tensor], Tensor] = lambda f, x: f(x)
) -> list[Tensor]:
    """Return output, input gradient and parameter gradients for an output gradient that is no constant."""
    x = x.clone().requires_grad_(True)
    layer.zero_grad()
    y = run(layer, x)
    y.backward(drawn(*y.shape, seed=2, dtype=y.dtype))
    return [y.detach(), x.grad, *[parameter.grad for parameter in layer.parameters() if parameter.requires_grad]]


def by_hand(layer: nn.Linear, recipe: Recipe, x: Tensor) -> list[Tensor]:
    """Return the same by casts and matrix products alone."""
    cast = lambda role, values: recipe.casts[role](values) if role in recipe.casts else values
    weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
    y = functional.linear(cast("forward_input", x), cast("forward_weight", weight), bias)
    g = drawn(*y.shape, seed=2, dtype=y.dtype).reshape(-1, y.shape[-1])
    rounded = cast("output_grad", g)
    dx = (rounded @ cast("backward_weight", weight)).reshape(x.shape)
    dw = rounded.T @ cast("backward_input", x).reshape(-1, x.shape[-1])
    return [y, dx, dw, *([] if bias is None else [g.sum(0)])]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_recipe_without_casts_is_a_linear_layer_bit_for_bit(shape, bias):
    assert_same(results(lowbit("fp32", bias), drawn(*shape)), results(plain(bias), drawn(*shape)))


class NoCasts:
    def quantize(self, role: Any, values: Tensor, call: Any) -> Tensor:
        return values


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES[:-1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_without_casts_the_function_itself_is_that_of_a_linear_layer_bit_for_bit(shape, bias, dtype):
    run = lambda layer, x: QuantizedLinear.apply(x, layer.weight, layer.bias, NoCasts(), LayerCall())
    x, layer = drawn(*shape, dtype=dtype), plain(bias, dtype)
    assert_same(results(layer, x, run), results(layer, x))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NARROW)
def test_products_and_gradients_are_those_of_the_cast_matrices_bit_for_bit(name, shape, bias):
    x = drawn(*shape)
    assert_same(results(lowbit(name, bias), x), by_hand(plain(bias), RECIPES[name], x))


@pytest.mark.parametrize("role", ROLES)
def test_each_role_can_be_cast_alone(role):
    recipe = replace(Recipe("alone"), **{role: BLOCK})
    found = results(lowbit(recipe), drawn(6, 20))
    assert_same(found, by_hand(plain(), recipe, drawn(6, 20)))
    unlike = [not torch.equal(one, other) for one, other in zip(found, results(plain(), drawn(6, 20)), strict=True)]
    affected = {"forward": [True, False, False], "output_grad": [False, True, True]}
    affected |= {"backward_input": [False, False, True], "backward_weight": [False, True, False]}
    assert unlike == [*affected[role if role in affected else "forward"], False]


def test_with_forward_casts_alone_the_gradient_is_straight_through():
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


def test_a_transposed_input_and_an_expanded_gradient_are_cast_as_any():
    layer, x = lowbit("fp4_block"), drawn(20, 6).T.requires_grad_(True)
    layer(x).sum().backward()
    g = BLOCK(torch.ones(6, 12))
    assert torch.equal(x.grad, g @ BLOCK(layer.weight.detach()))
    assert torch.equal(layer.weight.grad, g.T @ BLOCK(x.detach()))


def test_gradients_of_several_passes_add_up():
    layer, (first, second) = lowbit("nvfp4"), (drawn(6, 20), drawn(6, 20, seed=5))
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


def test_an_overflow_of_float16_reaches_the_gradients_so_that_the_scaler_sees_it():
    layer, x = lowbit("fp8", dtype=torch.float16), drawn(6, 20, dtype=torch.float16).requires_grad_(True)
    gradient = torch.ones(6, 12, dtype=torch.float16)
    gradient[2, 3] = torch.inf
    layer(x).backward(gradient)
    assert not layer.weight.grad.isfinite().all()
    assert not x.grad[2].isfinite().any()
    assert x.grad[[0, 1, 3, 4, 5]].isfinite().all()


def test_a_scaler_skips_the_step_of_such_an_overflow():
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
def test_kept_for_backward_are_input_and_weight_themselves(recipe):
    layer, x = lowbit(recipe), drawn(6, 20).requires_grad_(True)
    assert kept_for_backward(layer, x) == [x.data_ptr(), layer.weight.data_ptr()]
    assert kept_for_backward(layer, x.detach()) == [x.data_ptr()]
    layer.weight.requires_grad_(False)
    assert kept_for_backward(layer, x) == [layer.weight.data_ptr()]


class Heard:
    """A listener that counts the casts of each role."""

    def __init__(self, heard: bool = True) -> None:
        self.heard = heard
        self.roles: list[str] = []
        self.elements = 0

    def is_heard(self) -> bool:
        return self.heard

    def record(self, role: str, counts: Counts) -> None:
        self.roles.append(role)
        self.elements += int(counts.by_name()["total_elements"])


def test_a_listener_is_told_of_every_cast_and_changes_none():
    layer, heard, unheard = lowbit("fp4_block"), Heard(), Heard(heard=False)
    expected = results(layer, drawn(6, 20))
    handles = [layer.register_quantization_hook(listener) for listener in (heard, unheard)]
    assert_same(results(layer, drawn(6, 20)), expected)
    assert heard.roles == ["forward_input", "forward_weight", "output_grad", "backward_weight", "backward_input"]
    assert heard.elements == 2 * 6 * 20 + 2 * 12 * 20 + 6 * 12
    assert unheard.roles == []
    for handle in handles:
        handle.remove()
    assert not layer._quantization_hooks


def test_what_no_gradient_needs_is_not_cast():
    layer, heard = lowbit("fp4_block"), Heard()
    layer.register_quantization_hook(heard)
    layer.weight.requires_grad_(False)
    layer(drawn(6, 20)).sum().backward()
    assert heard.roles == ["forward_input", "forward_weight"]


def test_integers_are_refused_in_a_sentence():
    with pytest.raises(UsageError, match=r"A tensor of torch\.int64 cannot be cast"):
        lowbit("fp4_block")(torch.ones(6, 20, dtype=torch.int64))


def test_stochastic_rounding_draws_from_the_generator_of_the_layers_alone():
    layer, x = lowbit(STOCHASTIC), drawn(6, 20)
    state, own = torch.get_rng_state(), layer.generator.get_state()
    first, second = results(layer, x), results(layer, x)
    assert all(not torch.equal(one, other) for one, other in zip(first[:3], second[:3], strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    layer.generator.set_state(own)
    assert_same(results(layer, x), first)


def test_stochastic_rounding_has_the_products_of_full_precision_as_its_mean():
    layer, x = lowbit(STOCHASTIC), drawn(6, 20)
    runs = [results(layer, x) for _ in range(225)]
    for index, exact in enumerate(results(plain(), x)[:3]):
        found = torch.stack([run[index] for run in runs]).double()
        error = found.std(0) / 15
        assert ((found.mean(0) - exact).abs() <= 5 * error + 1e-6).all()


def test_the_products_of_a_pass_draw_apart():
    layer = lowbit(replace(Recipe("x"), forward_input=replace(BLOCK, rounding="stochastic")))
    seen = {layer.calls.begin("weight", layer.recipe, layer.generator).seed for _ in range(50)}
    assert len(seen) == 50


def stack(recipe: Recipe | str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 12, bias=False))
    quantize_model(model, recipe, seed=4)
    return model


def in_pieces(model: nn.Sequential, x: Tensor, *, reentrant: bool = False) -> Tensor:
    """Run a stack with its first four modules and the last one as two regions of activation checkpointing."""
    middle = checkpoint(model[:4], x, use_reentrant=reentrant)
    return checkpoint(model[4], middle, use_reentrant=reentrant)


@pytest.mark.parametrize("recipe", ["fp4_block", STOCHASTIC, DELAYED, "fp4_metis"], ids=named)
def test_activation_checkpointing_changes_no_bit(recipe):
    ordinary, saving = stack(recipe), stack(recipe)
    for seed in range(4):
        assert_same(results(saving, drawn(6, 20, seed=seed), in_pieces), results(ordinary, drawn(6, 20, seed=seed)))
    assert_same([*saving.buffers()], [*ordinary.buffers()])
    assert torch.equal(saving[0].generator.get_state(), ordinary[0].generator.get_state())


def test_what_checkpointing_repeats_is_counted_once():
    model, heard = stack("fp4_block"), Heard()
    for index in (0, 2, 4):
        model[index].register_quantization_hook(heard)
    results(model, drawn(6, 20), in_pieces)
    assert {role: heard.roles.count(role) for role in ROLES} == dict.fromkeys(ROLES, 3)


@pytest.mark.parametrize("recipe", [STOCHASTIC, DELAYED], ids=named)
def test_reentrant_checkpointing_of_casts_that_vary_is_refused(recipe):
    with pytest.raises(LoopscopeError, match="pass use_reentrant=False"):
        results(stack(recipe), drawn(6, 20), lambda model, x: in_pieces(model, x, reentrant=True))


@pytest.mark.parametrize("recipe", ["fp4_block", "e2m1/block,output_grad=e2m1/block/stochastic", "fp4_metis"])
def test_reentrant_checkpointing_of_other_casts_changes_no_bit(recipe):
    found = results(stack(find_recipe(recipe)), drawn(6, 20), lambda model, x: in_pieces(model, x, reentrant=True))
    assert_same(found, results(stack(find_recipe(recipe)), drawn(6, 20)))


def test_repeating_a_call_that_is_not_the_newest_is_refused():
    layer, x = lowbit(STOCHASTIC), drawn(6, 20).requires_grad_(True)
    early = checkpoint(layer, x, use_reentrant=False)
    layer(x)
    with pytest.raises(LoopscopeError, match="run backward before the layer is called again"):
        early.sum().backward()


def test_delayed_scaling_scales_by_the_tensors_before():
    layer, cast = lowbit(DELAYED), Cast("e4m3", "delayed")
    for number, size in enumerate((1.0, 8.0, 0.5)):
        x = drawn(6, 20) * size
        earlier = layer.forward_input_history.clone()
        y = layer(x)
        weight = cast(layer.weight.detach(), earlier=layer.weight.detach().abs().max())
        assert torch.equal(y, functional.linear(cast(x, earlier=earlier), weight, layer.bias)), number
    peaks = drawn(6, 20).abs().max() * torch.tensor([1.0, 8.0, 0.5])
    assert torch.equal(layer.forward_input_history[-3:], peaks)


def test_the_history_goes_on_once_a_training_pass_and_not_in_evaluation():
    layer = lowbit(DELAYED)
    results(layer, drawn(6, 20))
    assert all(int((buffer > 0).sum()) == 1 for buffer in layer.buffers())
    before = [buffer.clone() for buffer in layer.buffers()]
    layer.eval()
    results(layer, drawn(6, 20) * 3)
    assert_same([*layer.buffers()], before)
    assert sorted(name for name, _ in layer.named_buffers()) == sorted(f"{role}_history" for role in ROLES)


def test_histories_are_no_part_of_the_state_dict():
    assert list(lowbit(DELAYED).state_dict()) == ["weight", "bias"]


def test_the_gradient_can_be_differentiated_straight_through():
    layer, x = lowbit("fp4_block", bias=False), drawn(6, 20)
    weight, v = layer.weight, drawn(12, 20, seed=9)
    (gradient,) = torch.autograd.grad(layer(x).tanh().sum(), weight, create_graph=True)
    t = functional.linear(BLOCK(x), BLOCK(weight.detach())).tanh()
    assert torch.equal(gradient, BLOCK(1 - t**2).T @ BLOCK(x))
    (found,) = torch.autograd.grad((gradient * v).sum(), weight)
    second = -2 * t * (1 - t**2)
    torch.testing.assert_close(found, (second * (BLOCK(x) @ v.T)).T @ BLOCK(x))


def hessian(model: nn.Module) -> tuple[ExactHessian, dict[str, nn.Parameter]]:
    parameters = dict(model.named_parameters())
    return ExactHessian(lambda: model(drawn(6, 20)).sin().sum(), parameters), parameters


@pytest.mark.parametrize("recipe", ["fp4_block", "fp8", STOCHASTIC, DELAYED], ids=named)
def test_the_hessian_is_symmetric_and_linear_and_leaves_histories_alone(recipe):
    model = stack(recipe)
    operator, parameters = hessian(model)
    before = [buffer.clone() for buffer in model.buffers()]
    u, v = [{name: drawn(*leaf.shape, seed=seed) for name, leaf in parameters.items()} for seed in (5, 6)]
    torch.testing.assert_close(dot(u, operator.times(v)), dot(v, operator.times(u)), rtol=1e-4, atol=1e-4)
    both = operator.times({name: u[name] + 2 * v[name] for name in u})
    for name, product in axpy(2.0, operator.times(v), operator.times(u)).items():
        torch.testing.assert_close(both[name], product, rtol=1e-3, atol=1e-4)
    assert_same([*model.buffers()], before)


def test_the_hessian_of_the_recipe_without_casts_is_that_of_linear_layers():
    torch.manual_seed(0)
    reference = stack("fp32")
    dequantize_model(reference)
    products = []
    for model in (stack("fp32"), reference):
        operator, parameters = hessian(model)
        products.append(operator.times({name: drawn(*leaf.shape, seed=5) for name, leaf in parameters.items()}))
    assert_same([*products[0].values()], [*products[1].values()])


def test_copies_of_a_model_share_a_generator_of_their_own():
    model = stack(STOCHASTIC)
    twin = copy.deepcopy(model)
    assert twin[0].generator is twin[2].generator is not model[0].generator
    assert_same(results(twin, drawn(6, 20)), results(model, drawn(6, 20)))


def test_a_whole_model_is_saved_and_loaded():
    model = stack(DELAYED)
    results(model, drawn(6, 20))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert_same(results(again, drawn(6, 20)), results(model, drawn(6, 20)))


def test_a_layer_of_its_own_names_its_recipe():
    layer = BitLinear(20, 12, recipe=uniform("mine", BLOCK))
    assert "recipe='mine'" in repr(layer)
    assert layer(drawn(6, 20)).shape == (6, 12)


def test_a_compiled_model_runs_the_layers_between_its_graphs_with_the_same_bits():
    ordinary, compiled = stack(STOCHASTIC), stack(STOCHASTIC)
    compiled.compile(backend="eager", dynamic=False)
    for seed in range(2):
        assert_same(results(compiled, drawn(6, 20, seed=seed)), results(ordinary, drawn(6, 20, seed=seed)))


def compiled_steps(recipe: str, *, listener: Heard | None = None, convert: bool = True) -> list[Tensor]:
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
def test_a_listener_changes_no_bit_of_a_compiled_model(recipe):
    heard = Heard()
    assert_same(compiled_steps(recipe, listener=heard), compiled_steps(recipe))
    assert heard.roles.count("forward_weight") == 2 * 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_without_casts_a_compiled_model_is_that_of_linear_layers_bit_for_bit():
    assert_same(compiled_steps("fp32"), compiled_steps("fp32", convert=False))
