"""Tiny models of transformers and torch with a batch each, for hooks that are tested on several architectures."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH, LAYERS = 29, 16, 2
Built = tuple[nn.Module, dict[str, Tensor], Callable[[nn.Module, dict[str, Tensor]], Tensor]]
"""A model, a batch of six rows, and the loss of a batch."""


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def _texts() -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (6, 7), generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "labels": ids}


def vit() -> Built:
    """Return a ViT that classifies images of 8 x 8 pixels."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=2, intermediate_size=32, image_size=8,
        patch_size=4, num_channels=3, num_labels=5,
    )  # fmt: skip
    images = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    return ViTForImageClassification(config), {"pixel_values": images, "labels": torch.arange(6) % 5}, _loss


def llama() -> Built:
    """Return a Llama with two heads for each key-value head (GQA)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, vocab_size=VOCABULARY, max_position_embeddings=16,
    )  # fmt: skip
    return LlamaForCausalLM(config), _texts(), _loss


def mixtral() -> Built:
    """Return a Mixtral with four experts, of which each token uses two."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, vocab_size=VOCABULARY, max_position_embeddings=16, num_local_experts=4,
    )  # fmt: skip
    return MixtralForCausalLM(config), _texts(), _loss


class ConvNet(nn.Module):
    """Two residual blocks on images, whose ReLUs are modules that are used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 5)
        self.blocks = nn.ModuleList(ConvBlock() for _ in range(LAYERS))

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        hidden = self.stem(pixel_values)
        for block in self.blocks:
            hidden = block(hidden)
        return functional.cross_entropy(self.head(hidden.mean((2, 3))), labels)


class ConvBlock(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.relu = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.relu(hidden + self.second(self.relu(self.first(hidden))))


def convnet() -> Built:
    """Return a small residual network."""
    _, batch, _ = vit()
    return ConvNet(), batch, lambda model, batch: model(**batch)


class Recurrent(nn.Module):
    """An LSTM that predicts the next token, with a Tanh before its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(VOCABULARY, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.act, self.head = nn.Tanh(), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.act(self.rnn(self.embedding(input_ids))[0]))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def lstm() -> Built:
    """Return a small recurrent network."""
    return Recurrent(), _texts(), lambda model, batch: model(**batch)


ARCHITECTURES: dict[str, Callable[[], Built]] = {
    build.__name__: build for build in (vit, llama, mixtral, convnet, lstm)
}


def build(name: str) -> Built:
    """Return the same model of an architecture at every call."""
    torch.manual_seed(0)
    return ARCHITECTURES[name]()


def micro_batches(batch: dict[str, Tensor], count: int) -> list[Any]:
    """Split the rows of a batch evenly."""
    parts: dict[str, tuple[Tensor, ...]] = {key: value.chunk(count) for key, value in batch.items()}
    return [{key: parts[key][index] for key in batch} for index in range(count)]
