"""Small models, optimizers and data."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from loopscope.experiments.mod_arithmetic.model import GrokkingTransformer
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

LOOPS = ("epoch", "step")
ROWS = 21
BATCH = 7
STEPS_PER_EPOCH = 3
TOKENS = 7


class TiedModel(nn.Module):
    """A token model whose output projection is its embedding matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 8)
        self.mix = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.2)
        self.decoder = nn.Linear(8, TOKENS, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.mix(self.embedding(tokens).mean(dim=1)))
        return self.decoder(self.dropout(hidden))


class ChunkedModel(TiedModel):
    """A :class:`TiedModel` that calls its head in chunks, to save memory, and also uses the matrix as a function."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.dropout(torch.tanh(self.mix(self.embedding(tokens).mean(dim=1))))
        logits = torch.cat([self.decoder(chunk) for chunk in hidden.split(2)])
        return logits + functional.linear(hidden * 0.5, self.embedding.weight)


def batchnorm_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, TOKENS))


def transformer() -> nn.Module:
    return GrokkingTransformer(p=TOKENS, embed_dim=8, num_heads=2, layers=1, ff_dim=16)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "batchnorm_mlp": batchnorm_mlp,
    "transformer": transformer,
    "tied": TiedModel,
}
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "adamw_foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "sgd_momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-1, momentum=0.9),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
}


def data_for(model: str) -> tuple[Tensor, Tensor]:
    """Draw inputs and targets for a model."""
    generator = torch.Generator().manual_seed(5)
    targets = torch.randint(TOKENS, (ROWS,), generator=generator)
    if model in ("transformer", "tied"):
        return torch.randint(TOKENS, (ROWS, 2), generator=generator), targets
    return torch.randn(ROWS, 4, generator=generator), targets


@dataclass(frozen=True)
class TokenConfig:
    """The part of an experiment's configuration that hooks read."""

    p: int = TOKENS
    seed: int = 11


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def drawing_evaluation(data: tuple[Tensor, Tensor]) -> Callable[[nn.Module], dict[str, float]]:
    """Make an evaluation that draws from every generator, as ``iter(DataLoader)`` does."""
    inputs, targets = data

    def evaluate(model: nn.Module) -> dict[str, float]:
        loader = DataLoader(TensorDataset(inputs, targets), batch_size=5, shuffle=True)
        correct = sum(float((model(x).argmax(-1) == y).sum()) for x, y in loader)
        return {"val_acc": correct / len(targets), "train_acc": correct / len(targets)}

    return evaluate
