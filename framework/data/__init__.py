"""Batches as a function of (epoch, start)."""

from .batches import MicroBatches, micro_batches, part_of, rows
from .known_data import changed, fingerprint
from .lending import first_batch, held, lent
from .loaders import Batch, Loader, Order, SourceOfRows, TensorLoader, derived_seed, fixed_order, random_order
from .row_numbers import RowNumbers
from .shares import RowsOfRank, whole_batches
from .torch_loader import TorchLoader

__all__ = [
    "Batch", "Loader", "MicroBatches", "Order", "RowNumbers", "RowsOfRank", "SourceOfRows", "TensorLoader",
    "TorchLoader", "changed", "derived_seed", "fingerprint", "first_batch", "fixed_order", "held", "lent",
    "micro_batches", "part_of", "random_order", "rows", "whole_batches",
]
