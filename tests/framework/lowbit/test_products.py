"""Modules that multiply by their own parameters: their products match low-bit layers, and shares are reported."""

import copy
import warnings
from typing import Any

import pytest
import torch
from loopscope.errors import RunNotice, UsageError
from loopscope.lowbit import RECIPES, BitLinear, dequantize_model, find_recipe, quantize_model, quantized_modules
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.framework.lowbit.lowbit_layers import NARROW, STOCHASTIC, drawn, results
from tests.support import MODELS, Case, assert_same_bytes, train
from tests.support.models import TOKENS
from tests.support.processes import own_process

RECIPES_TRIED = [*NARROW, "e2m1/block,output_grad=none", "fp32"]


class Conv1D(nn.Module):
    """As Hugging Face has it: the weight is (in, out)."""

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.nf = out_features
        self.weight = nn.Parameter(drawn(in_features, out_features))
        self.bias = nn.Parameter(drawn(out_features))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


def as_linear(weight: torch.Tensor, bias: torch.Tensor | None, recipe: Any) -> nn.Linear:
    """Return a layer with the weight (out, in), low-bit by a recipe."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    layer.weight.data, layer.bias = weight.detach().clone(), None if bias is None else nn.Parameter(bias.detach())
    quantize_model(layer, recipe)
    return layer


@pytest.mark.parametrize("recipe", RECIPES_TRIED)
def test_conv1d_matches_transposed_linear_layer(recipe):
    """Outputs and gradients are those of a low-bit linear layer with the transposed weight."""
    layer = Conv1D(12, 20)
    twin = as_linear(layer.weight.T, layer.bias, recipe)
    assert quantize_model(layer, recipe) == [""]
    found, expected = results(layer, drawn(2, 3, 20)), results(twin, drawn(2, 3, 20))
    expected[2] = expected[2].T
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def scatter(x, w, forward):
    """Give each expert its rows, one after the other, as mixtures do."""
    return torch.stack([forward(x[expert], w, expert) for expert in range(len(w))])


FORMS = {
    "linear": lambda x, w: scatter(x, w, lambda rows, w, e: functional.linear(rows, w[e])),
    "linear_by_name": lambda x, w: scatter(x, w, lambda rows, w, e: functional.linear(weight=w[e], input=rows)),
    "unbound": lambda x, w: torch.stack([rows @ matrix.T for rows, matrix in zip(x, w, strict=True)]),
    "indexed": lambda x, w: x @ w[torch.arange(len(w))].transpose(1, 2),
    "matmul_from_the_left": lambda x, w: (w @ x.mT).mT,
    "mm": lambda x, w: scatter(x, w, lambda rows, w, e: torch.mm(rows, w[e].t())),
    "bmm": lambda x, w: torch.bmm(x, w.mT),
    "baddbmm": lambda x, w: torch.baddbmm(torch.zeros(len(w), 1, w.shape[1]), x, w.permute(0, 2, 1)),
    "einsum": lambda x, w: torch.einsum("e t i, e o i -> e t o", x, w),
    "einsum_of_a_list": lambda x, w: torch.einsum("eoi,eti->eto", [w, x]),
    "grouped": lambda x, w: torch._grouped_mm(
        x.flatten(0, 1), w.mT, offs=torch.arange(1, len(w) + 1, dtype=torch.int32) * x.shape[1]
    ).view(*x.shape[:2], -1),
}


class Experts(nn.Module):
    """Three matrices in one parameter, used in one of many ways."""

    def __init__(self, form: str, experts: int = 3) -> None:
        super().__init__()
        self.w = nn.Parameter(drawn(experts, 16, 32))
        self.form = form

    def forward(self, x):
        return FORMS[self.form](x, self.w)


@pytest.mark.some_rows(3)
@pytest.mark.guarantee("numbers-match-plain-formulas")
@pytest.mark.parametrize("recipe", ["e2m1/nvfp4", "fp4_direct", "fp32"])
@pytest.mark.parametrize("form", FORMS)
def test_experts_match_separate_lowbit_layers(form, recipe):
    """Outputs and gradients match one low-bit layer per expert for every form of the product."""
    experts = Experts(form)
    twins = [as_linear(matrix, None, recipe) for matrix in experts.w]
    assert quantize_model(experts, recipe) == ["w"]
    x = drawn(3, 6, 32)
    y, dx, dw = results(experts, x)
    given = drawn(*y.shape, seed=2)
    for expert, twin in enumerate(twins):
        rows = x[expert].clone().requires_grad_(True)
        out = twin(rows)
        out.backward(given[expert])
        for one, other in ((y[expert], out), (dx[expert], rows.grad), (dw[expert], twin.weight.grad)):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.guarantee("numbers-match-plain-formulas")
@pytest.mark.parametrize(
    ("use", "name"),
    [
        (lambda x, w: x[0] @ (2 * w).mT[0], "mul"),
        (lambda x, w: torch.einsum("eti,eoi->t", x, w), "einsum"),
        (lambda x, w: torch.baddbmm(x.new_zeros(1), x, w.mT, alpha=2), "baddbmm"),
    ],
)
def test_unsupported_matrix_use_warns_once(use, name):
    """An operation that cannot be cast keeps its exact result and issues one warning."""
    FORMS["odd"] = use
    experts, x = Experts("odd"), drawn(3, 6, 32)
    expected = experts(x)
    quantize_model(experts, "nvfp4")
    with pytest.warns(RunNotice, match=rf"^'w' of Experts is used by {name}, which is not cast; products that"):
        assert torch.equal(experts(x), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        experts(x)
    del FORMS["odd"]


def attend(queries, keys, values, heads: int):
    """Return attention by its definition, of (batch, tokens, width) after the projections."""
    split = lambda x: x.unflatten(-1, (heads, -1)).transpose(1, 2)
    q, k, v = map(split, (queries, keys, values))
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("width", [None, 48])
@pytest.mark.parametrize("crossed", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_the_projections_of_attention_are_low_bit_layers(width, crossed, training):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(32, 2, batch_first=True, kdim=width, vdim=width).train(training)
    nn.init.normal_(module.in_proj_bias)
    x = drawn(2, 5, 32)
    other = x if not crossed and width is None else drawn(2, 7, width or 32, seed=3)
    parts = module.in_proj_weight.chunk(3) if width is None else [getattr(module, f"{c}_proj_weight") for c in "qkv"]
    pairs = zip(parts, module.in_proj_bias.chunk(3), strict=True)
    q, k, v = (as_linear(weight, bias, "mxfp4") for weight, bias in pairs)
    out = as_linear(module.out_proj.weight, module.out_proj.bias, "mxfp4")
    names = ["in_proj_weight"] if width is None else ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
    assert quantize_model(module, "mxfp4") == [*names, "out_proj"]
    for need_weights in (True, False):
        with torch.set_grad_enabled(training):
            found = module(x, other, other, need_weights=need_weights)[0]
            torch.testing.assert_close(found, out(attend(q(x), k(other), v(other), 2)), rtol=1e-4, atol=1e-5)


def test_encoder_projections_bypass_fast_path():
    """Quantized projections disable the fused path of TransformerEncoder, and dequantizing restores it."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2), drawn(3, 5, 16)
    plain = copy.deepcopy(model).eval()(x)
    assert quantize_model(model, "fp4_direct", include=["*.self_attn.*"]) == [
        f"layers.{n}.self_attn.{name}" for n in (0, 1) for name in ("in_proj_weight", "out_proj")
    ]
    trained = model(x).detach()
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), trained)
    assert not torch.allclose(plain, trained, rtol=0.01)
    dequantize_model(model)
    assert torch.equal(model(x), plain)
    assert not any(module._forward_pre_hooks for module in model.modules())


