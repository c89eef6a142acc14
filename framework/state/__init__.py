"""The training state: everything the rest of a run depends on.

Its packages contain the random ``generators``, the process-wide ``settings``, the ``values`` of Python objects and
containers, and the ``parameter_groups`` of optimizers.
"""

from .compiled_code import has_compiled_code, skips_frames, uncompiled
from .digest import described
from .digest import digest as digest_of
from .generators import RandomStreams, seed_everything
from .model_parts import FunctionBeforeForward, InternalFunction, InternalHook, hook_contents
from .module_group import ModuleOrGroup
from .node_hooks import NODE_HOOKS
from .parts import LoopState, Part, Watched, arrays_of, copy_of_batch, nested, tensors_of, visited
from .sharding import FullSharding
from .structure import Structure
from .training_state import EXTRAS, TrainingState, differing, without_on_demand
from .update_parts import optimizers_of
from .values import Transient

__all__ = [
    "EXTRAS", "NODE_HOOKS", "FullSharding", "FunctionBeforeForward", "InternalFunction", "InternalHook", "LoopState",
    "ModuleOrGroup", "Part", "RandomStreams", "Structure", "TrainingState", "Transient", "Watched", "arrays_of",
    "copy_of_batch", "described", "differing", "digest_of", "has_compiled_code", "hook_contents", "nested",
    "optimizers_of", "seed_everything", "skips_frames", "tensors_of", "uncompiled", "visited", "without_on_demand",
]
