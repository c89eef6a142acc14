"""Recorded attention calls of all styles compared with a softmax in float64 written as loops."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from loopscope.hooks import WrittenCall, attention_calls
from loopscope.training_hooks.circuits.attention_scores import (
    HeadsCall,
    RowStatistics,
    record_attention,
    row_statistics,
)
from torch import nn

from tests.training_hooks.circuits.attention_models import (
    HEADS,
    WIDTH,
    Around,
    Fused,
    Grouped,
    WrittenOut,
    brute_rows,
    by_head,
    joined,
)

BATCH, TOKENS = 4, 5
CAUSAL = np.tril(np.ones((TOKENS, TOKENS), dtype=bool))
ALL = np.ones((TOKENS, TOKENS), dtype=bool)
PADDED = np.arange(TOKENS) < np.array([5, 3, 4, 1])[:, None]
"""Mask of the tokens that are not padding, shape (samples, tokens)."""


@torch.no_grad()
def recorded_call(model: nn.Module, module: nn.Module | None = None, inputs: torch.Tensor | None = None) -> HeadsCall:
    with record_attention({"only": module or model}) as reader:
        model.eval()(tokens() if inputs is None else inputs)
    return reader.calls["only"]


def tokens() -> torch.Tensor:
    return 2 * torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))


def assert_rows(call: HeadsCall, expected: list[dict]) -> None:
    assert call.heads == len(expected)
    rows = call.statistics
    for name, values in (("entropy", rows.entropy), ("share", rows.normalised_entropy), ("largest", rows.largest)):
        np.testing.assert_allclose(values.numpy(), [head[name] for head in expected], rtol=2e-5, atol=1e-6)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())


def in_projections(attention: nn.MultiheadAttention, x: torch.Tensor) -> list[torch.Tensor]:
    weights, biases = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
    return [linear(x, weight, bias) for weight, bias in zip(weights[:2], biases[:2], strict=True)]


def multihead(**options: object) -> nn.MultiheadAttention:
    torch.manual_seed(2)
    attention = nn.MultiheadAttention(WIDTH, HEADS, **{"batch_first": True, **options})
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.5)
    return attention


@pytest.mark.parametrize("causal", [False, True])
def test_scaled_dot_product_attention_is_recorded(causal):
    model = Fused(causal=causal)
    query, key, _ = linear(tokens(), model.qkv.weight, model.qkv.bias).chunk(3, dim=-1)
    assert_rows(recorded_call(model), brute_rows(query, key, CAUSAL if causal else ALL, HEADS))


def test_masks_and_biases_are_recorded():
    """Boolean masks hide keys, and an additive mask also shifts the scores."""
    visible = np.random.default_rng(0).random((TOKENS, TOKENS)) < 0.6
    visible[2] = False
    for mask, bias in ((torch.from_numpy(visible), 0.0), (torch.from_numpy(np.where(visible, 1.5, -1e4)).float(), 1.5)):
        model = Fused(mask=mask)
        query, key, _ = linear(tokens(), model.qkv.weight, model.qkv.bias).chunk(3, dim=-1)
        assert_rows(recorded_call(model), brute_rows(query, key, visible, HEADS, bias))


class Shifted(WrittenOut):
    """Handwritten attention that subtracts something from each row, or appends sinks, before its softmax."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (by_head(part(x), HEADS) for part in (self.query, self.key, self.value))
        scores = self.change(query @ key.mT / math.sqrt(WIDTH // HEADS))
        return self.dense(joined(nn.functional.softmax(scores, dim=-1)[..., :TOKENS] @ value))


def with_sinks(scores: torch.Tensor) -> torch.Tensor:
    scores = torch.cat([scores, torch.linspace(-3, 9, HEADS).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    return scores - scores.max(dim=-1, keepdim=True).values


CHANGES = {
    "maximum": lambda scores: scores - scores.max(dim=-1, keepdim=True)[0],
    "in place": lambda scores: scores.sub_(scores.amax(dim=-1, keepdim=True)),
    "detached": lambda scores: scores - scores.detach().amax(dim=-1).unsqueeze(-1),
    "of all": lambda scores: scores - scores.amax(dim=(-2, -1), keepdim=True),
    "sinks": with_sinks,
}
"""What a layer may do to a row of scores."""


@pytest.mark.parametrize("change", CHANGES)
def test_shifted_scores_are_recorded_unshifted(change):
    """A layer may subtract each row's maximum, which its softmax ignores; a sink is not a key."""
    model = Shifted(CHANGES[change])
    query, key = linear(tokens(), model.query.weight), linear(tokens(), model.key.weight)
    assert_rows(recorded_call(model), brute_rows(query, key, ALL, HEADS))


@pytest.mark.parametrize("causal", [False, True])
def test_explicit_softmax_is_recorded(causal):
    model = WrittenOut(causal=causal)
    query, key = linear(tokens(), model.query.weight), linear(tokens(), model.key.weight)
    call = recorded_call(model)
    assert call.head_dim is None
    assert_rows(call, brute_rows(query, key, CAUSAL if causal else ALL, HEADS))


def test_heads_with_shared_keys_are_recorded():
    model = Grouped()
    key = linear(tokens(), model.k_proj.weight, model.k_proj.bias)
    shared = torch.cat([key[..., :4], key[..., :4], key[..., 4:], key[..., 4:]], dim=-1)
    assert_rows(
        recorded_call(model), brute_rows(linear(tokens(), model.q_proj.weight, model.q_proj.bias), shared, ALL, 4)
    )


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention_is_recorded(batch_first, need_weights):
    attention = multihead(batch_first=batch_first)
    model = Around(attention, lambda inner, x: inner(x, x, x, need_weights=need_weights)[0])
    inputs = tokens() if batch_first else tokens().transpose(0, 1)
    assert_rows(recorded_call(model, attention, inputs), brute_rows(*in_projections(attention, tokens()), ALL, HEADS))


@pytest.mark.parametrize("boolean", [True, False])
def test_masks_of_multihead_attention_are_recorded(boolean):
    attention = multihead()
    mask = torch.from_numpy(~CAUSAL) if boolean else nn.Transformer.generate_square_subsequent_mask(TOKENS)
    padding = torch.from_numpy(~PADDED)
    padding = padding if boolean else torch.zeros(padding.shape).masked_fill(padding, -torch.inf)
    model = Around(attention, lambda inner, x: inner(x, x, x, attn_mask=mask, key_padding_mask=padding)[0])
    visible = CAUSAL & PADDED[:, None, :]
    assert_rows(recorded_call(model, attention), brute_rows(*in_projections(attention, tokens()), visible, HEADS))


def test_per_head_masks_are_recorded():
    attention = multihead()
    hidden = torch.rand(BATCH, HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(3)) < 0.3
    hidden[..., 0] = False
    model = Around(attention, lambda inner, x: inner(x, x, x, attn_mask=hidden.flatten(0, 1))[0])
    call = recorded_call(model, attention)
    for head in range(HEADS):
        expected = brute_rows(*in_projections(attention, tokens()), ~hidden[:, head].numpy(), HEADS)[head]
        assert call.statistics.entropy[head].item() == pytest.approx(expected["entropy"], rel=2e-5)


def test_multihead_attention_with_extra_keys_is_recorded():
    """Keys and values of other widths, bias_kv and add_zero_attn are covered."""
    attention = multihead(kdim=7, vdim=9, add_bias_kv=True, add_zero_attn=True, bias=False)
    keys, values = torch.randn(BATCH, 6, 7), torch.randn(BATCH, 6, 9)
    model = Around(attention, lambda inner, x: inner(x, keys, values)[0])
    key = linear(keys, attention.k_proj_weight)
    key = torch.cat([key, attention.bias_k.double().expand(BATCH, 1, -1), torch.zeros_like(key[:, :1])], dim=1)
    visible = np.ones((TOKENS, 8), dtype=bool)
    query = linear(tokens(), attention.q_proj_weight)
    assert_rows(recorded_call(model, attention), brute_rows(query, key, visible, HEADS))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_encoder_layer_fast_path_is_recorded(batch_first, causal):
    """The scores are recorded although the layer has a fused fast path, with and without a causal mask."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS + 1, 16, batch_first=batch_first, norm_first=False)
    mask = nn.Transformer.generate_square_subsequent_mask(TOKENS) if causal else None
    model = Around(layer, lambda inner, x: inner(x, src_mask=mask, is_causal=causal))
    inputs = tokens() if batch_first else tokens().transpose(0, 1)
    call = recorded_call(model, layer.self_attn, inputs)
    visible = CAUSAL if causal else ALL
    assert_rows(call, brute_rows(*in_projections(layer.self_attn, tokens()), visible, HEADS + 1))


def test_encoder_with_padding_is_recorded():
    """The scores are recorded although the encoder would convert padded input to nested tensors."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS + 1, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2)
    assert encoder.enable_nested_tensor
    first = encoder.layers[0].self_attn
    model = Around(encoder, lambda inner, x: inner(x, src_key_padding_mask=torch.from_numpy(~PADDED)))
    assert_rows(
        recorded_call(model, first), brute_rows(*in_projections(first, tokens()), PADDED[:, None, :], HEADS + 1)
    )


def test_both_attentions_of_decoder_layer_are_recorded():
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 16, batch_first=True).eval()
    memory = torch.randn(BATCH, 7, WIDTH)
    with torch.no_grad(), record_attention({"self": layer.self_attn, "cross": layer.multihead_attn}) as reader:
        layer(tokens(), memory)
        inner = layer.norm1(tokens() + layer.self_attn(tokens(), tokens(), tokens())[0])
    query, key = in_projections(layer.multihead_attn, inner)[0], in_projections(layer.multihead_attn, memory)[1]
    assert_rows(reader.calls["cross"], brute_rows(query, key, np.ones((TOKENS, 7), dtype=bool), HEADS))
    assert_rows(reader.calls["self"], brute_rows(*in_projections(layer.self_attn, tokens()), ALL, HEADS))


@pytest.mark.compile
def test_compiled_layer_is_recorded_and_stays_compiled():
    model = Fused()
    query, key, _ = linear(tokens(), model.qkv.weight, model.qkv.bias).chunk(3, dim=-1)
    compiled = []
    model.compile(backend=lambda graph, inputs: compiled.append(graph) or graph.forward)
    with torch.no_grad():
        model(tokens())
        count = len(compiled)
        assert_rows(recorded_call(model), brute_rows(query, key, ALL, HEADS))
        model(tokens())
    assert len(compiled) == count > 0


def test_statistics_are_independent_of_block_size(monkeypatch):
    model = Fused(causal=True)
    one_block = recorded_call(model).statistics
    monkeypatch.setattr(attention_calls, "BLOCK_ELEMENTS", {"cpu": 1})
    small_blocks = recorded_call(model).statistics
    torch.testing.assert_close(vars(small_blocks), vars(one_block), equal_nan=True)


def test_recording_changes_no_output_and_removes_hooks():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0).train()
    with torch.no_grad():
        bare = layer(tokens())
        with record_attention({"layer": layer.self_attn}):
            assert torch.equal(layer(tokens()), bare)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules())
    assert not any(module._forward_hooks_always_called for module in layer.modules())


def test_hooks_are_removed_after_an_error():
    model = Around(Fused(), lambda inner, x: inner(x) @ x)
    with pytest.raises(RuntimeError), record_attention({"layer": model.inner}):
        model(tokens())
    assert not model.inner._forward_hooks
    assert not model.inner._forward_pre_hooks


def test_attention_of_other_modules_is_not_recorded():
    model = nn.Sequential(Fused(), WrittenOut())
    with torch.no_grad(), record_attention({"second": model[1]}) as reader:
        model(tokens())
    assert set(reader.calls) == {"second"}
    assert reader.calls["second"].head_dim is None


def statistics_of(scores: torch.Tensor) -> RowStatistics:
    """Return the statistics of scores of an unknown origin."""
    return row_statistics(WrittenCall(query=None, key=None, scores=scores, keys=scores.shape[-1]))


def test_row_statistics_match_closed_forms():
    uniform = statistics_of(torch.zeros(2, 1, 3, 8))
    assert uniform.entropy.item() == pytest.approx(np.log(8))
    assert uniform.normalised_entropy.item() == pytest.approx(1)
    sharp = statistics_of(1e3 * torch.eye(4)[None, None])
    assert (sharp.entropy.item(), sharp.largest.item()) == (0, 1e3)
    single_key = statistics_of(torch.full((1, 1, 2, 1), 0.5))
    assert single_key.entropy.item() == 0
    assert single_key.normalised_entropy.isnan().all()


def test_nonfinite_scores_give_nan():
    broken = statistics_of(torch.tensor([[[[1.0, torch.nan]]], [[[1.0, 2.0]]]]))
    assert broken.entropy.isnan().all()
    assert broken.largest.isnan().all()
    all_hidden = statistics_of(torch.full((1, 1, 2, 3), -torch.inf))
    assert all_hidden.entropy.isnan().all()
    assert all_hidden.largest.isnan().all()