class Mixture(nn.Module):
    """All kinds of matrices."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = Conv1D(16, 4)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.up, self.down = nn.Parameter(0.2 * drawn(2, 16, 8)), nn.Parameter(0.2 * drawn(2, 8, 16))
        self.head = nn.Linear(16, TOKENS)

    def forward(self, x):
        x = torch.tanh(self.conv(x))[:, None]
        x = self.attention(x, x, x)[0] + x
        return self.head((x[:, 0] @ self.up).tanh() @ self.down).mean(0)


def mixture(recipe: Any = None) -> nn.Module:
    model = Mixture()
    if recipe is not None:
        quantize_model(model, recipe, seed=2)
    return model


NAMES = ["up", "down", "conv", "attention.in_proj_weight", "attention.out_proj", "head"]


def test_dequantizing_restores_the_model():
    """Classes, attributes and outputs are those of an untouched model, and no random number is drawn."""
    model, untouched = mixture(), mixture()
    before = torch.get_rng_state()
    assert quantize_model(model, "e2m1/delayed/stochastic") == NAMES
    assert torch.equal(before, torch.get_rng_state())
    assert sorted(quantized_modules(model)) == sorted([
        "up_casts", "down_casts", "conv.weight_casts", "attention.in_proj_weight_casts", "attention.out_proj_casts",
        "head",
    ])  # fmt: skip
    assert [type(each).__name__ for each in (model, model.conv)] == ["Mixture", "Conv1D"]
    assert isinstance(model.attention, nn.MultiheadAttention)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(drawn(4, 4)), model(drawn(4, 4)))
    untouched.load_state_dict(model.state_dict())
    model.load_state_dict(untouched.state_dict())
    assert dequantize_model(model) == NAMES
    assert [(type(each), vars(each).keys()) for each in model.modules()] == [
        (type(each), vars(each).keys()) for each in untouched.modules()
    ]
    assert torch.equal(model(drawn(4, 4)), untouched(drawn(4, 4)))


def test_patterns_choose_matrices_and_cast_ones_are_refused():
    model = mixture()
    assert quantize_model(model, "fp8", include=["attention.*", "up"], exclude=["*.out_proj"]) == NAMES[:1] + NAMES[3:4]
    with pytest.raises(UsageError, match=r"'up' is low-bit already, by recipe 'fp8'; call dequantize_model first\."):
        quantize_model(model, "nvfp4", include=["up", "head"])
    assert quantize_model(model, "nvfp4", exclude=["up", "attention.in_proj_weight"]) == ["down", "conv", *NAMES[4:]]
    assert [model.up_casts.recipe.name, model.attention.out_proj_casts.recipe.name] == ["fp8", "nvfp4"]
    with pytest.raises(UsageError, match=r"No linear layer's name matches 'attention\.in_proj'\. Did you mean 'att"):
        quantize_model(mixture(), "fp8", exclude=["attention.in_proj"])


def test_only_linear_layers_are_split():
    model = mixture("fp4_metis")
    assert [name for name, each in model.named_modules() if isinstance(each, BitLinear) and each.factors] == ["head"]
    assert model(drawn(4, 4)).isfinite().all()


@pytest.mark.parametrize("recipe", [STOCHASTIC, find_recipe("fp8").with_every(rule="delayed")])
def test_recomputation_repeats_every_product(recipe):
    def gradients(run: Any) -> list[torch.Tensor]:
        model, x = mixture(recipe), drawn(4, 4).requires_grad_(True)
        run(model, x).square().sum().backward()
        return [x.grad, *[parameter.grad for parameter in model.parameters()]]

    plain = gradients(lambda model, x: model(x))
    again = gradients(lambda model, x: checkpoint(model, x, use_reentrant=False))
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))


@pytest.mark.compile
def test_compiled_model_has_equal_products():
    model, x = mixture("nvfp4"), drawn(4, 4)
    expected = model(x)
    model.compile(backend="eager")
    assert torch.equal(model(x), expected)


@pytest.mark.compile
def test_full_graph_compilation_is_refused():
    """The error gives the reason and suggests leaving out fullgraph=True."""
    model = mixture("nvfp4")
    model.conv.compile(backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"runs between graphs.* omit fullgraph=True"):
        model(drawn(4, 4))


def test_histories_follow_dtype_and_device_moves():
    """Histories stay float32, keep their values and are zero after to_empty."""
    model = mixture("fp8_delayed")
    model(drawn(4, 4)).sum().backward()
    before = {name: each.clone() for name, each in model.named_buffers()}
    assert any(each.any() for each in before.values())
    model.double()(drawn(4, 4).double())
    model = mixture("fp8_delayed").to("meta").to_empty(device="cpu")
    assert all(each.dtype == torch.float32 and not each.any() for each in dict(model.named_buffers()).values())
    model = mixture("fp8_delayed")
    model(drawn(4, 4)).sum().backward()
    after = dict(model.bfloat16().to("cpu").named_buffers())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["epoch", "step"])
@pytest.mark.filterwarnings("ignore:Step [0-9,]+")
@own_process
def test_counting_leaves_random_casts_unchanged(monkeypatch, loop):
    """The hook gradient_overflow changes no byte of a run with stochastic casts and histories."""
    from loopscope.training_hooks.lowbit import GradientOverflow

    monkeypatch.setitem(MODELS, "mixture", lambda: mixture("e4m3/delayed/stochastic,output_grad=e5m2/delayed"))
    case = Case("mixture", loop=loop)
    run = train(case, [GradientOverflow(formats="e2m1", interval=1)])
    assert_same_bytes(run, case)
    counted = [name for metrics, *_ in run.sink.emitted for name in metrics if "noise_ratio/attention.in_proj" in name]
    assert counted


# What share of a model that is


class Head(nn.Module):
    """A look-alike of GPT-2: Conv1D, and a head tied to the embedding."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.wte, self.block, self.norm = nn.Embedding(50, 8), Conv1D(8, 8), nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 50, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, tokens):
        return self.lm_head(self.norm(self.block(self.wte(tokens))))


