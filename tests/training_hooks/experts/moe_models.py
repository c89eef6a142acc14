"""Small mixtures of experts: configurations of transformers, and modules without it."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH = 30, 16
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def library() -> Any:
    """Import transformers when a test needs it, which takes seconds, or skip the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("transformers")


def mixtral(**options: Any) -> nn.Module:
    config = library().MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, **options)
    return library().MixtralForCausalLM(config)


def qwen3_moe(**options: Any) -> nn.Module:
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 4}
    return library().Qwen3MoeForCausalLM(library().Qwen3MoeConfig(**SIZES, **experts, **options))


def olmoe(**options: Any) -> nn.Module:
    config = library().OlmoeConfig(**SIZES, num_experts=5, num_experts_per_tok=3, **options)
    return library().OlmoeForCausalLM(config)


def gpt_oss(**options: Any) -> nn.Module:
    layers = {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 4}
    config = library().GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, **layers, **options)
    return library().GptOssForCausalLM(config)


def deepseek_v3(**options: Any) -> nn.Module:
    sizes = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 8}
    heads = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 4, "qk_nope_head_dim": 4}
    config = library().DeepseekV3Config(
        **(SIZES | {"num_key_value_heads": 4}), **sizes, **heads, first_k_dense_replace=1, **options
    )
    return library().DeepseekV3ForCausalLM(config)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "olmoe": olmoe,
    "gpt_oss": gpt_oss,
    "deepseek_v3": deepseek_v3,
}


def made(name: str, **options: Any) -> nn.Module:
    """Make a model with random weights, routers included: some of transformers start with zeros."""
    torch.manual_seed(0)
    model = MODELS[name](**options)
    for parameter_name, parameter in model.named_parameters():
        if "gate.weight" in parameter_name or "router.weight" in parameter_name:
            nn.init.normal_(parameter, std=0.5)
    return model


class Layer(nn.Module):
    """A mixture of experts whose router is a linear layer: the k experts with the largest logits."""

    def __init__(self, experts: int = 4, top_k: int = 2) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))
        self.top_k = top_k

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(self.top_k)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-2)
        return (weights[..., None] * outputs.gather(-2, chosen[..., None].expand(*chosen.shape, WIDTH))).sum(-2)


class Mixture(nn.Module):
    """Two mixtures of experts between an embedding and a head, with the logits of every token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def token_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss of the next token, of a model of transformers or a plain one."""
    output = model(batch[0])
    logits = output if isinstance(output, Tensor) else output.logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[0][:, 1:].flatten())
