"""Loaders: batches as a function of (epoch, first batch)."""

from .batches import MicroBatches, SeparateBatches, micro_batches, part_of, rows, rows_if_any
from .data_identity import data_changed, fingerprint
from ..state.generators import Generator
from .generators import all_holders, attributes, seed_all, undisturbed
from .loader_inspection import RowsOfRank, first_batch, global_batches, preserved_loader, with_copied_batches
from .loaders import Batch, Loader, Order, SourceOfRows, TensorLoader, derived_seed, fixed_order, random_order
from .row_numbers import RowNumbers
from .torch_loader import TorchLoader, with_copied_samplers, without_generators

__all__ = [
    "Batch", "Generator", "Loader", "MicroBatches", "Order", "RowNumbers", "RowsOfRank", "SeparateBatches",
    "SourceOfRows", "TensorLoader", "TorchLoader", "all_holders", "attributes", "data_changed", "derived_seed",
    "fingerprint", "first_batch", "fixed_order", "global_batches", "micro_batches", "part_of", "preserved_loader",
    "random_order", "rows", "rows_if_any", "seed_all", "undisturbed", "with_copied_batches", "with_copied_samplers",
    "without_generators",
]
