"""The decoder of tied_lm against other implementations of the same parts."""

import pytest
import torch
from loopscope.experiments.tied_lm.model import (
    Decoder,
    DecoderShape,
    generate,
    language_model_loss,
    rotary_angles,
    rotate,
)
from torch import Tensor

SHAPE = {"vocabulary": 31, "context": 12, "width": 16, "layers": 2, "heads": 2, "hidden": 24}


def decoder(**options: bool) -> Decoder:
    torch.manual_seed(3)
    return Decoder(DecoderShape(**SHAPE, **options)).double()


def tokens(length: int = 12) -> Tensor:
    return torch.randint(31, (3, length), generator=torch.Generator().manual_seed(4))


def as_llama(model: Decoder) -> torch.nn.Module:
    """Build the model of transformers with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = model.shape
    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, max_position_embeddings=shape.context,
        rms_norm_eps=1e-6, tie_word_embeddings=shape.weight_tying, attention_bias=False,
    )  # fmt: skip
    llama = LlamaForCausalLM(config).double()
    weights = model.state_dict()
    renamed = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight",
               "head.weight": "lm_head.weight"}  # fmt: skip
    parts = {
        "blocks.": "model.layers.",
        "attention_norm": "input_layernorm",
        "ff_norm": "post_attention_layernorm",
        "attention.": "self_attn.",
        ".ff.": ".mlp.",
    }
    for name in weights:
        target = renamed.get(name, name)
        for before, after in parts.items() if name not in renamed else ():
            target = target.replace(before, after)
        llama.get_parameter(target).data.copy_(weights[name])
    return llama


@pytest.mark.parametrize("tied", [True, False])
def test_logits_and_gradients_match_llama(tied: bool) -> None:
    model = decoder(weight_tying=tied)
    llama = as_llama(model)
    logits, expected = model(tokens()), llama(tokens()).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-6)  # its rotary angles are float32
    for model_logits in (logits, expected):
        language_model_loss(model_logits[:, :-1], tokens()[:, 1:]).backward()
    torch.testing.assert_close(
        model.embedding.weight.grad, llama.get_input_embeddings().weight.grad, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("qk_norm", [True, False])
def test_logits_ignore_later_tokens(qk_norm: bool) -> None:
    model, changed = decoder(qk_norm=qk_norm), tokens().clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 31
    before, after = model(tokens()), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7], after[:, 7])


def test_rotary_products_depend_on_distance_only() -> None:
    """The dot product of rotated queries and keys depends on their distance, and rotation preserves norms."""
    angles = rotary_angles(10, 8, 10_000.0).double()
    query, key = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    turned = [rotate(x.expand(1, 1, 10, 8), angles.cos(), angles.sin())[0, 0] for x in (query, key)]
    products = turned[0] @ turned[1].T
    for distance in range(1, 5):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(turned[0].norm(dim=-1), query.norm().expand(10))


def test_queries_and_keys_are_normalised_by_head() -> None:
    attention = decoder(qk_norm=True).blocks[0].attention
    normed = attention.q_norm(attention._by_head(attention.q_proj(torch.randn(2, 5, 16, dtype=torch.float64))))
    torch.testing.assert_close(normed.square().mean(-1), torch.ones(2, 2, 5, dtype=torch.float64), rtol=1e-3, atol=0)


def test_tied_weights_share_one_parameter() -> None:
    """The untied model has one more matrix of 31 by 16 weights."""
    tied, untied = decoder(), decoder(weight_tying=False)
    assert tied.head.weight is tied.embedding.weight
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in (untied, tied)]
    assert counts[0] - counts[1] == 31 * 16


def test_loss_is_cross_entropy_plus_z_loss() -> None:
    """The loss matches a calculation by hand, without and with the squared log partition function."""
    logits, targets = torch.randn(2, 5, 31, dtype=torch.float64), tokens(5)[:2]
    logs = logits.exp().sum(-1).log()
    by_hand = (logs - logits.gather(-1, targets[..., None])[..., 0]).mean()
    assert float(language_model_loss(logits, targets)) == pytest.approx(float(by_hand), rel=1e-6)
    with_z = language_model_loss(logits, targets, 0.01)
    assert float(with_z) == pytest.approx(float(by_hand + 0.01 * logs.square().mean()), rel=1e-6)


def test_generated_text_depends_on_generator_only() -> None:
    """Equal seeds give equal text, also when the text is longer than the context of the model."""
    model = decoder().eval()
    drawn = [
        generate(model, tokens()[0, :3], 15, torch.Generator().manual_seed(seed), temperature=1.0) for seed in (1, 1, 2)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert drawn[0].shape == (18,)
