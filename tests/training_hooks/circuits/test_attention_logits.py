"""The attention_logits hook against attention written out in float64, in models of several kinds and libraries."""

import json
import math
from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from loopscope.errors import RunNotice, UsageError
from loopscope.hooks import HookPoint, TapOwner
from loopscope.taps import TapSet
from loopscope.training_hooks import AttentionLogits
from loopscope.training_hooks.circuits.attention_logits import attention_modules
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.support import Case, train
from tests.training_hooks.circuits.attention_models import (
    HEADS,
    WIDTH,
    Fused,
    Grouped,
    LikeBERT,
    WrittenOut,
    brute_rows,
    by_head,
    joined,
)
from tests.training_hooks.epoch_end import epoch_end

ROWS, TOKENS = 6, 5
LAYER = "blocks.0.attention"


class Net(nn.Module):
    """An attention layer and a linear layer, which activation checkpointing may compute twice."""

    def __init__(self, layer: nn.Module, reentrant: bool | None = None) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.reentrant is None:
            return self.last(self.attend(x)).mean(dim=1)
        return self.last(checkpoint(self.attend, x, use_reentrant=self.reentrant)).mean(dim=1)

    def attend(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x)[0] if isinstance(self.layer, nn.MultiheadAttention) else self.layer(x)


def samples() -> Tensor:
    return 3 * torch.randn(ROWS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(3))


def measured(model: nn.Module, batches: list[Any], **options: Any) -> dict[str, float]:
    """Call the hook in one step of micro-batches, with its taps on the model, and return its metrics."""
    hook, taps = AttentionLogits(**{"interval": 1, **options}), TapSet(model, audit=True)
    hook._modules = attention_modules(model, hook.name, hook.layers)
    hook.compute(epoch_end(model, hook_point=HookPoint.PRE_STEP))
    taps.attach(TapOwner(hook.name, lambda: True, lambda target, function: function(), False), hook.taps(model))
    for batch in batches:
        (model(**batch).loss if isinstance(batch, dict) else model(batch).square().mean()).backward()
    taps.remove()
    return hook.compute(epoch_end(model, hook_point=HookPoint.POST_BACKWARD))


def attached(model: nn.Module, folder: Path, batches: list[Any], **options: Any) -> dict[str, float]:
    """Train one step of micro-batches, attached, and return the hook's metrics of the step by their short names."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    hooks = [AttentionLogits(**{"interval": 1, **options})]
    settings = {"out": folder / "run", "display": "none", "accumulate": len(batches)}
    with loopscope.attach(model, optimizer, hooks=hooks, audit=True, **settings) as scope:
        for batch in scope.batches(batches):
            scope.backward(model(**batch).loss if isinstance(batch, dict) else model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        metrics = scope.last_metrics()
    prefix = "attention_logits/"
    return {key.removeprefix(prefix): float(value) for key, value in metrics.items() if key.startswith(prefix)}


def assert_rows(metrics: dict[str, float], expected: list[dict[str, Any]], layer: str = "layer", rel: float = 1e-5):
    logits = [head["largest"] for head in expected]
    for head, logit in enumerate(logits):
        assert metrics[f"max_logit/{layer}.{head}"] == pytest.approx(logit, rel=rel)
    mean = sum(head["entropy"] for head in expected) / len(expected)
    assert metrics[f"entropy/{layer}"] == pytest.approx(mean, rel=rel)
    assert metrics["largest_logit"] == pytest.approx(max(logits), rel=rel)


def visible(causal: bool) -> Any:
    every = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    return (every.tril() if causal else every).numpy()


def projected(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.linear(x.double(), weight.double(), None if bias is None else bias.double())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", [Fused, WrittenOut])
def test_metrics_match_loops_over_rows(kind, causal):
    model = Net(kind(causal=causal))
    metrics = measured(model, [samples()])
    x = projected(samples(), model.first.weight, model.first.bias)
    if kind is Fused:
        query, key, _ = projected(x, model.layer.qkv.weight, model.layer.qkv.bias).chunk(3, dim=-1)
    else:
        query, key = projected(x, model.layer.query.weight), projected(x, model.layer.key.weight)
    expected = brute_rows(query, key, visible(causal), HEADS)
    assert_rows(metrics, expected)
    assert metrics["mean_entropy"] == pytest.approx(metrics["entropy/layer"])
    shares = sum(head["share"] for head in expected) / HEADS
    assert metrics["mean_normalised_entropy"] == pytest.approx(shares, rel=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_multihead_attention_matches_loops(causal):
    """The layer of torch does not return its scores."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    model = Net(attention)
    mask = nn.Transformer.generate_square_subsequent_mask(TOKENS) if causal else None
    model.attend = lambda x: attention(x, x, x, attn_mask=mask, need_weights=False)[0]
    metrics = measured(model, [samples()])
    x = projected(samples(), model.first.weight, model.first.bias)
    weights, biases = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
    assert_rows(metrics, brute_rows(*map(projected, (x, x), weights[:2], biases[:2]), visible(causal), HEADS))


