"""The attention hook: the layers that it finds, its metrics against formed circuits, and what it refuses."""

import re
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from loopscope.errors import LoopscopeError, UnsuitableError, UsageError
from loopscope.hooks import HookPoint
from loopscope.training_hooks.circuits import Attention
from loopscope.training_hooks.circuits.attention import probe_inputs
from loopscope.training_hooks.circuits.attention_layers import find_attention
from loopscope.training_hooks.circuits.attention_scores import reading
from torch import nn

from tests.support import Case, SpyHook, build, data_for, train
from tests.support.odd_batches import Fields, Views
from tests.training_hooks.circuits.attention_models import HEADS, WIDTH, Fused, Grouped, WrittenOut, brute_rows
from tests.training_hooks.epoch_end import epoch_end

LAYER = "blocks.0.attention"


def double(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def emitted(run, point: HookPoint) -> dict:
    return [metrics for metrics, _, fired_at, _ in run.sink.emitted if fired_at is point][-1]


class Stub(nn.Module):
    """A model of one layer that is called with the batch's first item."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, x, x)[0] if isinstance(self.layer, nn.MultiheadAttention) else self.layer(x)


class OneBatch:
    def batches(self, epoch: int) -> list:
        return [(torch.randn(6, 5, WIDTH, generator=torch.Generator().manual_seed(8)), torch.zeros(6))]


@torch.no_grad()
def measured(layer: nn.Module, **options) -> dict:
    context = epoch_end(Stub(layer).eval(), hook_point=HookPoint.SNAPSHOT)
    return Attention(**options).compute(replace(context, loader=OneBatch()))


@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_rows_are_those_of_the_first_samples_of_the_first_batch(loop):
    run = train(Case("transformer", loop=loop), [Attention(rows=5)], steps=6)
    metrics = emitted(run, HookPoint.POST_EPOCH if loop == "epoch" else HookPoint.SNAPSHOT)
    model = run.task.model.double()
    block, pairs = model.blocks[0], next(run.task.loader.batches(0))[0][:5]
    query, key, _ = block.attention.qkv(block.attention_norm(model.embedding(pairs))).chunk(3, dim=-1)
    expected = brute_rows(query, key, np.ones((2, 2), dtype=bool), heads=2)
    for head, rows in enumerate(expected):
        assert metrics[f"attention/entropy/{LAYER}.{head}"] == pytest.approx(rows["entropy"], rel=1e-5)
        assert metrics[f"attention/max_logit/{LAYER}.{head}"] == pytest.approx(rows["largest"], rel=1e-4, abs=1e-6)
    assert metrics["attention/largest_logit"] == pytest.approx(max(rows["largest"] for rows in expected), abs=1e-6)
    assert metrics["attention/mean_entropy"] == pytest.approx(np.mean([rows["entropy"] for rows in expected]))
    assert metrics["attention/mean_normalised_entropy"] == pytest.approx(np.mean([rows["share"] for rows in expected]))


def circuits(query, key, value, output, heads: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Form W_QᵀW_K and W_O W_V of every head."""
    width, value_dim = len(query) // heads, len(value) // heads
    parts = [
        (slice(h * width, h * width + width), slice(h * value_dim, h * value_dim + value_dim)) for h in range(heads)
    ]
    return [(query[one].T @ key[one], output[:, two] @ value[two]) for one, two in parts]


def assert_circuits(metrics: dict, formed: list, layer: str = "layer") -> None:
    for head, products in enumerate(formed):
        for kind, product in zip(("qk", "ov"), products, strict=True):
            values = np.linalg.svd(product, compute_uv=False)
            shares = values[values > 1e-9 * values[0]] / values.sum()
            name = f"{layer}.{head}"
            assert metrics[f"{kind}_norm/{name}"].item() == pytest.approx(np.linalg.norm(product))
            assert metrics[f"{kind}_effective_rank/{name}"].item() == pytest.approx(
                np.exp(-(shares * np.log(shares)).sum())
            )
            assert metrics[f"{kind}_leading_share/{name}"].item() == pytest.approx(values[0] ** 2 / (values**2).sum())
            np.testing.assert_allclose([each.item() for each in metrics[f"{kind}_spectrum/{name}"]], values[:4])
        if product.shape[0] == product.shape[1]:
            eigenvalues = np.linalg.eigvals(product)
            expected = eigenvalues.sum().real / np.abs(eigenvalues).sum()
            assert metrics[f"ov_copying/{name}"].item() == pytest.approx(expected, abs=1e-6)


def test_the_circuits_of_a_fused_projection_are_those_of_its_parts():
    layer = Fused()
    query, key, value = np.split(double(layer.qkv.weight), 3)
    assert_circuits(measured(layer), circuits(query, key, value, double(layer.proj.weight), HEADS))


def test_the_circuits_of_separate_projections_are_theirs():
    layer = WrittenOut()
    weights = [double(part.weight) for part in (layer.query, layer.key, layer.value, layer.dense)]
    assert_circuits(measured(layer), circuits(*weights, HEADS))


def test_heads_that_share_keys_and_values_have_a_circuit_each():
    layer = Grouped()
    query, output = double(layer.q_proj.weight), double(layer.o_proj.weight)
    key, value = (double(part.weight)[[0, 1, 2, 3] * 2 + [4, 5, 6, 7] * 2] for part in (layer.k_proj, layer.v_proj))
    assert_circuits(measured(layer), circuits(query, key, value, output, heads=4))


def test_the_circuits_of_multihead_attention_are_those_of_its_parts():
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    query, key, value = np.split(double(layer.in_proj_weight), 3)
    assert_circuits(measured(layer), circuits(query, key, value, double(layer.out_proj.weight), HEADS))


def test_a_circuit_between_two_widths_has_no_copying_score():
    layer = nn.MultiheadAttention(WIDTH, HEADS, kdim=7, vdim=9)
    weights = find_attention(layer)[""].weights(HEADS)
    assert weights.key.shape == (HEADS, 4, 7)
    assert weights.output.shape == (HEADS, WIDTH, 4)
    formed = circuits(
        *map(double, (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight, layer.out_proj.weight)), HEADS
    )
    assert formed[0][1].shape == (WIDTH, 9)
    torch.testing.assert_close(weights.output[0] @ weights.value[0], torch.from_numpy(formed[0][1]).float())


def test_means_are_those_over_the_heads():
    metrics = measured(Fused())
    for kind in ("qk_effective_rank", "ov_effective_rank", "ov_copying"):
        values = [metrics[f"{kind}/layer.{head}"].item() for head in range(HEADS)]
        assert metrics[f"mean_{kind}"].item() == pytest.approx(np.mean(values))


def test_rows_are_reported_after_epochs_and_circuits_at_snapshots():
    run = train(Case("transformer"), [Attention()], steps=6)
    after_epoch, snapshot = (set(emitted(run, point)) for point in (HookPoint.POST_EPOCH, HookPoint.SNAPSHOT))
    assert after_epoch.isdisjoint(snapshot)
    assert f"attention/entropy/{LAYER}.1" in after_epoch
    assert f"attention/qk_spectrum/{LAYER}.1" in snapshot
    assert (
        set(emitted(train(Case("transformer", loop="step"), [Attention()]), HookPoint.SNAPSHOT))
        == after_epoch | snapshot
    )


def test_a_second_strategy_is_measured_on_its_own_data_and_model():
    hook, case = Attention(), Case("transformer", "sgd_momentum")
    train(Case("transformer"), [hook])
    hook.reset()
    assert train(case, [hook]).sink.emitted == train(case, [Attention()]).sink.emitted


def test_rows_are_read_every_so_many_epochs_and_at_the_last_snapshot():
    run = train(Case("transformer"), [Attention(every=3)], steps=15)
    epochs = [
        (epoch, point.name) for metrics, epoch, point, _ in run.sink.emitted if "attention/mean_entropy" in metrics
    ]
    assert epochs == [(1, "SNAPSHOT"), (2, "POST_EPOCH"), (3, "SNAPSHOT"), (4, "SNAPSHOT")]


@pytest.mark.parametrize(
    "layer", [Fused(), WrittenOut(), Grouped(), nn.TransformerEncoderLayer(WIDTH, HEADS, 16).self_attn]
)
def test_layers_are_found_by_their_kind_or_their_names(layer):
    model = nn.Sequential(nn.Linear(3, WIDTH), nn.ModuleDict({"inner": layer}))
    assert list(find_attention(model)) == ["1.inner"]


class Unusual(nn.Module):
    """Attention under names of its own, the last of them further down."""

    def __init__(self) -> None:
        super().__init__()
        self.asks, self.offers, self.gives = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mix = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1))


