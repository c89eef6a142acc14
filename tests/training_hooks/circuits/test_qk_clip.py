"""The qk_clip hook: its scaling of weights against scores computed again, its threshold, and its refusals."""

import math
from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from loopscope.errors import HookError, RunNotice, UnsuitableError, UsageError
from loopscope.hooks import AttentionCall, StatePart
from loopscope.taps import attention_read
from loopscope.training_hooks import QKClip
from loopscope.training_hooks.circuits.qk_clip import clip_factors, largest_products
from torch import Tensor, nn
from torch.nn import functional

from tests.support import Case, train
from tests.training_hooks.circuits.attention_models import (
    HEADS,
    WIDTH,
    ByHead,
    Fused,
    Grouped,
    LikeBERT,
    LikeGPT2,
    WrittenOut,
    by_head,
    joined,
)
from tests.training_hooks.circuits.test_attention_logits import Net, samples


class MultiHead(nn.MultiheadAttention):
    """The layer of torch, with all its options for keys."""

    def __init__(self, **options: Any) -> None:
        super().__init__(WIDTH, HEADS, batch_first=True, **options)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)


class OtherWidths(MultiHead):
    """Keys and values of other widths, and an additional key."""

    def __init__(self) -> None:
        super().__init__(kdim=7, vdim=9, add_bias_kv=True)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x, x[..., :7], x[..., :9])[0]


LAYERS = {
    "fused": Fused,
    "written out": lambda: WrittenOut(causal=True),
    "shared keys": Grouped,
    "GPT-2": lambda: LikeGPT2(written_out=True),
    "by head": ByHead,
    "by head, shared keys": lambda: ByHead(shared=1),
    "by head, flat name": lambda: ByHead("qkv"),
    "BERT": LikeBERT,
    "torch": lambda: MultiHead(add_bias_kv=True),
    "torch, other widths": OtherWidths,
}


def calls_of(model: nn.Module, module: nn.Module, run: Any) -> list[AttentionCall]:
    calls: list[AttentionCall] = []
    with attention_read(module, calls.append, lambda: True):
        run(model)
    return calls


def products_of(call: AttentionCall) -> Tensor:
    return torch.cat([block.products for block in call.blocks()])


def scaled_products(model: nn.Module, run: Any) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Scale the only layer by random factors, and return its old parameters and its products before and after."""
    (layer,) = QKClip()._found_layers(model).values()
    (call,) = calls_of(model, layer.module, run)
    factors = torch.rand(call.shape[1], generator=torch.Generator().manual_seed(5), dtype=torch.float64) + 0.1
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    expected = products_of(call) * factors.view(-1, 1, 1)
    targets = layer.scaled(model, layer.scalings(call, "qk_clip"), factors)
    model.load_state_dict(targets, strict=False)
    (after,) = calls_of(model, layer.module, run)
    return before, expected, products_of(after)


@pytest.mark.parametrize("name", LAYERS)
def test_every_score_is_multiplied_by_its_factor(name):
    """Each head's scale·q·k is multiplied by the factor of the head, for every pair of query and key."""
    torch.manual_seed(0)
    model = Net(LAYERS[name]()).double()
    if name == "torch, other widths":
        model.attend = lambda x: model.layer(x)
    _, expected, actual = scaled_products(model, lambda model: model(samples().double()))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("size", [2.0**-80, 2.0**60])
def test_layers_of_any_size_are_recognised(size):
    """Queries whose squares leave the range of float32."""
    model = Fused()
    (layer,) = QKClip()._found_layers(model).values()
    (call,) = calls_of(model, model, lambda model: model(samples() * size))
    assert [(part.subject, part.power) for part in layer.scalings(call, "qk_clip")] == [("query", 0.5), ("key", 0.5)]


def test_shared_keys_stay_unchanged():
    model = Net(Grouped()).double()
    before, *_ = scaled_products(model, lambda model: model(samples().double()))
    changed = {name for name, value in model.named_parameters() if not torch.equal(before[name], value)}
    assert changed == {"layer.q_proj.weight", "layer.q_proj.bias"}


def test_values_and_other_weights_stay_unchanged():
    """Of a fused projection, only the rows of queries and keys are scaled."""
    model = Net(Fused()).double()
    before, *_ = scaled_products(model, lambda model: model(samples().double()))
    changed = {name for name, value in model.named_parameters() if not torch.equal(before[name], value)}
    assert changed == {"layer.qkv.weight", "layer.qkv.bias"}
    for part in changed:
        assert torch.equal(before[part][2 * WIDTH :], model.get_parameter(part)[2 * WIDTH :])
        assert not (before[part][: 2 * WIDTH] == model.get_parameter(part)[: 2 * WIDTH]).any()


