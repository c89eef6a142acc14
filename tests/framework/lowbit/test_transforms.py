"""Low-bit layers under torch.func, vmap and torch.export, on meta tensors and after to_empty, with their errors."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from loopscope.errors import LoopscopeError
from loopscope.lowbit import ROLES, BitLinear, Recipe, dequantize_model, find_recipe
from loopscope.lowbit.casts import Cast
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

from tests.framework.lowbit.lowbit_layers import (
    BLOCK,
    DELAYED,
    NARROW,
    STOCHASTIC,
    Recorder,
    assert_same,
    drawn,
    lowbit,
    named,
    results,
    stack,
)
from tests.support.cases import some_of

# torch's own forward mode raises it; it is a FutureWarning since torch 2.15
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore:.torch.jit:FutureWarning")
vectorises = pytest.mark.xfail(torch.__version__ < "2.13", raises=RuntimeError, reason="torch 2.9 lacks a rule")
Parameters = dict[str, Tensor]
PLAIN = [name for name in NARROW if name not in ("nvfp4", "fp8_delayed")]
RECIPES = [*NARROW, STOCHASTIC, DELAYED, "fp4_metis"]
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=named)


def loss_of(model: nn.Module) -> Callable[[Parameters, Tensor], Tensor]:
    return lambda parameters, x: functional_call(model, parameters, (x,)).sin().sum()


def trained(model: nn.Module) -> Parameters:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def tangents(parameters: Parameters, seed: int) -> Parameters:
    return {name: drawn(*each.shape, seed=seed + index) for index, (name, each) in enumerate(parameters.items())}


def inner(left: Parameters, right: Parameters) -> float:
    return sum((left[name] * right[name]).sum().item() for name in left)


@pytest.mark.some_rows(3)
@pytest.mark.guarantee("numbers-match-plain-formulas")
@every_recipe
def test_functional_grad_matches_backward(recipe):
    """torch.func.grad gives the same gradients and histories as backward(), bit for bit."""
    functional, ordinary = stack(recipe), stack(recipe)
    for seed in range(3):
        x = drawn(6, 20, seed=seed)
        found = grad(loss_of(functional))(trained(functional), x)
        ordinary.zero_grad()
        ordinary(x).sin().sum().backward()
        assert_same([*found.values()], [each.grad for each in trained(ordinary).values()])
    assert_same([*functional.buffers()], [*ordinary.buffers()])


@pytest.mark.longer
@pytest.mark.some_rows(3)
@vectorises
@pytest.mark.parametrize("recipe", PLAIN)
def test_vmapped_gradients_match_single_samples(recipe):
    model, x = stack(recipe), drawn(5, 3, 20)
    together = vmap(grad(loss_of(model)), (None, 0))(trained(model), x)
    for index, sample in enumerate(x):
        alone = grad(loss_of(model))(trained(model), sample)
        for name, each in alone.items():
            torch.testing.assert_close(together[name][index], each, rtol=1e-5, atol=1e-5)


@pytest.mark.some_rows(3)
@every_recipe
def test_jvp_is_straight_through_forward_casts(recipe):
    """The tangent is the derivative of the product of the cast input and the cast weight."""
    layer, x, dx = lowbit(recipe).eval(), drawn(6, 20), drawn(6, 20, seed=8)
    parameters, change = trained(layer), tangents(trained(layer), 9)
    state = layer.generator.get_state()
    run = lambda p, x: functional_call(layer, p, (x,))
    y, found = jvp(run, (parameters, x), (change, dx))
    layer.generator.set_state(state)
    call = layer.calls.start_call("weight", layer.recipe, layer.generator)
    narrow = [
        layer.quantize(role, each, call) for role, each in zip(ROLES[:2], (x, layer.weight.detach()), strict=True)
    ]
    assert torch.equal(y, nn.functional.linear(*narrow, layer.bias))
    torch.testing.assert_close(found, dx @ narrow[1].T + narrow[0] @ change["weight"].T + change["bias"])
    for partial in ({"weight": change["weight"]}, {"bias": change["bias"]}):
        name = next(iter(partial))
        assert (
            jvp(lambda each, name=name: run(parameters | {name: each}, x), (parameters[name],), (partial[name],))[
                1
            ].shape
            == y.shape
        )


@pytest.mark.parametrize("recipe", ["fp4_block", "fp8", "fp8_rowwise", STOCHASTIC, DELAYED], ids=named)
def test_functional_hessian_matches_autograd(recipe):
    """The Hessian product of torch.func is symmetric and linear and matches double backward."""
    model, x = stack(recipe).eval(), drawn(6, 20)
    parameters = trained(model)
    u, v = tangents(parameters, 5), tangents(parameters, 50)
    state = model[0].generator.get_state()
    _, times = vjp(lambda p: grad(loss_of(model))(p, x), parameters)
    of_u, of_v = times(u)[0], times(v)[0]
    assert inner(of_u, v) == pytest.approx(inner(of_v, u), rel=1e-4, abs=1e-4)
    both = times({name: u[name] + 2 * v[name] for name in u})[0]
    model[0].generator.set_state(state)
    gradient = torch.autograd.grad(loss_of(model)(parameters, x), [*parameters.values()], create_graph=True)
    plain = torch.autograd.grad(gradient, [*parameters.values()], [*u.values()])
    for (name, each), other in zip(of_u.items(), plain, strict=True):
        torch.testing.assert_close(both[name], each + 2 * of_v[name], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(each, other, rtol=1e-4, atol=1e-4)


@pytest.mark.some_rows(3)
@vectorises
@pytest.mark.parametrize("recipe", PLAIN)
def test_chunked_jacobian_matches_whole_jacobian(recipe):
    """Every chunk casts its own output gradients."""
    model, x = stack(recipe), drawn(2, 20)
    run = lambda parameters: functional_call(model, parameters, (x,)).reshape(-1)
    whole, pieces = jacrev(run)(trained(model)), jacrev(run, chunk_size=5)(trained(model))
    for name, each in whole.items():
        torch.testing.assert_close(pieces[name], each, rtol=1e-5, atol=1e-5)


def test_forward_over_reverse_goes_through_the_gradient():
    model, x = stack("fp4_block"), drawn(6, 20)
    parameters = trained(model)
    direction = tangents(parameters, 5)
    _, found = jvp(lambda p: grad(loss_of(model))(p, x), (parameters,), (direction,))
    assert all(each.isfinite().all() and each.abs().max() > 0 for each in found.values())


@pytest.mark.parametrize("recipe", ["nvfp4", "fp4_metis", STOCHASTIC, DELAYED], ids=named)
def test_unvectorizable_casts_are_refused(recipe):
    """Stochastic rounding and histories under vmap raise an error with the alternatives."""
    model = stack(recipe)
    with pytest.raises(LoopscopeError, match=r"torch\.vmap cannot vectorise the random .* nearest rounding and a rule"):
        vmap(grad(loss_of(model)), (None, 0))(trained(model), drawn(5, 3, 20))


@vectorises
def test_vmap_in_evaluation_keeps_histories():
    """Evaluation under vmap matches single samples and leaves all buffers unchanged."""
    model = stack(DELAYED)
    results(model, drawn(6, 20))
    model.eval()
    before = [buffer.clone() for buffer in model.buffers()]
    together = vmap(model)(drawn(5, 3, 20))
    torch.testing.assert_close(together, torch.stack([model(each) for each in drawn(5, 3, 20)]))
    assert_same([*model.buffers()], before)


@vectorises
def test_quantization_hooks_skip_vmapped_casts():
    """Quantization hooks receive no vmapped casts, but all casts of an ordinary gradient."""
    model, recorded = stack("fp4_block"), Recorder()
    for layer in model[::2]:
        layer.register_quantization_hook(recorded)
    vmap(grad(loss_of(model)), (None, 0))(trained(model), drawn(5, 3, 20))
    assert recorded.roles == []
    grad(loss_of(model))(trained(model), drawn(3, 20))
    assert sorted(set(recorded.roles)) == sorted(ROLES)


@pytest.mark.longer
@pytest.mark.guarantee("numbers-match-plain-formulas")
@pytest.mark.parametrize("recipe", some_of([*NARROW, "fp4_metis"], 3))
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.slow_rows("nvfp4", "fp8_rowwise")
def test_exported_model_matches_original(recipe):
    """The export has the bits of the model and draws no random number."""
    model, x = stack(recipe).eval(), drawn(6, 20)
    state = model[0].generator.get_state()
    exported = torch.export.export(model, (x,), strict=False).module()
    assert torch.equal(model[0].generator.get_state(), state)
    assert torch.equal(exported(drawn(6, 20, seed=4)), model(drawn(6, 20, seed=4)))


def test_exporting_stochastic_rounding_is_refused(monkeypatch):
    """The error suggests dequantize_model."""
    # torch 2.9 leaves a hook on all modules behind when an export raises; this takes it away from later tests.
    monkeypatch.setattr(torch.nn.modules.module, "_global_buffer_registration_hooks", OrderedDict())
    with pytest.raises(LoopscopeError, match=r"^torch\.export cannot record stochastic rounding .*dequantize_model\.$"):
        torch.export.export(stack(STOCHASTIC), (drawn(6, 20),), strict=False)


@pytest.mark.compile
def test_full_graph_compilation_is_refused():
    """The error gives the reason and suggests leaving out fullgraph=True."""
    model = torch.compile(stack("fp4_block"), fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"runs between graphs.*omit fullgraph=True"):
        model(drawn(6, 20))


@pytest.mark.longer
@pytest.mark.some_rows(3)
@every_recipe
def test_meta_tensors_go_through_forward_and_backward(recipe):
    model = stack(recipe).to("meta")
    y = model(torch.empty(6, 20, device="meta"))
    y.sum().backward()
    assert (y.device.type, y.shape) == ("meta", (6, 12))
    assert all(each.grad.shape == each.shape for each in trained(model).values())
    rounded, counts = Cast("e2m1", "nvfp4", rows=16).with_counts(torch.empty(20, 30, device="meta"))
    assert rounded.is_meta
    assert counts.sums.is_meta


def test_histories_begin_with_nothing_after_to_empty():
    layer = BitLinear(20, 12, device="meta", recipe=DELAYED)
    filled = torch.full((64,), 1e30)  # memory that an empty tensor may get
    del filled
    layer.to_empty(device="cpu")
    assert all(buffer.device.type == "cpu" and not buffer.any() for buffer in layer.buffers())
    source = lowbit(DELAYED)
    layer.load_state_dict(source.state_dict())
    assert_same(results(layer, drawn(6, 20)), results(source, drawn(6, 20)))


def test_histories_stay_float32_and_unchanged():
    """Conversions and to_empty on the same device keep the values, and dequantizing removes the buffers."""
    layer = lowbit(DELAYED)
    results(layer, drawn(6, 20) * 1e6)
    before = [buffer.clone() for buffer in layer.buffers()]
    assert_same([*layer.half().float().double().float().buffers()], before)
    layer.to_empty(device="cpu")
    assert_same([*layer.buffers()], before)
    dequantize_model(layer)
    assert not [*layer.buffers()]


def test_history_length_follows_the_recipe():
    """The history keeps the last magnitudes, and the scale uses the most recent one."""
    recipe = find_recipe("e4m3/delayed/history=3/amax=most_recent")
    layer = lowbit(recipe)
    for size in (1.0, 8.0, 2.0, 4.0):
        layer(drawn(6, 20) * size)
    assert torch.equal(layer.forward_input_history, drawn(6, 20).abs().max() * torch.tensor([8.0, 2.0, 4.0]))
    expected = Cast("e4m3", "delayed")(drawn(6, 20), earlier=layer.forward_input_history[-1:])
    alone = lowbit(replace(Recipe("x"), forward_input=recipe.forward_input))
    alone.forward_input_history.copy_(layer.forward_input_history)
    assert torch.equal(alone(drawn(6, 20)), nn.functional.linear(expected, alone.weight, alone.bias))
    assert BLOCK.history_length() == 0