def test_names_of_ones_own_are_given_as_an_option():
    model = nn.ModuleList([Unusual(), Unusual()])
    layers = find_attention(model, "asks, offers,gives,mix.0")
    assert list(layers) == ["0", "1"]
    assert layers["1"].projections == (model[1].asks, model[1].offers, model[1].gives, model[1].mix[0])
    with pytest.raises(UnsuitableError, match=r"0\.asks \(Linear\).*attention\.projections=QUERY,KEY,VALUE,OUTPUT"):
        find_attention(model)


@pytest.mark.parametrize("model", ["batchnorm_mlp", "tied"])
def test_a_model_without_attention_is_refused_before_the_run_naming_its_modules(model):
    with pytest.raises(UsageError, match=r"Hook 'attention' needs an nn\.MultiheadAttention.*\(Linear\)"):
        train(Case(model), [Attention()])


def test_layers_that_attend_out_of_sight_are_left_out_with_one_warning():
    layer = Fused()
    layer.forward = lambda x: layer.proj(layer.qkv(x)[..., :WIDTH])
    hook, context = Attention(every=1), replace(epoch_end(Stub(layer)), loader=OneBatch())
    with pytest.warns(UserWarning, match="layer make no call of attention"):
        assert hook.compute(context) == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hook.compute(replace(context, step=2)) == {}


