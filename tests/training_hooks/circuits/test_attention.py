"""The attention hook: its search for layers, its metrics compared with explicit circuits, and its errors."""

import json
import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from loopscope.data import TensorLoader, fixed_order
from loopscope.errors import RunNotice, UnsuitableError, UsageError
from loopscope.hooks import HookPoint
from loopscope.training_hooks.circuits import Attention
from loopscope.training_hooks.circuits.attention import forward_arguments, model_inputs, split_inputs
from loopscope.training_hooks.circuits.attention_layers import find_attention
from loopscope.training_hooks.circuits.attention_scores import RowStatistics, record_attention, sampling_error
from loopscope.training_hooks.measures import drawn_loader
from torch import nn

from tests.support import Case, SpyHook, data_for, train
from tests.support.odd_batches import Fields, Views
from tests.training_hooks.circuits.attention_models import (
    HEADS,
    WIDTH,
    ByHead,
    Conv1D,
    Fused,
    Grouped,
    LikeBERT,
    LikeGPT2,
    WrittenOut,
    brute_rows,
    by_head,
    joined,
    mixed,
)
from tests.training_hooks.epoch_end import epoch_end

LAYER = "blocks.0.attention"


def double(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def emitted(run, point: HookPoint) -> dict:
    return [metrics for metrics, _, fired_at, _ in run.sink.emitted if fired_at is point][-1]


class Stub(nn.Module):
    """A model that calls one layer with the first item of the batch."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, x, x)[0] if isinstance(self.layer, nn.MultiheadAttention) else self.layer(x)


def one_batch() -> TensorLoader:
    samples = torch.randn(6, 5, WIDTH, generator=torch.Generator().manual_seed(8))
    return TensorLoader((samples, torch.zeros(6)), 6, fixed_order(torch.arange(6)))


@torch.no_grad()
def measured(layer: nn.Module, **options) -> dict:
    context = epoch_end(Stub(layer).eval(), hook_point=HookPoint.SNAPSHOT)
    return Attention(**options).compute(replace(context, loader=one_batch()))


@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_rows_come_from_first_drawn_samples(loop):
    """Entropies and logits match brute force on the first five drawn samples, in both loops."""
    run = train(Case("transformer", loop=loop), [Attention(rows=5)], steps=6)
    metrics = emitted(run, HookPoint.POST_EPOCH if loop == "epoch" else HookPoint.SNAPSHOT)
    model = run.task.model.double()
    block, pairs = model.blocks[0], next(drawn_loader("attention", run.task.loader).batches(0))[0][:5]
    query, key, _ = block.attention.qkv(block.attention_norm(model.embedding(pairs))).chunk(3, dim=-1)
    expected = brute_rows(query, key, np.ones((2, 2), dtype=bool), heads=2)
    for head, rows in enumerate(expected):
        assert metrics[f"attention/entropy/{LAYER}.{head}"] == pytest.approx(rows["entropy"], rel=1e-5)
        assert metrics[f"attention/max_logit/{LAYER}.{head}"] == pytest.approx(rows["largest"], rel=1e-4, abs=1e-6)
    assert metrics["attention/largest_logit"] == pytest.approx(max(rows["largest"] for rows in expected), abs=1e-6)
    assert metrics["attention/mean_entropy"] == pytest.approx(np.mean([rows["entropy"] for rows in expected]))
    assert metrics["attention/mean_normalised_entropy"] == pytest.approx(np.mean([rows["share"] for rows in expected]))


def circuits(query, key, value, output, heads: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Compute W_QᵀW_K and W_O W_V of every head."""
    width, value_dim = len(query) // heads, len(value) // heads
    parts = [
        (slice(h * width, h * width + width), slice(h * value_dim, h * value_dim + value_dim)) for h in range(heads)
    ]
    return [(query[qk].T @ key[qk], output[:, ov] @ value[ov]) for qk, ov in parts]


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
            np.testing.assert_allclose([number.item() for number in metrics[f"{kind}_spectrum/{name}"]], values[:4])
        if product.shape[0] == product.shape[1]:
            eigenvalues = np.linalg.eigvals(product)
            expected = eigenvalues.sum().real / np.abs(eigenvalues).sum()
            assert metrics[f"ov_copying/{name}"].item() == pytest.approx(expected, abs=1e-6)


def test_circuits_of_fused_projection():
    layer = Fused()
    query, key, value = np.split(double(layer.qkv.weight), 3)
    assert_circuits(measured(layer), circuits(query, key, value, double(layer.proj.weight), HEADS))


def test_circuits_of_separate_projections():
    layer = WrittenOut()
    weights = [double(part.weight) for part in (layer.query, layer.key, layer.value, layer.dense)]
    assert_circuits(measured(layer), circuits(*weights, HEADS))


def test_grouped_heads_have_a_circuit_each():
    """Several query heads share their keys and values."""
    layer = Grouped()
    query, output = double(layer.q_proj.weight), double(layer.o_proj.weight)
    key, value = (double(part.weight)[[0, 1, 2, 3] * 2 + [4, 5, 6, 7] * 2] for part in (layer.k_proj, layer.v_proj))
    assert_circuits(measured(layer), circuits(query, key, value, output, heads=4))


def test_circuits_of_multihead_attention():
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    query, key, value = np.split(double(layer.in_proj_weight), 3)
    assert_circuits(measured(layer), circuits(query, key, value, double(layer.out_proj.weight), HEADS))


def test_circuits_allow_other_key_and_value_widths():
    """The output-value circuit is not square, so it has no copying score."""
    layer = nn.MultiheadAttention(WIDTH, HEADS, kdim=7, vdim=9)
    weights = find_attention(layer)[""].weights(HEADS)
    assert weights.key.shape == (HEADS, 4, 7)
    assert weights.output.shape == (HEADS, WIDTH, 4)
    formed = circuits(
        *map(double, (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight, layer.out_proj.weight)), HEADS
    )
    assert formed[0][1].shape == (WIDTH, 9)
    torch.testing.assert_close(weights.output[0] @ weights.value[0], torch.from_numpy(formed[0][1]).float())


def test_means_are_over_all_heads():
    metrics = measured(Fused())
    for kind in ("qk_effective_rank", "ov_effective_rank", "ov_copying"):
        values = [metrics[f"{kind}/layer.{head}"].item() for head in range(HEADS)]
        assert metrics[f"mean_{kind}"].item() == pytest.approx(np.mean(values))


@pytest.mark.longer
def test_rows_follow_epochs_and_circuits_follow_snapshots():
    """In the step loop, snapshots report both."""
    run = train(Case("transformer"), [Attention()], steps=6)
    after_epoch, snapshot = (set(emitted(run, point)) for point in (HookPoint.POST_EPOCH, HookPoint.SNAPSHOT))
    assert after_epoch.isdisjoint(snapshot)
    assert f"attention/entropy/{LAYER}.1" in after_epoch
    assert f"attention/qk_spectrum/{LAYER}.1" in snapshot
    assert (
        set(emitted(train(Case("transformer", loop="step"), [Attention()]), HookPoint.SNAPSHOT))
        == after_epoch | snapshot
    )


@pytest.mark.longer
def test_second_strategy_uses_its_own_data_and_model():
    """After reset, the hook reports the same metrics as a new hook."""
    hook, case = Attention(), Case("transformer", "sgd_momentum")
    train(Case("transformer"), [hook])
    hook.reset()
    assert train(case, [hook]).sink.emitted == train(case, [Attention()]).sink.emitted


@pytest.mark.longer
def test_rows_are_read_at_interval_and_snapshots():
    """With every=3, the hook reads the rows after the third epoch and at each snapshot, including the last."""
    run = train(Case("transformer"), [Attention(every=3)], steps=15)
    epochs = [
        (epoch, point.name) for metrics, epoch, point, _ in run.sink.emitted if "attention/mean_entropy" in metrics
    ]
    assert epochs == [(1, "SNAPSHOT"), (2, "POST_EPOCH"), (3, "SNAPSHOT"), (4, "SNAPSHOT")]


@pytest.mark.parametrize(
    "layer", [Fused(), WrittenOut(), Grouped(), nn.TransformerEncoderLayer(WIDTH, HEADS, 16).self_attn]
)
def test_layers_are_found_by_type_or_names(layer):
    model = nn.Sequential(nn.Linear(3, WIDTH), nn.ModuleDict({"inner": layer}))
    assert list(find_attention(model)) == ["1.inner"]


class Unusual(nn.Module):
    """Attention with custom names, the last one in a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.asks, self.offers, self.gives = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mix = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1))


def test_custom_projection_names_are_an_option():
    """Without the option, the error suggests it."""
    model = nn.ModuleList([Unusual(), Unusual()])
    layers = find_attention(model, "asks, offers,gives,mix.0")
    assert list(layers) == ["0", "1"]
    assert layers["1"].projections == (model[1].asks, model[1].offers, model[1].gives, model[1].mix[0])
    with pytest.raises(
        UnsuitableError, match=r"finds no attention layer in ModuleList.*'projections': 'QUERY,KEY,VALUE,OUTPUT'"
    ):
        find_attention(model)


@pytest.mark.parametrize("model", ["batchnorm_mlp", "tied"])
def test_model_without_attention_is_refused(model):
    """The error is raised before the run and has at most 300 characters."""
    with pytest.raises(
        UsageError, match=r"Hook 'attention' finds no attention layer in \w+: no nn\.Multihead"
    ) as error:
        train(Case(model), [Attention()])
    assert len(str(error.value)) <= 300


def test_refusal_stays_short_for_long_names():
    long_class = type("A" * 400, (nn.Module,), {})
    attempts = [
        lambda: find_attention(long_class()),
        lambda: model_inputs({f"entry{i}" * 20: 1 for i in range(99)}, "x" * 500),
    ]
    for attempt in [*attempts, lambda: model_inputs(type("B" * 400, (), {})())]:
        with pytest.raises(UnsuitableError) as error:
            attempt()
        assert len(str(error.value)) <= 300


def test_layers_with_hidden_attention_warn_once():
    """The hook skips a layer that calls no attention function."""
    layer = Fused()
    layer.forward = lambda x: layer.proj(layer.qkv(x)[..., :WIDTH])
    hook, context = Attention(every=1), replace(epoch_end(Stub(layer)), loader=one_batch())
    with pytest.warns(UserWarning, match=r"skips them: layer \(no known attention call"):
        assert hook.compute(context) == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hook.compute(replace(context, step=2)) == {}


def test_mismatched_projections_give_rows_without_circuits():
    """A warning names the layer whose projections do not fit its heads."""
    layer = Fused()
    layer.proj = nn.Linear(WIDTH + 1, WIDTH)
    layer.forward = lambda x: nn.functional.scaled_dot_product_attention(*layer.qkv(x).unsqueeze(1).chunk(3, dim=-1))
    assert find_attention(layer)[""].weights(heads=HEADS) is None
    assert find_attention(Fused())[""].weights(heads=5) is None
    with pytest.warns(UserWarning, match=r"skips them: layer \(projections that do not match the heads"):
        metrics = measured(layer)
    assert "entropy/layer.0" in metrics
    assert not [name for name in metrics if name.startswith(("qk", "ov"))]


def test_model_inputs_of_batch_types():
    x, y = torch.arange(12).view(6, 2), torch.arange(6)
    for batch in (x, (x, y), [x, y], {"input_ids": x, "labels": y}, ({"input_ids": x}, y)):
        assert torch.equal(model_inputs(batch), x)
    assert torch.equal(model_inputs({"ids": x, "labels": y}, "ids"), x)
    assert torch.equal(model_inputs([{"ids": [x.numpy()]}, {"labels": (y,)}], "ids"), x)
    assert torch.equal(model_inputs(Fields(x, y), "x"), x)
    assert [id(tensor) for tensor in model_inputs(((x, y), y))] == [id(x), id(y)]


def test_named_batch_entries_accompany_the_input():
    """Entries that forward accepts by name are passed in the order of its arguments."""

    class Model(nn.Module):
        def forward(self, input_ids, cache=None, attention_mask=None, labels=None, *, more=None):
            return input_ids

    x, mask, arguments = torch.ones(2, 3), torch.zeros(2, 3), forward_arguments(Model())
    assert list(arguments) == ["input_ids", "cache", "attention_mask", "labels"]
    batch = {"attention_mask": mask, "input_ids": x, "more": 1, "unknown": 2}
    assert [item if item is None else id(item) for item in model_inputs(batch, "", arguments)] == [
        id(x),
        None,
        id(mask),
    ]
    assert torch.equal(model_inputs({"x": x, "attention_mask": mask}, "x", arguments), x)
    needed = forward_arguments(nn.MultiheadAttention(2, 1))
    assert torch.equal(model_inputs({"input_ids": x, "value": mask, "key": x}, "key", needed), x)


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        ({"ids": torch.ones(2), "labels": torch.ones(2)}, "no entry 'input_ids' in a batch of ids, labels; name the"),
        ("text", "dataclasses, not str"),
        ((), "dataclasses, not tuple"),
        ({"input_ids": [1, 2]}, "dataclasses, not int"),
    ],
)
def test_batch_without_input_is_refused(batch, sentence):
    """The error lists the entries of the batch or names its type."""
    with pytest.raises(UnsuitableError, match=sentence):
        model_inputs(batch)


def test_inputs_are_split_by_rows():
    batches = [(torch.arange(20), torch.ones(3), None), (torch.arange(20, 40), torch.ones(3), None)]
    pieces = list(split_inputs(batches, 37))
    assert [piece[0].tolist() for piece in pieces] == [[*range(16)], [*range(16, 20)], [*range(20, 36)], [36]]
    assert all(len(piece[1]) == 3 for piece in pieces)


@pytest.mark.longer
def test_sampling_errors_match_brute_force():
    """The errors are independent of the split into pieces, and missing for one sample."""
    case = Case("transformer")
    metrics = emitted(train(case, [Attention(rows=20)], steps=6), HookPoint.POST_EPOCH)
    run = train(case, steps=6)
    pairs = torch.cat([batch[0] for batch in drawn_loader("attention", run.task.loader).batches(0)])[:20]
    model = run.task.model.double()
    query, key, _ = model.blocks[0].attention.qkv(model.blocks[0].attention_norm(model.embedding(pairs))).chunk(3, -1)
    samples = [
        brute_rows(query[i : i + 1], key[i : i + 1], np.ones((2, 2), dtype=bool), heads=2) for i in range(len(pairs))
    ]
    for head in range(2):
        values = [sample[head]["entropy"] for sample in samples]
        assert metrics[f"attention/entropy/{LAYER}.{head}"] == pytest.approx(np.mean(values), rel=1e-5)
        expected = np.std(values, ddof=1) / math.sqrt(len(pairs))
        assert metrics[f"attention/entropy_error/{LAYER}.{head}"] == pytest.approx(expected, rel=1e-4)
    assert metrics["attention/rows"] == len(pairs)
    with pytest.warns(RunNotice, match=r"attention\.rows is 1; attention/entropy_error needs at least 2"):
        alone = emitted(train(case, [Attention(rows=1)], steps=6), HookPoint.POST_EPOCH)
    assert not [name for name in alone if "error" in name]


@pytest.mark.guarantee("hooks-are-independent")
def test_data_order_does_not_change_metrics():
    """Three orders of the same samples give equal numbers at the same weights."""
    context = epoch_end(Stub(Fused()).eval(), hook_point=HookPoint.SNAPSHOT)
    samples = torch.randn(40, 5, WIDTH)
    orders = (torch.arange(40), torch.arange(40).flip(0), samples[:, 0, 0].argsort())
    results = [
        Attention(rows=7).compute(replace(context, loader=TensorLoader((samples,), 4, fixed_order(order))))
        for order in orders
    ]
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("written_out", [False, True])
def test_gpt2_projection_uses_its_transposed_weight(written_out):
    layer = LikeGPT2(written_out=written_out)
    query, key, value = np.split(double(layer.c_attn.weight.T), 3)
    assert_circuits(measured(layer), circuits(query, key, value, double(layer.c_proj.weight.T), HEADS))


@pytest.mark.parametrize("written_out", [False, True])
@pytest.mark.parametrize("shared", [1, HEADS])
@pytest.mark.parametrize("name", ["query_key_value", "qkv"])
def test_per_head_rows_are_recognized(name, shared, written_out):
    """The hook distinguishes a fused projection grouped by head from one grouped by role under any name."""
    layer = ByHead(name, shared=shared, written_out=written_out)
    parts = double(layer.get_submodule(name).weight).reshape(shared, -1, WIDTH // HEADS, WIDTH)
    query, key, value = (part.reshape(-1, WIDTH) for part in (parts[:, :-2], parts[:, -2], parts[:, -1]))
    key, value = (
        part.reshape(shared, -1, WIDTH).repeat(HEADS // shared, axis=0).reshape(-1, WIDTH) for part in (key, value)
    )
    assert_circuits(measured(layer), circuits(query, key, value, double(layer.dense.weight), HEADS))


def test_per_role_rows_are_recognized():
    """The name query_key_value does not make the hook assume rows grouped by head."""
    layer = Fused()
    layer.query_key_value = layer.qkv
    query, key, value = np.split(double(layer.qkv.weight), 3)
    formed = circuits(query, key, value, double(layer.proj.weight), HEADS)
    assert_circuits(measured(layer, projections="query_key_value,proj"), formed)


def test_unknown_row_order_gives_no_circuits():
    """The hook warns and still reports the attention rows."""

    class Scrambled(Fused):
        def forward(self, x):
            parts = (by_head(part, HEADS) for part in self.qkv(x).flip(-1).chunk(3, dim=-1))
            return self.proj(joined(mixed(*parts, written_out=False)))

    with pytest.warns(UserWarning, match=r"skips them: layer \(projections that do not match the heads"):
        metrics = measured(Scrambled())
    assert "entropy/layer.0" in metrics
    assert not [name for name in metrics if name.startswith(("qk", "ov", "mean_ov"))]


def test_circuits_of_projections_in_two_modules():
    layer = LikeBERT()
    weights = [double(part.weight) for part in (*layer.self.children(), layer.output["dense"])]
    assert_circuits(measured(layer), circuits(*weights, HEADS))


def test_joint_key_value_projection_is_split():
    """The layer has a separate projection for queries."""

    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_attn, self.c_attn, self.c_proj = Conv1D(WIDTH, WIDTH), Conv1D(2 * WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)

        def forward(self, x):
            parts = (self.q_attn(x), *self.c_attn(x).chunk(2, dim=-1))
            return self.c_proj(joined(mixed(*(by_head(part, HEADS) for part in parts), written_out=True)))

    layer = Cross()
    key, value = np.split(double(layer.c_attn.weight.T), 2)
    formed = circuits(double(layer.q_attn.weight.T), key, value, double(layer.c_proj.weight.T), HEADS)
    assert_circuits(measured(layer), formed)


TRIALS = [(300, 0.91, 0.985), pytest.param(2000, 0.93, 0.97, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("count", "least", "most"), TRIALS)
def test_stated_errors_have_the_stated_coverage(count, least, most):
    """Samples have 1 to 8 rows, and the bias of the ratio of sums is below its standard error."""
    torch.manual_seed(3)
    counts = torch.randint(1, 9, (count, 64, 1)).double()
    values = counts * (1 + 0.5 * torch.rand(count, 64, 1, dtype=torch.float64) + 0.05 * counts)
    truth = 1.25 + 0.05 * (torch.arange(1, 9).double().square().mean() / 4.5)
    statistics = [RowStatistics(torch.stack([v, c, v, c, v])) for v, c in zip(values, counts, strict=True)]
    missed = torch.stack([sample.entropy for sample in statistics]) - truth
    errors = torch.stack([sampling_error(sample.influence()) for sample in statistics])
    assert missed.mean().abs() < errors.mean()
    assert errors.square().mean().sqrt().item() == pytest.approx(missed.std().item(), rel=0.12)
    assert least <= (missed.abs() <= 2 * errors).double().mean() <= most


@pytest.mark.parametrize(
    "options", [{"rows": 0}, {"every": 0}, {"spectrum": 0}, {"projections": "a,b,c"}, {"projections": "a,"}]
)
def test_invalid_options_are_refused(options):
    with pytest.raises(UsageError, match=r"attention\.(rows|every|spectrum|projections) is"):
        train(Case("transformer"), [Attention(**options)])


@pytest.mark.longer
def test_recording_leaves_the_output_unchanged():
    """The output equals that of the context's plain forward pass."""
    outputs = []

    def record(ctx):
        pairs = next(ctx.loader.batches(0))[0]
        plain = ctx.forward(pairs).output
        with record_attention({LAYER: ctx.model.blocks[0].attention}) as reader:
            outputs.append(torch.equal(ctx.forward(pairs).output, plain))
        outputs.append(reader.calls[LAYER].heads == 2)

    train(Case("transformer"), [SpyHook(record)])
    assert outputs
    assert all(outputs)


@pytest.mark.parametrize(("kind", "words"), [("UserDict", "finds no entry 'input_ids'"), ("opaque", "not Opaque")])
def test_run_without_named_input_is_refused(kind, words):
    """The error is raised before the first step."""
    loader = Views(kind, data=data_for("transformer"))
    run = train(Case("transformer"), [Attention()], loader=loader, compute_loss=None, raises=UnsuitableError)
    assert words in str(run.error)
    assert run.digests == []


class Many(nn.Module):
    """A model with eight layers, 24 heads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Fused() for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@torch.no_grad()
def many(**options) -> dict:
    context = epoch_end(Many().eval(), hook_point=HookPoint.SNAPSHOT)
    return Attention(**options).compute(replace(context, loader=one_batch()))


def families(metrics: dict) -> dict[str, dict]:
    """Return the metrics of heads by family."""
    found: dict[str, dict] = {}
    for key, value in metrics.items():
        family, separator, head = key.partition("/")
        if separator:
            found.setdefault(family, {})[head] = value
    return found


def test_every_family_obeys_the_budget():
    """The default reports 15 of 24 heads of each family, those with the largest and smallest values."""
    every, chosen = families(many(top=24)), families(many())
    assert {len(part) for part in every.values()} == {24}
    assert chosen.keys() == every.keys()
    for family, part in chosen.items():
        number = lambda head, family=family: float(np.ravel(every[family][head])[0])
        ranked = sorted(every[family], key=number)
        assert {*part} == {*ranked[:5], *ranked[-10:]}, family
        assert all(np.array_equal(part[head], every[family][head]) for head in part)


def test_named_heads_are_reported_in_addition():
    part = families(many(names="layers.3.*, layers.1.0", top=1, bottom=1))["entropy"]
    assert {"layers.3.0", "layers.3.1", "layers.3.2", "layers.1.0"} <= part.keys()
    assert len(part) <= 6


def test_unknown_heads_are_refused():
    with pytest.raises(UsageError, match=r"attention\.names has the pattern 'nine\.\*', which matches none of"):
        train(Case("transformer"), [Attention(names="nine.*")])


def test_all_heads_are_written_to_a_file(tmp_path):
    hook = Attention(write_all=True)
    hook._file._path = tmp_path / "only.attention.jsonl"
    context = epoch_end(Many().eval(), hook_point=HookPoint.SNAPSHOT)
    with torch.no_grad():
        metrics = hook.compute(replace(context, loader=one_batch(), step=7))
    written = json.loads((tmp_path / "only.attention.jsonl").read_text())
    assert written["step"] == 7
    assert len(written["entropy"]) == 24
    assert len(written["qk_spectrum"]) == 4 * 24
    assert written["max_logit"]["layers.7.0"] == pytest.approx(families(many(top=24))["max_logit"]["layers.7.0"].item())
    assert len(families(metrics)["entropy"]) == 15