def test_heads_with_shared_keys_are_separate():
    model = Net(Grouped())
    metrics = measured(model, [samples()])
    x, layer = projected(samples(), model.first.weight, model.first.bias), model.layer
    query, key = (
        projected(x, layer.q_proj.weight, layer.q_proj.bias),
        projected(x, layer.k_proj.weight, layer.k_proj.bias),
    )
    shared = torch.cat([key[..., :4], key[..., :4], key[..., 4:], key[..., 4:]], dim=-1)
    assert_rows(metrics, brute_rows(query, shared, visible(False), 4))


@pytest.mark.parametrize(
    "layer", [Fused(causal=True), WrittenOut(), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)]
)
def test_micro_batches_are_one_batch(layer, tmp_path):
    """Micro-batches of other sizes give the numbers of the whole batch, also in an attached loop."""
    model = Net(layer)
    whole, batches = measured(model, [samples()]), list(samples().split([1, 3, 2]))
    assert measured(model, batches) == pytest.approx(whole, rel=1e-5)
    if isinstance(layer, Fused):
        assert attached(model, tmp_path, batches) == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", [Fused, WrittenOut])
def test_checkpointed_layers_count_once(kind, reentrant):
    model = Net(kind())
    plain = measured(model, [samples()])
    model.reentrant = reentrant
    assert measured(model, [samples()]) == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("kind", [Fused, WrittenOut])
@pytest.mark.parametrize("autocast", [False, True])
def test_low_precision_is_measured_as_computed(kind, autocast):
    """In bf16, and under autocasting, the numbers are those of rounded queries and keys."""
    model = Net(kind())
    exact = measured(model, [samples()])
    if not autocast:
        rounded = measured(model.bfloat16(), [samples().bfloat16()])
    else:
        forward = model.forward
        model.forward = lambda x: torch.autocast("cpu", torch.bfloat16)(forward)(x).float()
        rounded = measured(model, [samples()])
    assert rounded == pytest.approx(exact, rel=0.05)
    assert rounded != pytest.approx(exact, rel=1e-5)


def test_zero_scores_have_full_entropy():
    """Keys of zero give logits of 0 and the entropy ln n, and where scores equal shifted ones."""
    """Keys of zero give logits of 0 and the entropy ln n, also where scores look like shifted ones."""
    layer = WrittenOut()
    nn.init.zeros_(layer.key.weight)
    metrics = measured(Net(layer), [samples()])
    assert metrics["largest_logit"] == 0
    assert metrics["mean_entropy"] == pytest.approx(math.log(TOKENS))
    assert metrics["mean_normalised_entropy"] == pytest.approx(1)


