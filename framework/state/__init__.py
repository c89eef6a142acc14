"""The training state: everything the rest of a run depends on, with its tensors, generators and settings."""

from .accelerators import reset_memory_peak
from .digest import described
from .digest import digest as digest_of
from .flags import MODE_COUNTERS, deterministic, entered_modes, explain_nondeterminism, leave_modes, settings
from .model_parts import InternalFunction, InternalHook
from .objects import ATOMS, Transient
from .parts import LoopState, Part, Watched, copy_of_batch, nested, tensors_of, visited
from .random_streams import RandomStreams, StreamState, seed_everything
from .sharding import fully_sharded_modules, resharded_afterwards
from .structure import Structure
from .tensor_identity import (
    BriefIdentities, TensorIdentities, addresses, byte_tensors, in_bytes, inner_tensors, is_cut_off, is_uninitialised,
)
from .training_state import EXTRAS, GENERATORS, ON_DEMAND, PARTS, TrainingState, differing, without_on_demand
from .update_parts import BY_GROUP, SPLIT_FROM, reachable_from_modules, optimizers_of
from .vectors import (
    WIDE, Vector, accumulate, axpy, completed, copied, cosine, dot, dtensor_class, gradients, groups_of, is_partial,
    is_sharded, joint_norm, laid_out_like, live_gradients, local_shards, max_abs, minus, norm, norm_of_each, norms,
    over_shards, overwrite, scaled, trainable, unsharded, widened,
)

__all__ = [
    "ATOMS", "BY_GROUP", "EXTRAS", "GENERATORS", "MODE_COUNTERS", "ON_DEMAND", "PARTS", "SPLIT_FROM", "WIDE",
    "BriefIdentities", "InternalFunction", "InternalHook", "LoopState", "Part", "RandomStreams", "StreamState",
    "Structure", "TensorIdentities", "TrainingState", "Transient", "Vector", "Watched", "accumulate", "addresses",
    "axpy", "byte_tensors", "completed", "copied", "copy_of_batch", "cosine", "described", "deterministic",
    "differing", "digest_of", "dot", "dtensor_class", "entered_modes", "explain_nondeterminism",
    "fully_sharded_modules", "gradients", "groups_of", "in_bytes", "inner_tensors", "is_cut_off", "is_partial",
    "is_sharded", "is_uninitialised", "joint_norm", "laid_out_like", "leave_modes", "live_gradients", "local_shards",
    "max_abs", "minus", "nested", "norm", "norm_of_each", "norms", "optimizers_of", "over_shards", "overwrite",
    "reachable_from_modules", "reset_memory_peak", "resharded_afterwards", "scaled", "seed_everything", "settings",
    "tensors_of", "trainable", "unsharded", "visited", "widened", "without_on_demand",
]
