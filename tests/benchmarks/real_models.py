"""Models of the sizes that people train, each with a batch: a GPT, a ResNet-18 and a Mixtral of many small layers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.benchmarks.subjects import Block

Batch = tuple[Tensor, Tensor]


class GPT(nn.Module):
    """A decoder with tied embeddings; returns logits of shape (rows, tokens, vocabulary)."""

    def __init__(self, vocabulary: int, layers: int, width: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x)))


class Residual(nn.Module):
    """Two convolutions with batch normalisation around a shortcut, which is a 1 x 1 convolution if shapes differ."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv_1, self.norm_1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv_2, self.norm_2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        is_same = stride == 1 and channels == out
        short = [] if is_same else [nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)]
        self.shortcut = nn.Sequential(*short)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm_2(self.conv_2(functional.relu(self.norm_1(self.conv_1(x)))))
        return functional.relu(inner + self.shortcut(x))


def resnet_18(width: int) -> nn.Module:
    """Return the ResNet-18 for images of 32 x 32 pixels: no pooling after the first convolution, of stride one."""
    stages, channels = list[nn.Module](), width
    for stage in range(4):
        out = width * 2**stage
        stages += [Residual(channels, out, 1 if stage == 0 else 2), Residual(out, out, 1)]
        channels = out
    stem = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def mixtral(width: int, layers: int, vocabulary: int, tokens: int) -> nn.Module:
    """Return transformers' Mixtral with 8 experts in each layer, of which every token uses two."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        vocab_size=vocabulary,
        max_position_embeddings=tokens,
        use_cache=False,
    )
    return MixtralForCausalLM(config)


@dataclass(frozen=True)
class RealModel:
    """A model with its batch and its loss; ``tiny`` has smaller sizes for a quick look."""

    title: str
    build: Callable[..., nn.Module]
    batch: Callable[[Mapping[str, int]], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    sizes: Mapping[str, int]
    tiny: Mapping[str, int] = field(default_factory=dict)

    def built(self, *, is_tiny: bool) -> tuple[nn.Module, Batch]:
        """Return a new model and its batch."""
        sizes = {**self.sizes, **(self.tiny if is_tiny else {})}
        torch.manual_seed(0)
        batch = self.batch(sizes)
        sizes.pop("rows")
        return self.build(**sizes), batch


def _tokens(sizes: Mapping[str, int]) -> Batch:
    ids = torch.randint(sizes["vocabulary"], (sizes["rows"], sizes["tokens"] + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _images(sizes: Mapping[str, int]) -> Batch:
    return torch.randn(sizes["rows"], 3, 32, 32), torch.randint(10, (sizes["rows"],))


def _loss(model: nn.Module, batch: Batch, *, logits: Callable[[Any], Tensor] = lambda output: output) -> Tensor:
    output, targets = logits(model(batch[0])), batch[1]
    return functional.cross_entropy(output.flatten(0, -2), targets.flatten())


MODELS = {
    "gpt": RealModel(
        "a GPT of 4 x 512",
        GPT,
        _tokens,
        _loss,
        {"vocabulary": 4096, "layers": 4, "width": 512, "heads": 8, "tokens": 128, "rows": 8},
        {"vocabulary": 32, "layers": 1, "width": 16},
    ),
    "resnet": RealModel(
        "a ResNet-18 on 32 x 32 pixels", resnet_18, _images, _loss, {"width": 64, "rows": 16}, {"width": 8, "rows": 2}
    ),
    "mixtral": RealModel(
        "a Mixtral of 8 experts and 24 layers",
        mixtral,
        _tokens,
        partial(_loss, logits=lambda output: output.logits),
        {"width": 64, "layers": 24, "vocabulary": 512, "tokens": 64, "rows": 8},
        {"width": 16, "layers": 2, "vocabulary": 32, "tokens": 8, "rows": 2},
    ),
}