class Hidden(WrittenOut):
    """Attention with scores from an einsum, of which the hook knows only the shifted values."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (by_head(part(x), HEADS) for part in (self.query, self.key, self.value))
        scores = torch.einsum("bhqd,bhkd->bhqk", query, key)
        largest = torch.stack([row.max() for row in scores.flatten(0, 2)]).view(*scores.shape[:3], 1)
        return self.dense(joined((scores - largest).softmax(dim=-1) @ value))


def test_unknown_shifts_give_no_maximum():
    """If every row's maximum is 0, the layer has subtracted it in an unknown way: NaN, with the right entropy."""
    model = Net(Hidden())
    metrics = measured(model, [samples()])
    assert math.isnan(metrics["largest_logit"])
    assert math.isnan(metrics["max_logit/layer.0"])
    x = projected(samples(), model.first.weight, model.first.bias)
    query, key = projected(x, model.layer.query.weight), projected(x, model.layer.key.weight)
    expected = brute_rows(query * 2, key, visible(False), HEADS)
    assert metrics["mean_entropy"] == pytest.approx(sum(head["entropy"] for head in expected) / HEADS, rel=1e-5)


@pytest.mark.longer
def test_heads_are_chosen_by_budget(tmp_path):
    """The default reports 15 of 21 heads; patterns add others, and the file has all."""
    model = nn.Sequential(*(Net(Fused()) for _ in range(7)))
    for net in model[:-1]:
        net.last = nn.Linear(WIDTH, WIDTH)
        net.forward = lambda x, net=net: net.last(net.attend(net.first(x)))
    metrics = attached(model, tmp_path, [samples()], names="3.layer*", write_all=True)
    names = [key for key in metrics if key.startswith("max_logit/")]
    assert 15 <= len(names) <= 18
    assert {f"max_logit/3.layer.{head}" for head in range(HEADS)} <= {*names}
    (line,) = (tmp_path / "run" / "run.attention_logits.jsonl").read_text().splitlines()
    written = json.loads(line)
    assert written["step"] == 1
    assert len(written["max_logit"]) == len(written["entropy"]) == 7 * HEADS
    assert max(written["max_logit"].values()) == pytest.approx(metrics["largest_logit"])


def test_interval_selects_steps():
    run = train(Case("transformer"), [AttentionLogits(interval=2)])
    (rows,) = [metrics for metrics, _, point, _ in run.sink.emitted if point is HookPoint.POST_BACKWARD]
    assert rows["attention_logits/largest_logit"].steps == [1, 3]


def test_modules_are_found_by_names_or_class():
    """A class called attention counts without projections; wrappers around attention count, too."""
    wrapper = type("MyAttn", (nn.Module,), {})()
    model = nn.ModuleDict({"a": Fused(), "b": wrapper, "c": LikeBERT(), "d": nn.Linear(2, 2)})
    assert attention_modules(model, "attention_logits") == ["a", "b", "c", "c.self"]
    assert attention_modules(model, "attention_logits", "c.self, d*") == ["c.self", "d"]
    with pytest.raises(UsageError, match=r"attention_logits\.layers has the pattern 'x\*', which matches no module"):
        attention_modules(model, "attention_logits", "x*")


@pytest.mark.guarantee("observers-change-nothing")
def test_frozen_encoder_keeps_its_fast_path():
    """A frozen encoder layer in eval mode has no tap, which would change how PyTorch computes it."""
    frozen = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True).eval().requires_grad_(False)
    model = nn.Sequential(frozen, nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True))
    assert attention_modules(model, "attention_logits") == ["1.self_attn"]


@pytest.mark.parametrize("model", ["batchnorm_mlp", "tied"])
def test_model_without_attention_is_refused(model):
    with pytest.raises(UsageError, match=r"Hook 'attention_logits' finds no attention in \w+: no nn\.Multihead"):
        train(Case(model), [AttentionLogits()])


def test_unread_modules_are_named():
    """A module that computes no attention is named, without those around or inside of read modules."""
    model = Net(LikeBERT())
    model.spare = Fused()
    with pytest.warns(RunNotice, match=r"attention_logits reads no attention in spare: they compute none, or"):
        metrics = measured(model, [samples(), samples()])
    assert "entropy/layer.self" in metrics


@pytest.mark.parametrize("option", [{"interval": 0}, {"top": -1}, {"bottom": -1}])
def test_invalid_options_are_refused(option):
    with pytest.raises(UsageError, match=r"attention_logits\.\w+ is"):
        AttentionLogits(**option)
