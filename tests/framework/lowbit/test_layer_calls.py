"""Calls of low-bit layers: random draws and histories, activation checkpointing, second derivatives, copies."""

import copy
import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from loopscope.errors import LoopscopeError
from loopscope.lowbit import ROLES, Recipe, dequantize_model, find_recipe
from loopscope.lowbit.casts import Cast
from loopscope.tensors import axpy, dot
from loopscope.training.loss_probe import ExactHessian
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.framework.lowbit.lowbit_layers import (
    BLOCK,
    DELAYED,
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


def test_stochastic_rounding_draws_from_layer_generator():
    """The global generator is unchanged, and restoring the layer's generator repeats the results."""
    layer, x = lowbit(STOCHASTIC), drawn(6, 20)
    state, own = torch.get_rng_state(), layer.generator.get_state()
    first, second = results(layer, x), results(layer, x)
    assert all(not torch.equal(one, other) for one, other in zip(first[:3], second[:3], strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    layer.generator.set_state(own)
    assert_same(results(layer, x), first)


@pytest.mark.longer
def test_stochastic_rounding_is_unbiased():
    """The means of 225 runs are within five standard errors of the full-precision results."""
    layer, x = lowbit(STOCHASTIC), drawn(6, 20)
    runs = [results(layer, x) for _ in range(225)]
    for index, exact in enumerate(results(plain(), x)[:3]):
        found = torch.stack([run[index] for run in runs]).double()
        error = found.std(0) / 15
        assert ((found.mean(0) - exact).abs() <= 5 * error + 1e-6).all()


def test_products_of_a_pass_draw_separately():
    layer = lowbit(replace(Recipe("x"), forward_input=replace(BLOCK, rounding="stochastic")))
    seen = {layer.calls.start_call("weight", layer.recipe, layer.generator).seed for _ in range(50)}
    assert len(seen) == 50


def in_pieces(model: nn.Sequential, x: Tensor, *, reentrant: bool = False) -> Tensor:
    """Run a stack with its first four modules and the last one as two regions of activation checkpointing."""
    middle = checkpoint(model[:4], x, use_reentrant=reentrant)
    return checkpoint(model[4], middle, use_reentrant=reentrant)


@pytest.mark.longer
@pytest.mark.parametrize("recipe", ["fp4_block", STOCHASTIC, DELAYED, "fp4_metis"], ids=named)
def test_activation_checkpointing_changes_no_bit(recipe):
    ordinary, saving = stack(recipe), stack(recipe)
    for seed in range(4):
        assert_same(results(saving, drawn(6, 20, seed=seed), in_pieces), results(ordinary, drawn(6, 20, seed=seed)))
    assert_same([*saving.buffers()], [*ordinary.buffers()])
    assert torch.equal(saving[0].generator.get_state(), ordinary[0].generator.get_state())


def test_recomputed_casts_are_counted_once():
    model, recorded = stack("fp4_block"), Recorder()
    for index in (0, 2, 4):
        model[index].register_quantization_hook(recorded)
    results(model, drawn(6, 20), in_pieces)
    assert {role: recorded.roles.count(role) for role in ROLES} == dict.fromkeys(ROLES, 3)


@pytest.mark.parametrize(
    ("recipe", "counts"),
    [("fp8", 3), ("fp8,backward_weight=e5m2/current", 4), ("e2m1/block/stochastic", 5), ("e4m3/delayed", 5)],
)
def test_repeated_backward_cast_is_not_recounted(recipe, counts, monkeypatch):
    """Hooks receive every role, but a backward cast equal to the forward one is not computed twice."""
    calls, count = [], Cast.with_counts

    def with_counts(cast: Cast, *given: Tensor, **options: Any) -> Any:
        calls.append(cast)
        return count(cast, *given, **options)

    monkeypatch.setattr(Cast, "with_counts", with_counts)
    layer, recorded = lowbit(find_recipe(recipe)), Recorder()
    layer.register_quantization_hook(recorded)
    results(layer, drawn(6, 20))
    assert len(calls) == counts
    assert sorted(recorded.roles) == sorted(ROLES)


@pytest.mark.parametrize("recipe", [STOCHASTIC, DELAYED], ids=named)
def test_reentrant_checkpointing_of_casts_that_vary_is_refused(recipe):
    with pytest.raises(LoopscopeError, match="pass use_reentrant=False"):
        results(stack(recipe), drawn(6, 20), lambda model, x: in_pieces(model, x, reentrant=True))


@pytest.mark.parametrize("recipe", ["fp4_block", "e2m1/block,output_grad=e2m1/block/stochastic", "fp4_metis"])
def test_reentrant_checkpointing_of_other_casts_changes_no_bit(recipe):
    found = results(stack(find_recipe(recipe)), drawn(6, 20), lambda model, x: in_pieces(model, x, reentrant=True))
    assert_same(found, results(stack(find_recipe(recipe)), drawn(6, 20)))


def test_repeating_an_older_call_is_refused():
    """Activation checkpointing raises an error if the layer was called again before backward."""
    layer, x = lowbit(STOCHASTIC), drawn(6, 20).requires_grad_(True)
    early = checkpoint(layer, x, use_reentrant=False)
    layer(x)
    with pytest.raises(LoopscopeError, match="run backward before the layer is called again"):
        early.sum().backward()


def test_delayed_scaling_uses_earlier_tensors():
    layer, cast = lowbit(DELAYED), Cast("e4m3", "delayed")
    for number, size in enumerate((1.0, 8.0, 0.5)):
        x = drawn(6, 20) * size
        earlier = layer.forward_input_history.clone()
        y = layer(x)
        weight = cast(layer.weight.detach(), earlier=layer.weight.detach().abs().max())
        assert torch.equal(y, functional.linear(cast(x, earlier=earlier), weight, layer.bias)), number
    peaks = drawn(6, 20).abs().max() * torch.tensor([1.0, 8.0, 0.5])
    assert torch.equal(layer.forward_input_history[-3:], peaks)


def test_history_advances_once_per_training_pass():
    """Evaluation leaves the histories unchanged."""
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


def hessian(model: nn.Module) -> tuple[ExactHessian, dict[str, nn.Parameter]]:
    parameters = dict(model.named_parameters())
    return ExactHessian(lambda: model(drawn(6, 20)).sin().sum(), parameters), parameters


@pytest.mark.parametrize("recipe", ["fp4_block", "fp8", STOCHASTIC, DELAYED], ids=named)
def test_hessian_is_symmetric_and_linear(recipe):
    """Hessian-vector products leave the histories of the layers unchanged."""
    model = stack(recipe)
    operator, parameters = hessian(model)
    before = [buffer.clone() for buffer in model.buffers()]
    u, v = [{name: drawn(*leaf.shape, seed=seed) for name, leaf in parameters.items()} for seed in (5, 6)]
    torch.testing.assert_close(dot(u, operator.times(v)), dot(v, operator.times(u)), rtol=1e-4, atol=1e-4)
    both = operator.times({name: u[name] + 2 * v[name] for name in u})
    for name, product in axpy(2.0, operator.times(v), operator.times(u)).items():
        torch.testing.assert_close(both[name], product, rtol=1e-3, atol=1e-4)
    assert_same([*model.buffers()], before)


def test_fp32_hessian_matches_plain_linear_layers():
    torch.manual_seed(0)
    reference = stack("fp32")
    dequantize_model(reference)
    products = []
    for model in (stack("fp32"), reference):
        operator, parameters = hessian(model)
        products.append(operator.times({name: drawn(*leaf.shape, seed=5) for name, leaf in parameters.items()}))
    assert_same([*products[0].values()], [*products[1].values()])


def test_model_copy_has_its_own_generator():
    """The layers of the copy share one generator, which is not that of the original."""
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
