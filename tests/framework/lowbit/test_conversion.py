"""Conversion of models to low-bit layers and back, in place, with checkpoints, hooks and sharding."""

import copy
from functools import cache
from typing import Any

import pytest
import torch
from loopscope import training_hooks  # noqa: F401 - fills the registry
from loopscope.checkpoints import load_checkpoint, save_checkpoint
from loopscope.engine import HookManager
from loopscope.errors import UsageError
from loopscope.hooks import EVERY_STEP, HookRegistry, TrainingHook
from loopscope.hooks.selection import bulk_hooks
from loopscope.lowbit import RECIPES, BitLinear, dequantize_model, find_recipe, layers_to_quantize, quantize_model
from loopscope.state import RandomStreams, TrainingState
from torch import nn

from tests.support import (
    MODELS,
    ActingHook,
    Case,
    Run,
    TiedModel,
    assert_same_bytes,
    batchnorm_mlp,
    build,
    differences,
    run_info,
    train,
)

VARYING = "e4m3/delayed/stochastic,output_grad=e5m2/delayed/stochastic"


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3, bias=False)))


def classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules() if isinstance(module, nn.Linear)]


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "fp4_metis"])
def test_quantized_layers_and_parameters_keep_their_identity(recipe):
    """The state dict, dtype and requires_grad are unchanged as well."""
    model = mlp().to(torch.bfloat16)
    model[0].weight.requires_grad_(False)
    layers, parameters, state = list(model.modules()), dict(model.named_parameters()), model.state_dict()
    assert quantize_model(model, recipe) == ["0", "2.0", "2.1"]
    assert classes(model) == [BitLinear] * 3
    assert all(one is other for one, other in zip(model.modules(), layers, strict=True))
    assert all(found is parameters[name] for name, found in model.named_parameters())
    assert list(model.state_dict()) == list(state)
    assert not model[0].weight.requires_grad
    assert model[0].weight.dtype is torch.bfloat16


@pytest.mark.guarantee("numbers-match-plain-formulas")
def test_dequantized_model_equals_the_original():
    """No attribute or buffer remains, and a second call changes nothing."""
    model, untouched = mlp(), mlp()
    quantize_model(model, VARYING)
    assert dequantize_model(model) == ["0", "2.0", "2.1"]
    assert [vars(module).keys() for module in model.modules()] == [
        vars(module).keys() for module in untouched.modules()
    ]
    assert classes(model) == [nn.Linear] * 3
    assert not list(model.buffers())
    x = torch.ones(2, 6)
    assert torch.equal(model(x), untouched(x))
    assert dequantize_model(model) == []