def test_largest_products_ignore_masked_keys():
    """Brute force over visible pairs; a soft cap and a bias do not count."""
    model = WrittenOut(causal=True).double()
    (call,) = calls_of(model, model, lambda model: model(samples().double()))
    query, key = (by_head(part(samples().double()), HEADS) for part in (model.query, model.key))
    expected = [
        max(
            (query[b, h, i] @ key[b, h, j]).item() / math.sqrt(WIDTH // HEADS)
            for b in range(len(query))
            for i in range(query.shape[2])
            for j in range(i + 1)
        )
        for h in range(HEADS)
    ]
    assert largest_products(call).tolist() == pytest.approx(expected)


def test_factors_are_those_of_the_paper():
    logits = torch.tensor([50.0, 100.0, 400.0, math.inf, math.nan, -7.0])
    assert clip_factors(logits, 100.0).tolist() == [1.0, 1.0, 0.25, 1.0, 1.0, 1.0]


def attached(
    model: nn.Module, folder: Path, steps: list[list[Tensor]], rate: float = 0.0, **options: Any
) -> list[dict]:
    """Train steps of micro-batches with the hook, and return its metrics by step and short name."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=rate), []
    settings = {"out": folder, "display": "none", "accumulate": len(steps[0]), "audit": True}
    with loopscope.attach(model, optimizer, hooks=[QKClip(**options)], **settings) as scope:
        for index, batch in enumerate(scope.batches([batch for step in steps for batch in step]), start=1):
            scope.backward(model(batch).square().mean())
            if index % len(steps[0]) == 0:
                optimizer.step()
                optimizer.zero_grad()
                metrics = scope.last_metrics()
                found.append({key.removeprefix("qk_clip/"): float(value) for key, value in metrics.items()})
    return found


@pytest.mark.longer
@pytest.mark.parametrize("name", ["fused", "shared keys", "torch"])
def test_same_batch_then_has_the_threshold(name, tmp_path):
    """With learning rate 0 the second step's largest logit is the threshold, and nothing more is clipped."""
    torch.manual_seed(0)
    model = Net(LAYERS[name]()).double()
    first, second = attached(model, tmp_path / "run", [[samples().double()]] * 2, threshold=0.5)
    assert first["largest_logit"] > 0.5
    assert first["smallest_factor"] == pytest.approx(0.5 / first["largest_logit"])
    assert first["clipped_share"] == first["clipped_heads"] / (4 if name == "shared keys" else HEADS)
    assert second["largest_logit"] == pytest.approx(0.5, rel=1e-12)


@pytest.mark.longer
def test_heads_below_threshold_keep_their_bits(tmp_path):
    torch.manual_seed(0)
    model = Net(WrittenOut())
    with torch.no_grad():
        model.layer.query.weight[: WIDTH // HEADS] *= 50
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    (metrics,) = attached(model, tmp_path / "run", [[samples()]], threshold=20.0)
    assert metrics["clipped_heads"] == 1
    for name in ("layer.query.weight", "layer.key.weight"):
        rows = before[name] == model.get_parameter(name)
        assert not rows[: WIDTH // HEADS].any()
        assert rows[WIDTH // HEADS :].all()


@pytest.mark.longer
def test_maximum_is_over_micro_batches(tmp_path):
    model = Net(Fused()).double()
    torch.nn.init.normal_(model.layer.qkv.weight)
    whole = attached(model, tmp_path / "a", [[samples().double()]], threshold=1e6)
    parts = attached(model, tmp_path / "b", [list(samples().double().split([1, 3, 2]))], threshold=1e6)
    assert parts[0]["largest_logit"] == pytest.approx(whole[0]["largest_logit"], rel=1e-12)


@pytest.mark.longer
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_are_clipped(reentrant, tmp_path):
    model = Net(Fused(), reentrant).double()
    *_, last = attached(model, tmp_path / "run", [[samples().double()]] * 2, threshold=0.1)
    assert last["largest_logit"] == pytest.approx(0.1)


@pytest.mark.longer
def test_bfloat16_reaches_threshold_to_rounding(tmp_path):
    model = Net(Fused()).bfloat16()
    *_, last = attached(model, tmp_path / "run", [[samples().bfloat16()]] * 2, threshold=0.5)
    assert last["largest_logit"] == pytest.approx(0.5, rel=0.02)


@pytest.mark.longer
def test_nonfinite_logits_clip_nothing(tmp_path):
    model = Net(WrittenOut())
    with torch.no_grad():
        model.layer.query.weight[0, 0] = math.inf
    (metrics,) = attached(model, tmp_path / "run", [[samples()]], threshold=1e6)
    assert not math.isfinite(metrics["largest_logit"])
    assert (metrics["clipped_heads"], metrics["smallest_factor"]) == (0, 1)


def test_training_is_recorded_as_treated():
    """The clip acts within a training, and the record names the treatment."""
    run = train(Case("transformer"), [QKClip(threshold=1e-3)])
    assert QKClip.commits == {StatePart.PARAMETERS}
    ((metrics, *_),) = run.sink.emitted
    assert max(metrics["qk_clip/clipped_heads"].values) >= 1
    assert min(metrics["qk_clip/smallest_factor"].values) < 1


class Normalised(Fused):
    """Attention that normalises queries and keys by a function."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (by_head(part, HEADS) for part in self.qkv(x).chunk(3, dim=-1))
        query, key = functional.normalize(query, dim=-1), functional.normalize(key, dim=-1)
        return self.proj(joined(functional.scaled_dot_product_attention(query, key, value)))


class WithNorms(Fused):
    """Attention with modules that normalise queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.LayerNorm(WIDTH // HEADS), nn.LayerNorm(WIDTH // HEADS)


class Reversed(Fused):
    """Attention with the values first in the fused projection."""

    def forward(self, x: Tensor) -> Tensor:
        value, key, query = (by_head(part, HEADS) for part in self.qkv(x).chunk(3, dim=-1))
        return self.proj(joined(functional.scaled_dot_product_attention(query, key, value)))


class ByEinsum(WrittenOut):
    """Attention with scores from an einsum, whose factors are not read."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (by_head(part(x), HEADS) for part in (self.query, self.key, self.value))
        return self.dense(joined(torch.einsum("bhqd,bhkd->bhqk", query, key).softmax(dim=-1) @ value))


REFUSED = {
    Normalised: "layer: its queries and keys are not proportional to the outputs of its projections, as with a norm",
    WithNorms: r"layer normalises both afterwards \(q_norm, k_norm: QK-norm\), so scaling has no effect",
    Reversed: "layer: its queries and keys are not proportional",
    ByEinsum: "layer: its scores are not a product of queries and keys that can be read",
}


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> None:
    with loopscope.attach(model, optimizer, hooks=[QKClip()], **settings) as scope:
        for batch in scope.batches([samples()]):
            scope.backward(model(batch).square().mean())
            optimizer.step()


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("has_loss", [True, False])
def test_layers_that_cannot_be_scaled_are_refused(kind, has_loss, tmp_path):
    """Layers are refused by name before the first step if the loss is known, else in the first step."""
    model = Net(kind())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    options = {"loss": lambda model, batch: model(batch).square().mean()} if has_loss else {}
    settings = {"out": tmp_path / "run", "display": "none", **options}
    with pytest.raises((UsageError, HookError), match=REFUSED[kind]):
        one_step(model, optimizer, settings)
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("model", ["batchnorm_mlp", "tied"])
def test_model_without_attention_is_refused(model):
    with pytest.raises(UsageError, match=r"Hook 'qk_clip' finds no attention in \w+ whose queries and keys it can"):
        train(Case(model), [QKClip()])


def test_frozen_layers_are_left_out(tmp_path):
    """A notice names them; without any other layer the hook is unsuitable."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Fused(), Fused())
    model[1].requires_grad_(False)
    hook = QKClip()
    with pytest.warns(RunNotice, match="qk_clip leaves out 1, whose weights of queries and keys are frozen"):
        assert [*hook._found_layers(model)] == ["2"]
    model[2].requires_grad_(False)
    with pytest.warns(RunNotice), pytest.raises(UnsuitableError, match="only frozen weights of queries and keys"):
        hook._found_layers(model)


def test_layers_with_shared_weights_are_refused():
    model = nn.Sequential(Fused(), Fused())
    model[1].qkv.weight = model[0].qkv.weight
    with pytest.raises(UnsuitableError, match="but 0, 1 share those of queries or keys"):
        QKClip()._found_layers(model)


@pytest.mark.parametrize("option", [{"threshold": 0.0}, {"threshold": math.inf}, {"interval": 0}])
def test_invalid_options_are_refused(option):
    with pytest.raises(UsageError, match=r"qk_clip\.\w+ is"):
        QKClip(**option)
