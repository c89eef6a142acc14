"""Small models and data of the oracle, independent of those of the other tests."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.oracle import product

MODULUS, WIDTH, HEADS, HIDDEN = 7, 8, 2, 16
TRAIN_ROWS, BATCH_ROWS = 24, 6
KINDS = {
    "pairs": "the classifier of pairs of residues",
    "deep": "with two blocks in place of one",
    "tied": "with its decoder tied to the embedding",
    "low_bit": "with linear layers that cast to four bits",
}


class Attention(nn.Module):
    """Self-attention with a fused projection, a common layout."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, tokens, _ = hidden.shape
        heads = self.qkv(hidden).view(batch, tokens, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, WIDTH))


class Block(nn.Module):
    """Attention and a feed-forward layer with residuals and few parameters, since each adds a line per metric."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.attention = Attention()
        self.ff_in = nn.Linear(WIDTH, HIDDEN)
        self.ff_out = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norm(hidden))
        return hidden + self.ff_out(functional.relu(self.ff_in(hidden)))


class Classifier(nn.Module):
    """A transformer on pairs of residues.

    Dropout ties the weights to the generators: a random draw more or less shows in them. The buffer ``passes`` counts
    the forward passes in train mode: one that a hook made and did not undo shows in it.
    """

    passes: Tensor

    def __init__(self, *, blocks: int, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(MODULUS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.dropout = nn.Dropout(0.1)
        self.decoder = nn.Linear(WIDTH, MODULUS, bias=False)
        if tied:
            self.decoder.weight = self.embedding.weight
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, pairs: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
        hidden = self.embedding(pairs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.decoder(self.dropout(hidden).mean(dim=1))


def build_model(kind: str) -> nn.Module:
    """Return a model of one of ``KINDS``, drawn from torch's generator."""
    model = Classifier(blocks=2 if kind == "deep" else 1, tied=kind == "tied")
    if kind == "low_bit":
        product.quantize(model, "fp4_block", seed=3, rank=2, forward_warmup_steps=2, merge_steps=5)
    return model


def pairs_and_sums() -> tuple[Tensor, Tensor]:
    """Return all pairs of residues in a fixed random order, and their sums."""
    order = torch.randperm(MODULUS**2, generator=torch.Generator().manual_seed(17))
    pairs = torch.stack([order // MODULUS, order % MODULUS], dim=1)
    return pairs, pairs.sum(dim=1) % MODULUS


def training_data() -> tuple[Tensor, Tensor]:
    """Return the rows to train on."""
    pairs, sums = pairs_and_sums()
    return pairs[:TRAIN_ROWS], sums[:TRAIN_ROWS]


def mean_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy of a batch."""
    return functional.cross_entropy(model(batch[0]), batch[1])


@torch.no_grad()
def evaluate(model: nn.Module) -> dict[str, float]:
    """Return loss and accuracies; draws random numbers, which must not affect the run."""
    return dict(measured(model)) | {"draw": torch.rand(()).item()}


def measured(model: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield the metrics of an evaluation by name."""
    pairs, sums = pairs_and_sums()
    for part, rows in (("train", slice(None, TRAIN_ROWS)), ("val", slice(TRAIN_ROWS, None))):
        logits = model(pairs[rows])
        yield f"{part}_acc", (logits.argmax(dim=1) == sums[rows]).float().mean().item()
        yield f"{part}_loss", functional.cross_entropy(logits, sums[rows]).item()


def write_reference(kind: str, path: str) -> None:
    """Write the weights of another model of a kind, as the reference solution for hooks that need one."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        torch.save(build_model(kind).state_dict(), path)