@pytest.mark.guarantee("numbers-match-plain-formulas")
@pytest.mark.parametrize("recipe", ["fp8", "fp4_metis", VARYING])
def test_state_dicts_are_loadable_both_ways(recipe):
    """The state dict of a quantised model loads into the plain model, and the reverse."""
    plain, lowbit = mlp(), mlp()
    quantize_model(lowbit, find_recipe(recipe))
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(1.0)
    lowbit.load_state_dict(plain.state_dict())
    back = mlp()
    back.load_state_dict(lowbit.state_dict())
    assert all(torch.equal(one, other) for one, other in zip(back.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize(
    ("include", "exclude", "chosen"),
    [(("*",), (), ["0", "2.0", "2.1"]), (("2.*",), (), ["2.0", "2.1"]), (("*",), ("2.1", "0"), ["2.0"])],
)
def test_patterns_choose_layers_by_name(include, exclude, chosen):
    model = mlp()
    assert layers_to_quantize(model, RECIPES["fp8"], include=include, exclude=exclude) == chosen
    assert classes(model) == [nn.Linear] * 3
    assert quantize_model(model, "fp8", include=include, exclude=exclude) == chosen
    assert [name for name, module in model.named_modules() if isinstance(module, BitLinear)] == chosen


def test_different_layers_can_have_different_recipes():
    model = mlp()
    quantize_model(model, "fp8", include=("0",))
    quantize_model(model, "fp4_block", exclude=("0",))
    assert [model[0].recipe.name, model[2][0].recipe.name] == ["fp8", "fp4_block"]
    assert model(torch.ones(2, 6)).isfinite().all()


def test_model_that_is_a_linear_layer_is_converted():
    layer = nn.Linear(3, 2)
    assert quantize_model(layer, "fp8") == [""]
    assert type(layer) is BitLinear


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"include": ["3.*"]}, r"No linear layer's name matches '3\.\*'\. Linear layers: '0', '2\.0', '2\.1'\."),
        ({"include": ["2.2"]}, r"No linear layer's name matches '2\.2'\. Did you mean '2\.[01]'\?"),
        ({"exclude": ["head"]}, r"No linear layer's name matches 'head'\."),
        ({"exclude": ["*"]}, r"No linear layer is left: the patterns to exclude match all of '0', '2\.0', '2\.1'\."),
        ({"recipe": "nvfp8"}, r"Unknown recipe 'nvfp8'\. Did you mean 'nvfp4'\?"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(options, sentence):
    """Patterns match no layer or exclude all, or the recipe is unknown."""
    model = mlp()
    with pytest.raises(UsageError, match=sentence):
        quantize_model(model, **{"recipe": "fp8", **options})
    assert classes(model) == [nn.Linear] * 3


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(UsageError, match=r"The model has no linear layer .*, so there is nothing to cast\."):
        quantize_model(nn.Sequential(nn.Conv1d(2, 2, 1), nn.ReLU()), "fp8")


def test_quantizing_a_low_bit_layer_twice_is_refused():
    """The error asks for dequantize_model first."""
    model = mlp()
    quantize_model(model, "nvfp4", include=("2.0",))
    with pytest.raises(
        UsageError, match=r"'2\.0' is low-bit already, by recipe 'nvfp4'; call dequantize_model first\."
    ):
        quantize_model(model, "fp8")


def test_a_layer_under_two_names_is_changed_once():
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": shared, "b": shared})
    assert quantize_model(model, "fp8") == ["a"]
    assert model["b"] is shared
    assert type(shared) is BitLinear


def test_tied_weight_stays_tied_with_both_gradients():
    model, tokens = TiedModel().eval(), torch.tensor([[1, 2], [3, 4]])
    quantize_model(model, "fp8")
    assert model.decoder.weight is model.embedding.weight
    model(tokens).square().sum().backward()
    total = model.embedding.weight.grad.clone()
    model.zero_grad()
    hidden = torch.tanh(model.mix(model.embedding(tokens).detach().mean(1)))
    model.decoder(hidden).square().sum().backward()
    assert not torch.equal(model.embedding.weight.grad, total)
    assert (total != 0).sum() >= (model.embedding.weight.grad != 0).sum()


@pytest.mark.parametrize("padded", [False, True])
def test_torch_encoder_uses_low_bit_layers_in_evaluation(padded):
    """The fast path of nn.TransformerEncoder is disabled until dequantize_model."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2), torch.randn(3, 5, 16)
    plain = copy.deepcopy(model)
    padding = torch.arange(5) >= torch.tensor([[5], [3], [4]])
    options: dict[str, Any] = {"src_key_padding_mask": padding} if padded else {}
    quantize_model(model, "fp4_direct")
    training = model(x, **options).detach()
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x, **options), training)
        assert not torch.allclose(plain.train()(x, **options)[~padding], training[~padding])
    dequantize_model(model)
    assert not any(module._forward_pre_hooks for module in model.modules())


def varying() -> nn.Module:
    model = batchnorm_mlp()
    quantize_model(model, VARYING, seed=2)
    return model


@pytest.fixture
def case(monkeypatch, request) -> Case:
    monkeypatch.setitem(MODELS, "varying", varying)
    return Case("varying", loop=request.param)


both_loops = pytest.mark.parametrize("case", ["epoch", "step"], indirect=True)


@cache
def supported() -> list[str]:
    """Name the hooks without commits that do not refuse this model."""
    found = []
    for name in bulk_hooks("all"):
        case = Case("varying")
        task, state = build(case)
        hook = HookRegistry.get(name)()
        try:
            hook.start(run_info(task, HookManager([hook], task, state, loop=case.loop), case.loop))
        except UsageError:
            continue
        found.append(name)
    return found


def at_every_step(name: str) -> TrainingHook:
    hook = HookRegistry.get(name)()
    hook.step_schedule = EVERY_STEP
    return hook


@pytest.mark.parametrize("case", ["epoch", pytest.param("step", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.filterwarnings("ignore:Step [0-9,]+")
@pytest.mark.process
def test_run_with_all_hooks_matches_bare_run(case):
    """The slow row trains with every hook, the other with every second one."""
    names = [name for name in supported() if not HookRegistry.get(name).needs_reference_weights]
    names = names if case.loop == "step" else {*names[::2], "norms", "gradient_overflow"}
    assert {"norms", "gradient_overflow"} <= set(names)
    run = train(case, [at_every_step(name) for name in names], audit=False)
    assert_same_bytes(run, case)
    assert {name.partition("/")[0] for metrics, *_ in run.sink.emitted for name in metrics} & set(names)


@pytest.mark.some_rows(2)
@both_loops
@pytest.mark.process
def test_draws_and_training_of_interventions_are_undone(case):
    def act(run_ctx: Any, model_ctx: Any) -> None:
        with model_ctx.branch():
            model_ctx.run_training_epoch(model_ctx.loader)
        model_ctx.compute_gradients()
        batch = next(iter(model_ctx.loader.batches(1)))
        operator = model_ctx.hessian_operator(batch)
        operator(model_ctx.compute_batch_gradients(batch))

    run = train(case, [ActingHook(act)])
    assert_same_bytes(run, case)


@both_loops
def test_generator_and_histories_belong_to_training_state(case):
    _, state = build(case)
    (generator,) = {module.generator for module in state.model.modules() if isinstance(module, BitLinear)}
    assert generator in state.streams.owned
    before = state.digest()
    generator.manual_seed(99)
    state.model[0].forward_input_history.fill_(1.0)
    assert [name.partition("/")[0] for name in differences(before, state.digest())] == ["buffers", "generators"]


@pytest.mark.longer
@pytest.mark.some_rows(2)
@both_loops
def test_checkpoint_restores_generator_and_histories(case, tmp_path):
    kept: list[Any] = []

    def save(run: Run) -> None:
        if not kept:
            state = run.state
            save_checkpoint(tmp_path / "kept.pt", state, {}, state.streams.save())
            kept.append(state.digest())

    train(case, save=save, steps=6, checkpoint_every=1)
    _, state = build(case, steps=6)
    load_checkpoint(tmp_path / "kept.pt", state)
    found = differences(kept[0], state.digest())
    assert not [name for name in found if name.startswith(("parameters", "buffers", "generators", "modules"))]


def test_copied_training_states_have_separate_generators():
    model = varying()
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), RandomStreams(0))
    twin = copy.deepcopy(model)
    other = TrainingState(twin, torch.optim.SGD(twin.parameters(), lr=0.1), RandomStreams(0))
    assert len(state.streams.owned) == len(other.streams.owned) == 1
    assert state.streams.owned[0] is not other.streams.owned[0]