def quantize_with_notices(model: nn.Module, **options: Any) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        names = quantize_model(model, "nvfp4", **options)
    assert {each.category for each in caught} <= {RunNotice}
    return names, [str(each.message) for each in caught]


def test_shares_match_manual_count():
    """The shares of matrix parameters and multiplications are exact, and a small share is reported."""
    names, notes = quantize_with_notices(Head(tied=False), include=["lm_head"])
    assert (names, names.matrix_share, names.flop_share) == (["lm_head"], 400 / 864, 400 / 464)
    assert (names.left, names.tied, notes) == ({"block": 64}, {}, [])
    names, notes = quantize_with_notices(Head(tied=False), exclude=["lm_head"])
    assert (names.matrix_share, names.flop_share, names.left) == (64 / 864, 64 / 464, {"lm_head": 400})
    assert notes == [
        "Only 13.8% of the multiplications by matrices are cast (7.4% of the matrix parameters); "
        "in full precision: 'lm_head'."
    ]


def test_tied_head_is_reported_unless_excluded():
    """The note names the head and the embedding that share the matrix."""
    names, notes = quantize_with_notices(Head())
    assert (names.matrix_share, names.flop_share, names.tied) == (1.0, 1.0, {"lm_head": "wte"})
    assert len(notes) == 1
    assert notes[0].startswith("The layer 'lm_head' shares its matrix with the embedding 'wte' (tied): ")
    assert len(notes[0]) <= 300
    assert quantize_with_notices(Head(), exclude=["lm_head"])[0].tied == {}


