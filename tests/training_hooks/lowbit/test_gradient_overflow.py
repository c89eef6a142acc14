"""gradient_overflow against brute force in real training, for quantised layers and for hypothetical casts."""

import json
import math
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from loopscope.checkpoints import load_checkpoint, save_checkpoint
from loopscope.errors import RunNotice, UnsuitableError, UsageError
from loopscope.hooks import HookPoint
from loopscope.loops import step_loop
from loopscope.lowbit import ROLES, find_recipe, quantize_model
from loopscope.lowbit.casts import Cast, FloatFormat, FormatRegistry, RuleRegistry, ScalingRule
from loopscope.training_hooks.lowbit import GradientOverflow, hypothetical_casts
from loopscope.training_hooks.lowbit.hypothetical_casts import HypotheticalCasts, linear_layers
from loopscope.training_hooks.lowbit.overflow_ledger import CUMULATIVE, READINGS
from loopscope.training_hooks.lowbit.product_errors import (
    LOWEST,
    exponents,
    gradient_operands,
    operands,
    product_errors,
    sample_rows,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support import SpyHook, at, differences, run_info
from tests.support.transfers import TransferCount
from tests.training_hooks.lowbit.low_bit_runs import LAYERS, Lost, LowBitRun, Recorder, cross_entropy, network

pytestmark = pytest.mark.filterwarnings("ignore:Step [0-9,]+")
ALWAYS = {"interval": 1}


def counts(lost: Lost) -> dict[str, float]:
    """Return the readings of what was lost, by name."""
    return {
        "total_elements": lost.elements,
        "total_overflow_elements": lost.overflowing,
        "total_quantizations": lost.quantizations,
        "overflow_count": lost.overflowing_quantizations,
        "element_overflow_rate": lost.overflowing / lost.elements,
        "batch_overflow_rate": lost.overflowing_quantizations / lost.quantizations,
        "underflow_rate": lost.underflowing / lost.elements,
        "upper_half_fraction": lost.upper_half / lost.elements,
        "excess_mean": sum(lost.excess) / len(lost.excess) if lost.excess else math.nan,
        "excess_max": max(lost.excess, default=math.nan),
        "quantization_error": lost.squared_error / lost.elements,
        "gradient_to_noise_ratio": math.sqrt(lost.squared_norm / lost.squared_error),
    }


def lost_in(tensors: Iterable[torch.Tensor], cast: Cast) -> Lost:
    lost = Lost()
    for tensor in tensors:
        lost.take(tensor, cast)
    return lost


def assert_reads(found: dict[str, Any], lost: Lost, role: str = "") -> None:
    """Fail unless what was reported of a role is what was lost: whole numbers exactly, the rest to rounding."""
    for name, value in counts(lost).items():
        reported = found[f"{name}_of/{role}" if role else name]
        close = pytest.approx(value, rel=1e-5, abs=1e-12, nan_ok=True)
        assert reported == (value if isinstance(value, int) else close), (role, name)


# Quantised layers


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.parametrize("recipe", ["fp8", "fp4_direct", "e2m1/nvfp4", "mxfp4"])
@pytest.mark.parametrize("parts", [1, 2])
def test_quantized_layer_counts_match_brute_force(recipe, parts):
    """Every role of the layers matches, with and without micro-batches."""
    recorder = Recorder()
    run = LowBitRun(network(recipe), [recorder, GradientOverflow()], options={"accumulation_steps": parts}).train()
    for step in (1, 2, 3):
        found = run.values(step)
        for role in ROLES:
            tensors = [tensor for layer in LAYERS for tensor in recorder.seen.get((step, layer, role), [])]
            weights = parts if role.endswith("weight") else 1
            assert_reads(found, lost_in(tensors * weights, find_recipe(recipe).casts[role]), role)


@pytest.mark.longer
def test_role_and_cumulative_counts_add_up():
    """The sum over roles is the total, and the sum over steps is the cumulative count."""
    run = LowBitRun(network("nvfp4"), [GradientOverflow()]).train()
    summed = dict.fromkeys(("total_elements", "total_overflow_elements", "total_quantizations", "overflow_count"), 0)
    for step in (1, 2, 3):
        found = run.values(step)
        for name in summed:
            assert found[name] == sum(found[f"{name}_of/{role}"] for role in ROLES)
            summed[name] += found[name]
            assert found[f"cumulative_{name}"] == summed[name]
    assert summed["total_overflow_elements"] > 0
    assert found["cumulative_element_overflow_rate"] == summed["total_overflow_elements"] / summed["total_elements"]
    assert {name.removeprefix("cumulative_") for name in found if name.startswith("cumulative")} >= {*CUMULATIVE}


@pytest.mark.longer
def test_worst_layers_have_largest_rates():
    """With top_k=1, one layer has the highest overflow rate and one the lowest gradient-to-noise ratio."""
    recorder = Recorder()
    run = LowBitRun(network("e2m1/nvfp4"), [recorder, GradientOverflow(top_k=1)], steps=1).train()
    found, cast = run.values(1), find_recipe("e2m1/nvfp4").output_grad
    lost = {layer: counts(lost_in(recorder.seen[1, layer, "output_grad"], cast)) for layer in LAYERS}
    worst = max(LAYERS, key=lambda layer: lost[layer]["element_overflow_rate"])
    rates = {name: value for name, value in found.items() if name.startswith("topk_") and "output_grad" in name}
    noisy = min(LAYERS, key=lambda layer: lost[layer]["gradient_to_noise_ratio"])
    assert rates == {
        f"topk_element_overflow_rate/{worst}/output_grad": lost[worst]["element_overflow_rate"],
        f"topk_gradient_to_noise_ratio/{noisy}/output_grad": pytest.approx(lost[noisy]["gradient_to_noise_ratio"]),
    }


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.guarantee("observers-change-nothing")
@pytest.mark.parametrize("recipe", ["nvfp4", "fp4_metis"])
def test_counting_with_stochastic_rounding_matches_bare_run(recipe):
    """The final states have the same bytes."""
    stochastic = find_recipe(recipe).with_every(rounding="stochastic", rule="nvfp4")
    counted = LowBitRun(network(stochastic), [GradientOverflow(formats="e2m1", interval=1)]).train()
    bare = LowBitRun(network(stochastic)).train()
    assert differences(counted.final, bare.final) == []
    assert counted.values(3)["cumulative_total_overflow_elements"] > 0


@pytest.mark.longer
def test_named_layers_are_reported_and_file_has_all(tmp_path):
    """The names select further layers of each role, and the file has every layer."""
    hook = GradientOverflow(top_k=0, names="2", write_all=True)
    run = LowBitRun(network("nvfp4"), [hook])
    run.manager.start(replace(run_info(run.task, run.manager, "step"), output_dir=tmp_path))
    step_loop(run.task, run.manager)
    worst = {name: value for name, value in run.values(3).items() if name.startswith("topk_")}
    assert {name.split("/")[1] for name in worst} == {"2"}
    assert len([name for name in worst if name.startswith("topk_element")]) == len(ROLES)
    lines = [json.loads(line) for line in next(tmp_path.glob("*.gradient_overflow.jsonl")).read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert {name: lines[2][name.split("/")[0].removeprefix("topk_")][name.partition("/")[2]] for name in worst} == worst
    assert {name.split("/")[0] for name in lines[0]["element_overflow_rate"]} == {*LAYERS}


@pytest.mark.longer
def test_steps_between_intervals_are_not_counted():
    """With count_interval=2, step 2 reports nothing and adds nothing to the cumulative counts."""
    hook = GradientOverflow(count_interval=2)
    run = LowBitRun(network("nvfp4"), [hook]).train()
    assert run.values(2) == {}
    first, last = run.values(1), run.values(3)
    assert last["cumulative_total_elements"] == first["total_elements"] + last["total_elements"]
    assert first["total_elements"] == last["total_elements"]


@pytest.mark.longer
def test_other_passes_of_a_step_are_not_counted():
    def forwards(ctx):
        ctx.forward(ctx.batch_data[0])
        ctx.compute_batch_gradients(ctx.batch_data)

    spy = at(SpyHook, HookPoint.PRE_STEP, HookPoint.POST_BACKWARD)(forwards)
    alone = LowBitRun(network("nvfp4"), [GradientOverflow()]).train()
    with_spy = LowBitRun(network("nvfp4"), [GradientOverflow(), spy]).train()
    assert with_spy.sink.rows("gradient_overflow/") == alone.sink.rows("gradient_overflow/")


@pytest.mark.compile
@pytest.mark.parametrize("options", [{}, {"formats": "e4m3", "of": "activations,gradients", "interval": 1}])
def test_compiled_model_counts_match_eager(options):
    model = network("nvfp4")
    model.compile(backend="eager", dynamic=False)
    compiled = LowBitRun(model, [GradientOverflow(**options)]).train()
    eager = LowBitRun(network("nvfp4"), [GradientOverflow(**options)]).train()
    for step in (1, 2, 3):
        assert compiled.values(step) == pytest.approx(eager.values(step), rel=1e-6, nan_ok=True)


@pytest.mark.longer
def test_float16_output_gradients_are_counted_scaled():
    """The largest scale grows by the loss scale of 1024."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled = LowBitRun(network("fp4_block"), [GradientOverflow()], steps=1, options={"scaler": scaler}).train()
    plain = LowBitRun(network("fp4_block"), [GradientOverflow()], steps=1).train()
    ratio = scaled.values(1)["scale_max_of/output_grad"] / plain.values(1)["scale_max_of/output_grad"]
    assert ratio == pytest.approx(1024.0, rel=1e-3)


# What if


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("subject", ["gradients", "weights", "activations"])
def test_hypothetical_cast_counts_match_brute_force(subject):
    """Gradients, weights and activations are counted for two formats and three rules."""
    recorder, gradients = Recorder(), {}
    keep = at(SpyHook, HookPoint.POST_BACKWARD)(lambda ctx: gradients.update({ctx.step: copies(ctx.model)}))
    hook = GradientOverflow(**ALWAYS, formats="e2m1,e4m3", rules="tensor, nvfp4, mx_floor", of=subject)
    run = LowBitRun(network(), [recorder, keep, hook], steps=2).train()
    for step in (1, 2):
        tensors = {
            "gradients": [gradient for _, gradient in gradients[step]],
            "weights": [weight for weight, _ in gradients[step]],
            "activations": [recorder.seen[step, layer, "forward_input"][0] for layer in LAYERS],
        }[subject]
        found = run.values(step)
        for cast in (Cast(form, rule) for form in ("e2m1", "e4m3") for rule in ("tensor", "nvfp4", "mx_floor")):
            assert_reads(found, lost_in(tensors, cast), f"{subject}/{cast.format}/{cast.rule}")


def copies(model: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(parameter.detach().clone(), parameter.grad.clone()) for parameter in model.parameters()]


@pytest.mark.longer
def test_a_delayed_rule_scales_by_the_firings_before():
    gradients: list[torch.Tensor] = []
    keep = at(SpyHook, HookPoint.POST_BACKWARD)(lambda ctx: gradients.append(ctx.model[0].weight.grad.clone()))
    hook = GradientOverflow(**ALWAYS, formats="e4m3", rules="delayed", of="gradients")
    model = network()
    for parameter in (model[0].bias, *model[2].parameters()):
        parameter.requires_grad_(False)
    run, cast = LowBitRun(model, [keep, hook]).train(), Cast("e4m3", "delayed")
    past = torch.zeros(16)
    for step, gradient in enumerate(gradients, start=1):
        assert_reads(
            run.values(step), Lost().take(gradient, cast, cast.scales(gradient, past)), "gradients/e4m3/delayed"
        )
        past = torch.cat([past[1:], gradient.abs().max().reshape(1)])
    assert run.values(3)["cumulative_element_overflow_rate_of/gradients/e4m3/delayed"] > 0


@pytest.mark.longer
@pytest.mark.parametrize("parts", [1, 3])
def test_hypothetical_casts_use_unscaled_batch_gradients(parts):
    """The loss scale makes no difference, and micro-batches are accumulated before the casts."""

    def asked(**options: Any) -> dict[str, Any]:
        hook = GradientOverflow(**ALWAYS, of="gradients")
        return LowBitRun(network(), [hook], steps=1, options={"accumulation_steps": parts, **options}).train().values(1)

    scaled = asked(scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    assert scaled == pytest.approx(asked(), rel=0, abs=0, nan_ok=True)
    assert scaled["total_quantizations_of/gradients/e2m1/tensor"] == 4


@pytest.mark.longer
def test_hypothetical_activation_casts_combine_micro_batches():
    """Totals, rates and the largest scale agree with those of the whole batch."""
    hook = GradientOverflow(**ALWAYS, of="activations", rules="block")
    run = LowBitRun(network(), [hook], steps=1, options={"accumulation_steps": 3}).train()
    whole = LowBitRun(network(), [GradientOverflow(**ALWAYS, of="activations", rules="block")], steps=1).train()
    role = "activations/e2m1/block"
    assert run.values(1)[f"total_quantizations_of/{role}"] == 3 * len(LAYERS)
    for name in ("total_elements", "underflow_rate", "quantization_error", "scale_max"):
        assert run.values(1)[f"{name}_of/{role}"] == pytest.approx(whole.values(1)[f"{name}_of/{role}"], rel=1e-5)


class Oddities(nn.Module):
    """Parameters of every kind: a number, none at all, bfloat16, complex, a sparse gradient, and none."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.narrow = nn.Parameter(torch.ones(3, 7, dtype=torch.bfloat16))
        self.complex = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.table = nn.Embedding(6, 20, sparse=True)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.table((x[:, :1].abs() < 0.5).long()).sum()
        return self.number * x.mean() + self.empty.sum() + self.narrow.float().sum() + self.complex.abs().sum() + rows


def test_only_real_gradients_of_parameters_are_counted():
    """Scalar, empty, bfloat16 and sparse gradients count; complex and missing gradients are left out."""
    hook = GradientOverflow(**ALWAYS, rules="block", of="gradients,weights")
    options = {"compute_loss": lambda model, batch: model(batch[0])}
    found = LowBitRun(Oddities(), [hook], steps=1, options=options, audit=False).train().values(1)
    assert found["total_quantizations_of/gradients/e2m1/block"] == 4
    assert found["total_elements_of/gradients/e2m1/block"] == 1 + 0 + 21 + 120
    assert found["total_elements_of/weights/e2m1/block"] == 1 + 0 + 21 + 120 + 9 + 3


@pytest.mark.longer
def test_hypothetical_casts_are_optional_in_quantized_models():
    """In quantized models the formats option requests the casts; other models always have them."""
    options = {"interval": 2, "of": "gradients"}
    both = LowBitRun(network("nvfp4"), [GradientOverflow(formats="e4m3", **options)]).train()
    assert not any("gradients/" in name for name in both.values(2))
    assert any("gradients/e4m3/nvfp4" in name for name in both.values(3))
    assert any("forward_input" in name for name in both.values(2))
    counted = LowBitRun(network("nvfp4"), [GradientOverflow()]).train()
    assert not any("gradients/" in name for name in counted.values(1))
    full = LowBitRun(network("fp32"), [GradientOverflow(of="gradients")]).train()
    assert any("gradients/e2m1/nvfp4" in name for name in full.values(1))
    assert "element_overflow_rate" not in full.values(1)


@pytest.mark.longer
def test_hook_works_across_quantized_and_plain_strategies():
    """One hook is reset and used on a quantized, a plain and another quantized model in turn."""
    hook = GradientOverflow()
    for recipe, steps in (("nvfp4", {1, 2, 3}), (None, {1}), ("fp8", {1, 2, 3})):
        run = LowBitRun(network(recipe), [hook])
        run.manager.hooks.reset()
        run.train()
        assert {step for step in (1, 2, 3) if run.values(step)} == steps


# Output gradients, which are what training casts, and what becomes of the products


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.guarantee("numbers-match-plain-formulas")
@pytest.mark.parametrize("rule", ["current", "nvfp4", "mx_even", "block"])
def test_output_gradient_casts_match_brute_force(rule):
    """Scales follow the summed dimension of each product; counts, exponents, errors and cosines agree."""
    recorder = Recorder()
    hook = GradientOverflow(**ALWAYS, formats="e2m1", rules=rule)
    model = network()
    weights = {layer: model.get_submodule(layer).weight.detach().clone() for layer in LAYERS}
    run, cast = LowBitRun(model, [recorder, hook], steps=1).train(), Cast("e2m1", rule)
    seen = {layer: [recorder.seen[1, layer, role][0] for role in ("forward_input", "output_grad")] for layer in LAYERS}
    found = run.values(1)
    for product, turned in (("dgrad", lambda g: g), ("wgrad", lambda g: g.T.contiguous())):
        gradients = [turned(gradient) for _, gradient in seen.values()]
        role = f"output_gradients/e2m1/{rule}/{product}"
        assert_reads(found, lost_in(gradients, cast), role)
        exponents = torch.cat([cast.scales(each).reshape(-1) for each in gradients]).log2().floor()
        prefix = f"scale_exponents_of/{role}/"
        histogram = {int(name.removeprefix(prefix)): n for name, n in found.items() if name.startswith(prefix)}
        assert histogram == {int(e): int((exponents == e).sum()) for e in exponents.unique()}
    operands = {
        "forward": [(x, weights[layer].T) for layer, (x, _) in seen.items()],
        "dgrad": [(g, weights[layer]) for layer, (_, g) in seen.items()],
        "wgrad": [(g.T, x) for x, g in seen.values()],
    }
    for product, pairs in operands.items():
        results = [(cast(a.contiguous()).double() @ cast(b.T.contiguous()).double().T, a.double() @ b.double())
                   for a, b in pairs]  # fmt: skip
        error = sum(float((narrow - exact).norm() / exact.norm()) for narrow, exact in results) / len(results)
        cosine = sum(float(torch.cosine_similarity(narrow.flatten(), exact.flatten(), 0)) for narrow, exact in results)
        assert found[f"product_error_of/{product}/e2m1/{rule}"] == pytest.approx(error, rel=1e-4)
        assert found[f"product_cosine_of/{product}/e2m1/{rule}"] == pytest.approx(cosine / len(results), rel=1e-4)


def test_forward_product_error_matches_low_bit_layer():
    """Relative error and cosine equal those of the output of the quantized layer."""
    x, weight = torch.randn(40, 20), torch.randn(12, 20)
    layer = nn.Linear(20, 12, bias=False)
    layer.weight.data = weight
    exact = layer(x).detach()
    quantize_model(layer, "e2m1/nvfp4")
    narrow = layer(x).detach()
    expected = (narrow - exact).norm() / exact.norm()
    layers = [operands(x, weight, torch.randn(40, 12))]
    error, cosine, number = product_errors(layers, [Cast("e2m1", "nvfp4")])[0, 0].tolist()
    assert (error, number) == (pytest.approx(float(expected), rel=1e-5), 1)
    assert cosine == pytest.approx(float(torch.cosine_similarity(narrow.flatten(), exact.flatten(), 0)), rel=1e-5)


@pytest.mark.guarantee("numbers-match-plain-formulas")
@pytest.mark.parametrize("rule", ["tensor", "current", "block", "nvfp4", "mx_floor"])
def test_sampled_rows_cast_like_whole_matrix(rule):
    """The sample keeps the row with the largest element, and the cast of the sample equals that of the same rows."""
    matrix, cast = torch.randn(500, 40), Cast("e2m1", rule)
    matrix[123, 7] = 50.0
    some = sample_rows(matrix, 64)
    assert len(some) == 64
    whole, places = cast(matrix), (some[:, None] == matrix).all(-1).int().argmax(1)
    assert 123 in places
    assert torch.equal(cast(some), whole[places])


def test_large_product_errors_match_full_products():
    """The estimate from sampled operands is within 10 percent for all three products."""
    torch.manual_seed(0)
    x, weight, gradient = torch.randn(700, 300), torch.randn(400, 300), torch.randn(700, 400)
    cast = Cast("e2m1", "nvfp4")
    (found,) = product_errors([operands(x, weight, gradient)], [cast])
    for index, (a, b) in enumerate([(x, weight), (gradient, weight.T), (gradient.T, x.T)]):
        exact, narrow = a @ b.T, cast(a.contiguous()) @ cast(b.contiguous()).T
        assert found[index, 0] == pytest.approx(float((narrow - exact).norm() / exact.norm()), rel=0.1)


def test_expert_weights_are_not_linear_layers():
    """A module with a three-dimensional parameter called weight is not counted as a linear layer."""
    experts = nn.Module()
    experts.weight = nn.Parameter(torch.randn(2, 3, 4))
    assert list(linear_layers(nn.ModuleList([experts, nn.Linear(4, 4)]))) == ["1"]


def test_degenerate_products_are_not_counted():
    """Products that are zero or have no rows report no error."""
    cast = Cast("e2m1", "nvfp4")
    zero = operands(torch.zeros(3, 20), torch.randn(4, 20), torch.zeros(3, 4))
    empty = operands(torch.zeros(0, 20), torch.randn(4, 20), torch.zeros(0, 4))
    assert product_errors([zero], [cast]).tolist() == [[[0.0] * 3] * 3]
    assert product_errors([empty], [cast])[0, :, 2].tolist() == [0.0] * 3


@pytest.mark.parametrize("shape", [(1, 20, 12), (7, 20, 12), (7, 1, 1), (90, 80, 70)])
def test_operands_survive_overwritten_sources(shape):
    """The operands share no storage with the tensors that they were taken from."""
    rows, inputs, outputs = shape
    given = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(rows, outputs)
    found, before = operands(*given), operands(*[each.clone() for each in given])
    for each in given:
        each.fill_(torch.nan)
    assert all(map(torch.equal, found, before))
    assert not {each.untyped_storage().data_ptr() for each in found} & {each.data_ptr() for each in given}


@pytest.mark.longer
def test_batched_product_errors_match_single_layers():
    """Layers of equal and different shapes are compared in one call and one by one."""
    casts = [Cast("e2m1", rule) for rule in ("tensor", "nvfp4", "mx_floor", "delayed", "block")]
    shapes = [(7, 20, 12), (90, 20, 12), (90, 80, 70), (90, 20, 12)]
    layers = [
        operands(torch.randn(rows, inputs) * 3**place, torch.randn(outputs, inputs), torch.randn(rows, outputs))
        for place, (rows, inputs, outputs) in enumerate(shapes)
    ]
    alone = sum(product_errors([layer], casts) for layer in layers)
    assert torch.allclose(product_errors(layers, casts), alone, rtol=1e-6, atol=0)


def test_many_operands_are_compared_early(monkeypatch):
    """Above the limit for kept operands, the comparison does not wait for the last one and gives the same result."""
    products = [(torch.randn(7, 20), torch.randn(12, 20), torch.randn(7, 12)) for _ in range(3)]
    found = []
    for kept in (hypothetical_casts.KEPT, 0):
        monkeypatch.setattr(hypothetical_casts, "KEPT", kept)
        casts = HypotheticalCasts([Cast("e2m1", "nvfp4")], ["output_gradients"])
        for each in products:
            casts.keep_products(*each)
        waiting = len(casts._products)
        casts.compare_products()
        found.append((waiting, casts.extra_numbers("output_gradients")[-9:]))
    (all_of_them, together), (none, apart) = found
    assert (all_of_them, none) == (3, 0)
    assert torch.allclose(together, apart)


class Hesitant(RuleRegistry.get("tensor")):
    """A rule that reads the values of a tensor, which is impossible in a vectorised call."""

    name = "hesitant"

    def scales(self, largest, number_format):
        return super().scales(largest, number_format) if float(largest) > 0 else torch.ones_like(largest)


def test_unvectorizable_rule_is_compared_per_matrix():
    """A rule that reads the values of a tensor gives the same errors as its vectorized parent."""
    layers = [operands(torch.randn(7, 20), torch.randn(12, 20), torch.randn(7, 12)) for _ in range(2)]
    expected = product_errors(layers, [Cast("e2m1", "tensor")])
    RuleRegistry.register(Hesitant)
    try:
        assert torch.allclose(product_errors(layers, [Cast("e2m1", "hesitant")]), expected)
    finally:
        RuleRegistry.unregister("hesitant")


@pytest.mark.parametrize("exponent", [-149, -130, -1, 0, 5, 127])
def test_exponents_match_powers_of_two(exponent):
    """Zeros have no exponent."""
    scales = torch.tensor([2.0**exponent, 0.0, 0.0])
    assert exponents(scales).nonzero().flatten().tolist() == [exponent - LOWEST]
    assert exponents(scales).sum() == 1


@pytest.mark.longer
def test_output_gradient_casts_match_bare_run():
    """The final states have the same bytes, and a layer that is used twice is counted twice."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner, self.outer = nn.Linear(40, 40), nn.Linear(40, 5)

        def forward(self, x):
            return self.outer(self.inner(self.inner(x).tanh()).tanh())

    asked, bare = LowBitRun(Twice(), [GradientOverflow(**ALWAYS)]).train(), LowBitRun(Twice()).train()
    assert differences(asked.final, bare.final) == []
    assert asked.values(2)["total_quantizations_of/output_gradients/e2m1/nvfp4/dgrad"] == 3
    assert asked.values(2)["product_error_of/forward/e2m1/nvfp4"] < 0.3


# A whole run


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("recipe", ["nvfp4", None])
@pytest.mark.slow_rows("nvfp4")
def test_resumed_run_matches_uninterrupted_run(recipe, tmp_path):
    """The cumulative counts and the delayed scales continue from the checkpoint."""

    def run() -> LowBitRun:
        hook = GradientOverflow(**ALWAYS, formats="e2m1", rules="delayed,nvfp4")
        return LowBitRun(network(recipe), [hook], steps=6)

    whole, first, rest = run().train(), run().train(until=3), run()
    save_checkpoint(
        tmp_path / "3.pt", first.state, first.manager.hooks.state_dict(), first.manager.isolation.run_streams
    )
    rest.manager.hooks.load_state_dict(load_checkpoint(tmp_path / "3.pt", rest.state))
    rest.train()
    for step in (4, 5, 6):
        assert rest.values(step) == pytest.approx(whole.values(step), rel=0, abs=0, nan_ok=True)


@pytest.mark.longer
def test_state_kept_elsewhere_between_calls_changes_no_number():
    def run(offload: bool) -> LowBitRun:
        hook = GradientOverflow(**ALWAYS, formats="e2m1", rules="delayed,nvfp4", of="activations,gradients")
        return LowBitRun(network("nvfp4"), [hook], offload=offload, audit=False).train()

    assert str(run(True).sink.rows("gradient_overflow/")) == str(run(False).sink.rows("gradient_overflow/"))


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("recipe", ["nvfp4", None])
def test_host_waits_once_per_step(recipe):
    """A quantization causes no wait, and the table at the end of the run causes one more."""
    hook, waits = GradientOverflow(**ALWAYS), []
    run = LowBitRun(network(recipe), [hook], audit=False)
    compute = hook.compute

    def counted(ctx):
        before = counter.count
        metrics = compute(ctx)
        waits.append(counter.count - before)
        return metrics

    hook.compute = counted
    bare = LowBitRun(network(recipe), audit=False)
    with TransferCount() as of_the_loop:
        bare.train()
    with TransferCount() as counter:
        run.train()
    assert waits == [0, 1] * 3
    assert counter.count == of_the_loop.count + 3 + 1  # for the table at the end


@pytest.mark.longer
@pytest.mark.parametrize("formats", ["", "e2m1"])
def test_run_ends_with_a_cumulative_table(formats):
    """The table holds the totals and rates of all roles together, of each role and of each hypothetical cast."""
    run = LowBitRun(network("nvfp4"), [GradientOverflow(formats=formats, interval=1, of="gradients")]).train()
    table, last = run.manager.hooks.tables["gradient_overflow"], run.values(3)
    asked = [f"gradients/e2m1/{rule}" for rule in ("tensor", "nvfp4", "mx_floor")] if formats else []
    assert list(table) == [*ROLES, "all roles", *asked]
    together = {name: value for name, value in table["all roles"].items() if name in CUMULATIVE}
    assert together == {name: last[f"cumulative_{name}"] for name in together}
    assert len(together) == 7
    for role in [*ROLES, *asked]:
        assert table[role]["element_overflow_rate"] == last[f"cumulative_element_overflow_rate_of/{role}"]
        assert table[role]["total_quantizations"] == sum(
            run.values(step)[f"total_quantizations_of/{role}"] for step in (1, 2, 3)
        )


# A new format or rule


class Powers(FloatFormat):
    """Nothing but 0, ±1, ±2 and ±4."""

    name = "e2m0"
    exponent_bits, mantissa_bits, maximum = 2, 0, 4.0


class Tight(ScalingRule):
    """Half of the scale that would cover the tensor."""

    name = "tight"
    overflows = True

    def scales(self, largest, number_format):
        return largest / number_format.maximum / 2


def test_custom_format_and_rule_match_brute_force():
    """The test registers a new format and a new scaling rule."""
    gradients: list[torch.Tensor] = []
    keep = at(SpyHook, HookPoint.POST_BACKWARD)(
        lambda ctx: gradients.extend(parameter.grad.clone() for parameter in ctx.model.parameters())
    )
    FormatRegistry.register(Powers)
    RuleRegistry.register(Tight)
    try:
        run = LowBitRun(
            network(), [keep, GradientOverflow(formats="e2m0", rules="tight", of="gradients")], steps=1
        ).train()
        lost = lost_in(gradients, Cast("e2m0", "tight"))
    finally:
        FormatRegistry.unregister("e2m0")
        RuleRegistry.unregister("tight")
    assert lost.overflowing > 0
    assert_reads(run.values(1), lost, "gradients/e2m0/tight")


# Warnings


def scaled_loss(factors: list[float]):
    """Return a loss that is multiplied by another factor in each call, which a delayed scale does not anticipate."""
    calls = iter(factors)
    return lambda model, batch: cross_entropy(model, batch) * next(calls)


def recorded_warnings(hook: GradientOverflow, factors: list[float]) -> list[tuple[bool, str]]:
    run = LowBitRun(network(), [hook], steps=len(factors), options={"compute_loss": scaled_loss(factors)}, audit=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.train()
    sentences = [(issubclass(item.category, RunNotice), str(item.message)) for item in caught]
    return [(notice, sentence) for notice, sentence in sentences if sentence.startswith("Step")]


def test_overflow_start_and_end_are_reported_once():
    """One warning lists the casts that overflow, and one notice reports that none overflows any more."""
    options = {"formats": "e4m3", "rules": "delayed", "of": "gradients"}
    hook = GradientOverflow(**ALWAYS, **options, overflow_threshold=0.2, noise_threshold=0)
    found = recorded_warnings(hook, [1.0, 1000.0, 1.0, 1.0])
    assert [(notice, sentence.split(":")[0]) for notice, sentence in found] == [(False, "Step 2"), (True, "Step 3")]
    assert "4 of 4 casts overflow in more than 0.2 of their elements: " in found[0][1]
    assert "0.weight gradients/e4m3/delayed (" in found[0][1]
    assert found[1][1] == "Step 3: no cast overflows in more than 0.2 of its elements any more."


def test_noisy_gradients_warn_and_weights_do_not():
    """One warning counts the gradients whose gradient-to-noise ratio is below the threshold."""
    options = {"formats": "e2m1", "rules": "tensor", "noise_threshold": 1e6}
    found = recorded_warnings(GradientOverflow(**ALWAYS, **options, of="gradients"), [1.0, 1.0])
    assert len(found) == 1
    assert "4 of 4 casts have a gradient-to-noise ratio below 1e+06: " in found[0][1]
    assert recorded_warnings(GradientOverflow(**ALWAYS, **options, of="weights"), [1.0, 1.0]) == []


@pytest.mark.longer
def test_warning_is_not_repeated_after_checkpoint():
    """The reported conditions are part of the state of the hook."""
    hook = GradientOverflow(**ALWAYS, formats="e2m1", noise_threshold=1e6)
    assert len(recorded_warnings(hook, [1.0])) == 1
    resumed = GradientOverflow(**ALWAYS, formats="e2m1", noise_threshold=1e6)
    resumed.load_state_dict(hook.state_dict())
    assert recorded_warnings(resumed, [1.0]) == []


@pytest.mark.longer
def test_default_formats_cause_no_warnings():
    """The thresholds apply only to formats that the user has named."""
    assert recorded_warnings(GradientOverflow(**ALWAYS, noise_threshold=1e6, overflow_threshold=1e-9), [1.0, 1.0]) == []


# Refusals


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"interval": 0}, "gradient_overflow.interval is 0; it must be a number of at least 1"),
        ({"count_interval": 0}, "gradient_overflow.count_interval is 0"),
        ({"top_k": -1}, "gradient_overflow.top_k is -1; it must be a number of at least 0"),
        ({"formats": "e2m"}, "gradient_overflow.formats: Unknown format 'e2m'. Did you mean 'e2m"),
        ({"rules": "nvfp"}, "gradient_overflow.rules: Unknown scaling rule 'nvfp'. Did you mean 'nvfp4'"),
        ({"rules": " , "}, "gradient_overflow.rules is empty; choose from: block, "),
        ({"of": "gradient"}, "gradient_overflow.of: Unknown subject 'gradient'. Did you mean 'gradients'"),
        ({"overflow_threshold": 0.0}, "gradient_overflow.overflow_threshold is 0.0; it must be a share in"),
        ({"noise_threshold": math.nan}, "gradient_overflow.noise_threshold is nan"),
    ],
)
def test_invalid_options_are_refused(options, words):
    with pytest.raises(UsageError) as error:
        GradientOverflow(**options)
    assert words in str(error.value)


def test_mismatched_intervals_are_refused():
    """The interval must be a multiple of count_interval."""
    hook = GradientOverflow(formats="e2m1", interval=3, count_interval=2)
    with pytest.raises(UsageError, match=r"gradient_overflow.interval is 3; .* it must be a multiple of 2"):
        LowBitRun(network("nvfp4"), [hook]).train()


def test_model_without_countable_tensors_is_refused():
    """A frozen model without quantized layers raises UnsuitableError with the kinds of tensors that are needed."""
    model = network()
    model.requires_grad_(False)
    with pytest.raises(
        UnsuitableError, match="needs layers that quantise, or output gradients of linear layers; the model has neither"
    ):
        LowBitRun(model, [GradientOverflow()]).train()
    with pytest.raises(UnsuitableError, match="quantise, or gradients or weights of trained parameters; the"):
        LowBitRun(model, [GradientOverflow(of="gradients,weights")]).train()


def test_every_reading_is_described():
    """The descriptions cover all roles together and each single role."""
    names = {info.name for info in GradientOverflow().describe_metrics()}
    assert {*READINGS} | {f"{name}_of/<parameter>" for name in READINGS} <= names


class Checkpointed(nn.Sequential):
    """Recomputes its layers during the backward pass."""

    def __init__(self, layers: nn.Sequential, reentrant: bool) -> None:
        super().__init__(*layers)
        self.reentrant = reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs.requires_grad_()
        return checkpoint(super().forward, inputs, use_reentrant=self.reentrant)


@pytest.mark.longer
@pytest.mark.parametrize("subject", ["activations", "output_gradients"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_layers_are_counted_once(subject, reentrant):
    """Activation checkpointing of either kind changes no count and no error."""
    options = {**ALWAYS, "of": subject, "rules": "nvfp4"}
    plain = LowBitRun(network(), [GradientOverflow(**options)], steps=2).train()
    recomputed = LowBitRun(Checkpointed(network(), reentrant), [GradientOverflow(**options)], steps=2).train()
    assert plain.values(2)
    assert recomputed.values(2) == pytest.approx(plain.values(2), nan_ok=True)


@pytest.mark.parametrize("product", ["dgrad", "wgrad"])
@pytest.mark.parametrize("rule", ["nvfp4", "mx_floor"])
def test_wide_output_gradients_are_sampled_without_bias(rule, product):
    """The share of underflow is that of all rows, although a few tokens have most of the energy."""
    torch.manual_seed(0)
    tokens, vocabulary = 512, 2048
    logits, targets = torch.randn(tokens, vocabulary) * 3, torch.randint(vocabulary, (tokens,))
    logits[torch.arange(tokens), targets] += 40.0 * (torch.rand(tokens) < 0.9)
    logits.requires_grad_()
    nn.functional.cross_entropy(logits, targets).backward()
    whole = logits.grad if product == "dgrad" else logits.grad.T.contiguous()
    sample, cast = gradient_operands(logits.grad)[product], Cast("e2m1", rule)
    shares = [((cast(rows) == 0) & (rows != 0)).double().mean().item() for rows in (sample, whole)]
    assert (len(sample), shares[0]) == (64, pytest.approx(shares[1], abs=0.03))
    sizes = [rows.double().square().mean().item() for rows in (sample, whole)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.6)
