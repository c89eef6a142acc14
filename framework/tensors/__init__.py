"""Tensors: vectors over parameters, shards on several ranks, bytes and identity."""

from .identity import BriefIdentities, TensorIdentities, attached
from .matrices import as_matrices, stacks_of_experts
from .memory import addresses, bytes_at
from .reductions import (
    cosine_of, flat_products, in_range, inner_products, is_readable, joined_length, length_of, may_overflow, norms_of,
    pieces, power_of_two, read_at_once, row_norms, scale_of, tensor_of, total_of, widest,
)
from .shards import (
    completed, dtensor_class, fully_sharded_modules, groups_of, is_partial, is_sharded, laid_out_like, local_shards,
    over_shards, replicated_like, resharded_afterwards, unsharded,
)
from .storage import (
    COMPRESSED, PLAIN, byte_tensors, in_bytes, inner_tensors, is_cut_off, is_shared_memory, is_uninitialised,
    is_wrapper,
)
from .sums_on_device import device_sums, has_device_sums
from .vectors import (
    WIDE, Vector, accumulate, axpy, copied, cosine, dot, gradients, joint_norm, live_gradients, max_abs, minus,
    norm, norm_of_each, norms, overwrite, scaled, trainable, widened,
)

__all__ = [
    "COMPRESSED", "PLAIN", "WIDE", "BriefIdentities", "TensorIdentities", "Vector", "accumulate", "addresses",
    "as_matrices", "attached", "axpy", "byte_tensors", "bytes_at", "completed", "copied", "cosine", "cosine_of",
    "device_sums", "dot", "dtensor_class", "flat_products", "fully_sharded_modules", "gradients", "groups_of",
    "has_device_sums", "in_bytes", "in_range", "inner_products", "inner_tensors", "is_cut_off", "is_partial",
    "is_readable", "is_sharded", "is_shared_memory", "is_uninitialised", "is_wrapper", "joined_length", "joint_norm",
    "laid_out_like", "length_of", "live_gradients", "local_shards", "max_abs", "may_overflow", "minus", "norm",
    "norm_of_each", "norms", "norms_of", "over_shards", "overwrite", "pieces", "power_of_two", "read_at_once",
    "replicated_like", "resharded_afterwards", "row_norms", "scale_of", "scaled", "stacks_of_experts", "tensor_of",
    "total_of", "trainable", "unsharded", "widened", "widest",
]