def test_shares_include_earlier_quantization():
    """The share counts matrices that earlier calls cast and excludes factors."""
    model = mixture()
    names = quantize_model(model, find_recipe("fp4_metis"), include=["head"])
    elements = {"up": 256, "down": 256, "conv": 64, "attention.in_proj_weight": 768, "attention.out_proj": 256}
    assert names.left == elements
    assert names.flop_share == 16 * TOKENS / (16 * TOKENS + sum(elements.values()))
    rest = quantize_model(model, "fp8", exclude=["head"])
    assert (rest.flop_share, rest.matrix_share, rest.left) == (1.0, 1.0, {})


def test_gpt2_is_quantized_except_embeddings():
    """The names and shares match GPT-2, the error is moderate, and dequantizing restores the logits."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=96, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    model, tokens = transformers.GPT2LMHeadModel(config).eval(), torch.arange(32).view(2, 16)
    expected, state = model(tokens).logits, copy.deepcopy(model.state_dict())
    names, notes = quantize_with_notices(model, exclude=["lm_head"])
    assert [name.removeprefix("transformer.") for name in names] == [
        f"h.{block}.{name}" for block in (0, 1) for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    blocks, head = 2 * 12 * 32**2, 96 * 32
    assert (names.flop_share, notes) == (blocks / (blocks + head), [])
    assert names.matrix_share == blocks / (blocks + head + 16 * 32)
    error = (model(tokens).logits - expected).norm() / expected.norm()
    assert 0.01 < error < 0.5
    model.load_state_dict(state)
    dequantize_model(model)
    assert torch.equal(model(tokens).logits, expected)


@pytest.mark.parametrize("way", ["eager", "grouped_mm", "batched_mm"])
def test_the_experts_of_a_real_mixtral_are_cast(way):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32,
    )  # fmt: skip
    config._experts_implementation = way
    experts = transformers.MixtralForCausalLM(config).model.layers[0].mlp
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.2)
    x = drawn(2, 8, 32)
    exact = experts(x)
    assert quantize_model(experts, "e4m3/block") == ["experts.gate_up_proj", "experts.down_proj"]
    error = (experts(x) - exact).norm() / exact.norm()
    assert 0.005 < error < 0.1
    experts(x).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in experts.parameters())


@pytest.mark.longer
def test_every_recipe_runs_on_every_kind():
    for recipe in RECIPES:
        mixture(recipe)(drawn(4, 4)).sum().backward()


@pytest.mark.parametrize(
    ("key", "shape", "is_left"),
    [
        ("cls_token", (1, 1, 8), False),
        ("pos_embed", (1, 5, 8), False),
        ("position_embeddings", (5, 8), False),
        ("register_tokens", (4, 8), False),
        ("class_embedding", (1, 8), False),
        ("relative_bias", (1, 4, 4), False),
        ("projection", (8, 8), True),
        ("token_mixing", (8, 8), True),
        ("positive", (8, 8), True),
    ],
)
def test_added_tables_are_no_matrices_left(key, shape, is_left):
    """Parameters that are added to activations do not count as matrices in full precision."""
    model = nn.ModuleDict({"layer": nn.Linear(8, 8)})
    model.register_parameter(key, nn.Parameter(torch.zeros(shape)))
    names = quantize_model(model, "fp8")
    assert list(names.left) == ([key] if is_left else [])
    assert names.flop_share == (0.5 if is_left else 1.0)
