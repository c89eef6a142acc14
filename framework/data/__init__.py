"""Batches as a function of (epoch, start)."""

from .batches import MicroBatches, micro_batches, rows
from .lending import first_batch, held, lent
from .loaders import Batch, Loader, Order, TensorLoader, TorchLoader, derived_seed, fixed_order, random_order
from .shares import RowsOfRank

__all__ = [
    "Batch", "Loader", "MicroBatches", "Order", "RowsOfRank", "TensorLoader", "TorchLoader", "derived_seed",
    "first_batch", "fixed_order", "held", "lent", "micro_batches", "random_order", "rows",
]
