"""What the rest of a run depends on: the one list, its tensors, generators and settings."""

from .attributes import ATOMS, NATIVE, Transient, name_of
from .determinism import deterministic, explained, settings
from .flags import entered_modes, leave_modes
from .model_parts import OwnFunction, OwnHook
from .parts import Guarded, Part, Stored, Watched
from .random_streams import RandomStreams, StreamState, seed_everything
from .sharding import (
    finish_sharding, fully_sharded_modules, gathered_for_a_while, is_partial, is_sharded, local_shards, whole,
)
from .structure import Structure
from .tensor_identity import BriefIdentities, TensorIdentities
from .tensor_parts import addresses
from .training_state import GENERATORS, ON_DEMAND, PARTS, LoopState, TrainingState, differing, nested, of_the_run
from .vectors import (
    WIDE, Vector, accumulate, axpy, copied, cosine, dot, gradients, joint_norm, live_gradients, max_abs, minus, norm,
    norm_of_each, overwrite, scaled, trainable, widened,
)

__all__ = [
    "ATOMS", "GENERATORS", "NATIVE", "ON_DEMAND", "PARTS", "WIDE", "BriefIdentities", "Guarded", "LoopState",
    "OwnFunction", "OwnHook", "Part", "RandomStreams", "Stored", "StreamState", "Structure", "TensorIdentities",
    "TrainingState", "Transient", "Vector", "Watched", "accumulate", "addresses", "axpy", "copied", "cosine",
    "deterministic", "differing", "dot", "entered_modes", "explained", "finish_sharding", "fully_sharded_modules",
    "gathered_for_a_while", "gradients", "is_partial", "is_sharded", "joint_norm", "leave_modes", "live_gradients",
    "local_shards", "max_abs", "minus", "name_of", "nested", "norm", "norm_of_each", "of_the_run", "overwrite",
    "scaled", "seed_everything", "settings", "trainable", "whole", "widened",
]
