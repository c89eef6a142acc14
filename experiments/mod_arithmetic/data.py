"""Pairs of residues, their sums, and the orders in which a strategy presents them."""

import math

import numpy as np
import torch
from loopscope.data import Order, derived_seed, fixed_order, random_order
from torch import Tensor

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


def order_of(strategy: str, pairs: Tensor, p: int, stride: int | None, seed: int) -> Order:
    """Return the order of the training pairs under a strategy; ties keep the drawn, random order.

    ``stride`` sorts by a mod s (s = ⌊√p⌋ unless given), then a; ``target`` by the sum; ``fixed-random`` keeps
    one random order; ``random`` reshuffles every epoch from (seed, epoch) alone.
    """
    if strategy == "random":
        return random_order(len(pairs), seed)
    if strategy == "fixed-random":
        return fixed_order(torch.arange(len(pairs)))
    step = stride or math.isqrt(p)
    key = (pairs[:, 0] % step) * p + pairs[:, 0] if strategy == "stride" else sums(pairs, p)
    return fixed_order(key.argsort(stable=True))