def test_projections_unlike_the_heads_that_were_called_give_rows_and_no_circuits():
    layer = Fused()
    layer.proj = nn.Linear(WIDTH + 1, WIDTH)
    layer.forward = lambda x: nn.functional.scaled_dot_product_attention(*layer.qkv(x).unsqueeze(1).chunk(3, dim=-1))
    assert find_attention(layer)[""].weights(heads=HEADS) is None
    assert find_attention(Fused())[""].weights(heads=5) is None
    with pytest.warns(UserWarning, match="layer have projections unlike their heads"):
        metrics = measured(layer)
    assert "entropy/layer.0" in metrics
    assert not [name for name in metrics if name.startswith(("qk", "ov"))]


def test_the_probe_is_the_first_rows_of_what_the_model_takes():
    x, y = torch.arange(12).view(6, 2), torch.arange(6)
    for batch in (x, (x, y), [x, y]):
        assert torch.equal(probe_inputs(batch, 4), x[:4])
    assert torch.equal(probe_inputs({"ids": x, "labels": y}, 4, "ids"), x[:4])
    assert torch.equal(probe_inputs([{"ids": [x.numpy()]}, {"labels": (y,)}], 4, "ids"), x[:4])
    assert torch.equal(probe_inputs(Fields(x, y), 4, "x"), x[:4])
    first, second = probe_inputs(((x, y.numpy()), y), 4)
    assert torch.equal(first, x[:4])
    assert torch.equal(second, y[:4])


def test_batches_in_which_no_input_can_be_found_are_named():
    with pytest.raises(UsageError, match=r"Unknown attention\.entry ''.*Known: ids, labels"):
        probe_inputs({"ids": torch.ones(2), "labels": torch.ones(2)}, 4)
    with pytest.raises(UsageError, match=r"Unknown attention\.entry 'ids'.*Known: x, y"):
        probe_inputs(Fields(torch.ones(2), torch.ones(2)), 4, "ids")
    with pytest.raises(LoopscopeError, match="not str"):
        probe_inputs("text", 4)


@pytest.mark.parametrize(("kind", "words"), [("UserDict", r"attention\.entry ''"), ("opaque", "not Opaque")])
def test_a_run_whose_batches_name_no_input_is_refused_before_its_first_step(kind, words):
    loader = Views(kind, data=data_for("transformer"))
    run = train(Case("transformer"), [Attention()], loader=loader, compute_loss=None, raises=UnsuitableError)
    assert re.search(words, str(run.error))
    assert run.digests == []


@pytest.mark.parametrize(
    "options", [{"rows": 0}, {"every": 0}, {"spectrum": 0}, {"projections": "a,b,c"}, {"projections": "a,"}]
)
def test_options_that_cannot_be_are_refused(options):
    with pytest.raises(UsageError, match=r"attention\.(rows|every|spectrum|projections) is"):
        train(Case("transformer"), [Attention(**options)])


def test_reading_during_a_run_gives_the_forward_pass_that_the_context_gives():
    outputs = []

    def look(ctx):
        pairs = next(ctx.loader.batches(0))[0]
        plain = ctx.forward(pairs).output
        with reading({LAYER: ctx.model.blocks[0].attention}) as reader:
            outputs.append(torch.equal(ctx.forward(pairs).output, plain))
        outputs.append(reader.calls[LAYER].heads == 2)

    train(Case("transformer"), [SpyHook(look)])
    assert outputs
    assert all(outputs)


def test_a_probe_of_the_run_is_the_same_however_often_it_is_drawn():
    task, _ = build(Case("transformer"))
    assert torch.equal(probe_inputs(next(task.loader.batches(0)), 3), probe_inputs(next(task.loader.batches(0)), 3))
