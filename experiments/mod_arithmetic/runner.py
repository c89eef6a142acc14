"""The experiment ``mod_arithmetic``: its pairs, their order under each strategy, its configuration."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from loopscope.data import Loader, Order, TensorLoader, derived_seed, fixed_order, random_order
from loopscope.experiments.grokking import GrokkingConfig, GrokkingRunner
from loopscope.hooks import ExperimentRegistry
from loopscope.runs import require
from torch import Tensor, nn

from .model import GrokkingTransformer

STRATEGIES = ("stride", "target", "fixed-random", "random")


def draw_pairs(p: int, train_size: int, test_size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw disjoint training and test pairs (a, b) uniformly from the p² pairs; int64, shapes (size, 2)."""
    generator = np.random.Generator(np.random.PCG64(derived_seed(seed, "pairs")))
    drawn = torch.from_numpy(generator.choice(p * p, train_size + test_size, replace=False))
    pairs = torch.stack([drawn // p, drawn % p], dim=1)
    return pairs[:train_size], pairs[train_size:]


def sums(pairs: Tensor, p: int) -> Tensor:
    """Return (a + b) mod p."""
    return pairs.sum(dim=1) % p


def build_order(strategy: str, pairs: Tensor, p: int, stride: int | None, seed: int) -> Order:
    """Return the order of the training pairs under a strategy; ties keep the random order in which they were drawn.

    ``stride`` sorts by a mod s (by default s = ⌊√p⌋), then by a. ``target`` sorts by the sum. ``fixed-random`` uses
    one random order in all epochs. ``random`` shuffles every epoch as a function of (seed, epoch).
    """
    if strategy == "random":
        return random_order(len(pairs), seed)
    if strategy == "fixed-random":
        return fixed_order(torch.arange(len(pairs)))
    step = stride or math.isqrt(p)
    key = (pairs[:, 0] % step) * p + pairs[:, 0] if strategy == "stride" else sums(pairs, p)
    return fixed_order(key.argsort(stable=True))


@dataclass(frozen=True, kw_only=True)
class ModArithmeticConfig(GrokkingConfig):
    """Options of mod_arithmetic; the defaults are those of arXiv 2603.25047, ``--preset quick`` is for a laptop.

    Args:
        p: the modulus; the tokens are the residues 0..p-1.
        train_size: training pairs, drawn without replacement from all p² pairs.
        test_size: test pairs, disjoint from the training pairs.
        embed_dim: width of the transformer.
        num_heads: attention heads per layer; must divide embed_dim.
        layers: transformer layers.
        ff_dim: width of the feed-forward layers.
        stride: the stride of the strategy stride; by default the integer square root of p.
    """

    p: int = 9973
    train_size: int = 300_000
    test_size: int = 1_000_000
    batch_size: int = 256
    lr: float = 1e-3
    min_lr: float = 5e-7
    weight_decay: float = 0.1
    epochs: int = 5000
    embed_dim: int = 256
    num_heads: int = 4
    layers: int = 2
    ff_dim: int = 2048
    stride: int | None = None
    seed: int = 199

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.p > 1, f"p is {self.p}; it must be an integer above 1.")
        self.at_least(1, "train_size", "test_size", "embed_dim", "num_heads", "layers", "ff_dim")
        require(self.stride is None or self.stride >= 1, f"stride is {self.stride}; it must be at least 1.")
        require(
            self.embed_dim % self.num_heads == 0,
            f"embed_dim is {self.embed_dim}; it must be a multiple of num_heads ({self.num_heads}).",
        )
        available, needed = self.p**2, self.train_size + self.test_size
        require(
            needed <= available,
            f"train_size {self.train_size} and test_size {self.test_size} need {needed} pairs, but there are only "
            f"{available} for p = {self.p}; choose smaller sizes or a larger p.",
        )


ALL_PAIRS_OF_97: dict[str, Any] = dict(p=97, train_size=30 * 97, test_size=97 * 97 - 30 * 97)
QUICK = dict(
    ALL_PAIRS_OF_97, batch_size=32, epochs=300, max_epochs=150, eval_every=5, beta2=0.98, embed_dim=128, ff_dim=512
)


@ExperimentRegistry.register
class ModArithmeticRunner(GrokkingRunner[ModArithmeticConfig]):
    """A small transformer that learns (a + b) mod p: the effect of the order of the data on grokking."""

    name: ClassVar[str] = "mod_arithmetic"
    config_class = ModArithmeticConfig
    strategies = STRATEGIES
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {}, "quick": QUICK}
    live_metrics: ClassVar[Mapping[str, Sequence[str]]] = {
        "accuracy": ["training_metrics/val_acc", "training_metrics/train_acc"],
        "loss": [
            "training_metrics/loss",
            "training_metrics/evaluation/train_loss",
            "training_metrics/evaluation/val_loss",
        ],
        "learning rate": ["training_metrics/lr"],
        "norms": ["norms/total_weight_norm", "norms/total_grad_norm", "parameter_delta/total_relative_delta"],
        "frequencies": ["fourier/top_k_fraction", "fourier/restricted_loss", "fourier/excluded_loss"],
    }
    train_probe: ClassVar[int] = 10_000
    """The largest number of training pairs for train_acc."""

    @cached_property
    def _pairs(self) -> tuple[Tensor, Tensor]:
        config = self.config
        train, test = draw_pairs(config.p, config.train_size, config.test_size, config.seed)
        return train.to(self.device), test.to(self.device)

    def build_model(self) -> nn.Module:
        """Return the transformer."""
        config = self.config
        return GrokkingTransformer(config.p, config.embed_dim, config.num_heads, config.layers, config.ff_dim)

    def tensor_parallel_plan(self, model: nn.Module) -> Mapping[str, Any]:
        """Split the feed-forward layers; attention stays complete, since one matrix has all of its projections."""
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        return {"blocks.*.ff_in": ColwiseParallel(), "blocks.*.ff_out": RowwiseParallel()}

    def build_loader(self, strategy: str) -> Loader:
        """Return the training pairs in the order of the strategy."""
        config, (train, _) = self.config, self._pairs
        order = build_order(strategy, train, config.p, config.stride, config.seed)
        return TensorLoader((train, sums(train, config.p)), config.batch_size, order)

    def describe_row(self, index: int) -> str:
        """Return the sum, such as ``17 + 45 = 62 (mod 97)``."""
        (a, b), p = self._pairs[0][index].tolist(), self.config.p
        return f"{a} + {b} = {(a + b) % p} (mod {p})"

    def evaluation_sets(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Return the test pairs as ``val``, and the first ``train_probe`` training pairs as ``train``."""
        train, test = self._pairs
        probe = train[: self.train_probe]
        return {"train": (probe, sums(probe, self.config.p)), "val": (test, sums(test, self.config.p))}
