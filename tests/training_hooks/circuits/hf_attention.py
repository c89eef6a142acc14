"""Tiny language models of Hugging Face, and the attention that they compute, written out in float64."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

WIDTH, HEADS, TOKENS, VOCABULARY = 24, 4, 7, 50
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "num_key_value_heads": HEADS,
}
CAP = 1.0


def gpt2() -> tuple[Any, Any]:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS}
    return transformers.GPT2LMHeadModel, transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)


def llama() -> tuple[Any, Any]:
    return transformers.LlamaForCausalLM, transformers.LlamaConfig(**GROUPED, attention_bias=True)


def qwen3() -> tuple[Any, Any]:
    return transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**GROUPED)


def gemma2() -> tuple[Any, Any]:
    options = {"attn_logit_softcapping": CAP, "sliding_window": 3}
    return transformers.Gemma2ForCausalLM, transformers.Gemma2Config(**GROUPED, **options)


def gpt_oss() -> tuple[Any, Any]:
    return transformers.GptOssForCausalLM, transformers.GptOssConfig(**GROUPED, **EXPERTS, sliding_window=3)


def deepseek() -> tuple[Any, Any]:
    return transformers.DeepseekV3ForCausalLM, transformers.DeepseekV3Config(**SIZES, **LATENT, q_lora_rank=8)


def deepseek_full_queries() -> tuple[Any, Any]:
    return transformers.DeepseekV3ForCausalLM, transformers.DeepseekV3Config(**SIZES, **LATENT, q_lora_rank=None)


def gpt_neox() -> tuple[Any, Any]:
    return transformers.GPTNeoXForCausalLM, transformers.GPTNeoXConfig(**SIZES)


def vit() -> tuple[Any, Any]:
    sizes = {"image_size": 8, "patch_size": 4, "num_labels": 3}
    options = {key: value for key, value in SIZES.items() if not key.endswith("_id") and key != "vocab_size"}
    return transformers.ViTForImageClassification, transformers.ViTConfig(**options, **sizes)


KINDS: dict[str, Callable[[], tuple[Any, Any]]] = {
    kind.__name__: kind
    for kind in (gpt2, llama, qwen3, gemma2, gpt_oss, deepseek, deepseek_full_queries, gpt_neox, vit)
}
ONLY_EAGER = {"gemma2", "gpt_oss"}
"""Models without an implementation by ``scaled_dot_product_attention``."""
IMPLEMENTATIONS = [
    (kind, way) for kind in KINDS for way in ("eager", "sdpa") if way == "eager" or kind not in ONLY_EAGER
]


def made(kind: str, way: str = "eager", dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """Build a model in eval mode, whose random weights are large, and the same for every way and dtype."""
    cls, config = KINDS[kind]()
    config._attn_implementation, config._experts_implementation = "eager" if way == "written" else way, "eager"
    vars(config).update(options)
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = cls(config).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            size = 1.0 if name.endswith("sinks") else 0.4 if parameter.ndim > 1 else 0.1
            parameter.copy_(torch.randn_like(parameter) * size)
    if way == "written":
        model.config._attn_implementation = "written"
    return model.to(dtype).eval()


def batch_for(kind: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return a batch of six samples, with padding at the end of some."""
    generator = torch.Generator().manual_seed(2)
    if kind == "vit":
        images = torch.randn(6, 3, 8, 8, generator=generator)
        return {"pixel_values": images.to(dtype), "labels": torch.arange(6) % 3}
    ids = torch.randint(VOCABULARY, (6, TOKENS), generator=generator)
    if kind in ONLY_EAGER:  # a window leaves rows of padding without keys, which eager attention averages over all keys
        return {"input_ids": ids, "labels": ids}
    mask = (torch.arange(TOKENS) < torch.tensor([7, 5, 7, 3, 6, 7])[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


@dataclass
class Layer:
    """The rows of one layer."""

    logits: Tensor
    """The largest score of each head."""
    products: Tensor
    """The largest score of each head before soft caps."""
    entropies: Tensor
    """The mean entropy of each head."""


@dataclass
class WrittenAttention:
    """Attention that keeps its rows; the model's own code calls it."""

    layers: dict[nn.Module, Layer] = field(default_factory=dict)

    def __call__(
        self, module, query, key, value, mask, dropout=0.0, scaling=None, softcap=None, s_aux=None, **options
    ) -> tuple[Tensor, Tensor]:
        repeats = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
        products = torch.einsum("bhqd,bhkd->bhqk", query, key) * (scaling or query.shape[-1] ** -0.5)
        scores = softcap * torch.tanh(products / softcap) if softcap else products
        visible = torch.ones_like(scores, dtype=torch.bool) if mask is None else (mask > -1e4).expand_as(scores)
        scores, products = (part.masked_fill(~visible, -torch.inf) for part in (scores, products))
        shares = (scores - scores.logsumexp(dim=-1, keepdim=True)).exp()
        entropies = -(shares * shares.log().clamp(min=-1e9)).sum(dim=-1)
        self.layers[module] = Layer(
            scores.amax(dim=(0, 2, 3)).detach(),
            products.amax(dim=(0, 2, 3)).detach(),
            entropies.mean(dim=(0, 2)).detach(),
        )
        if s_aux is not None:
            sinks = s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            shares = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
        return (shares @ value).transpose(1, 2).contiguous(), shares


def written_rows(kind: str) -> dict[str, Layer]:
    """Return the rows of every layer of a model in float64, by the name of the module."""
    attention = WrittenAttention()
    ALL_ATTENTION_FUNCTIONS.register("written", attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("written", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    model = made(kind, "written", torch.float64)
    model(**batch_for(kind, torch.float64))
    names = {module: name for name, module in model.named_modules()}
    return {names[module]: layer for module, layer in attention.layers.items()}
