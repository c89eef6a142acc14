"""The training state: everything the rest of a run depends on, with its generators and settings."""

from .compiled_code import Traces, has_compiled_code, uncompiled
from .containers import STORED_DICTS, dict_like, keys_of, values_of
from .contents import batch_contents, contents_of, has_contents
from .digest import described
from .digest import digest as digest_of
from .flags import MODE_COUNTERS, deterministic, entered_modes, explain_nondeterminism, leave_modes, settings
from .group_options import betas_of, learning_rate_of, number_or, rounds_stochastically
from .model_parts import InternalFunction, InternalHook, hook_contents
from .module_group import ModuleOrGroup
from .node_hooks import NODE_HOOKS
from .objects import ATOMS, Transient
from .parameter_groups import split_groups, trained_by
from .parts import LoopState, Part, Watched, arrays_of, copy_of_batch, nested, tensors_of, visited
from .private_generators import Generator, generators_of, read_generator, seed_generator, write_generator
from .random_streams import RandomStreams, StreamState, seed_everything
from .torch_settings import DEFAULT_SETTINGS, neutral_settings, script_settings
from .sharding import FullSharding
from .short_names import described_tensor, short_name
from .structure import Structure
from .training_state import EXTRAS, TrainingState, differing, without_on_demand
from .update_parts import optimizers_of

__all__ = [
    "ATOMS", "DEFAULT_SETTINGS", "EXTRAS", "MODE_COUNTERS", "NODE_HOOKS", "STORED_DICTS", "FullSharding", "Generator",
    "InternalFunction", "InternalHook", "LoopState", "ModuleOrGroup", "Part", "RandomStreams", "StreamState",
    "Structure", "Traces", "TrainingState", "Transient", "Watched", "arrays_of", "batch_contents", "betas_of",
    "contents_of", "copy_of_batch", "described", "described_tensor", "deterministic", "dict_like", "differing",
    "digest_of", "entered_modes", "explain_nondeterminism", "generators_of", "has_compiled_code", "has_contents",
    "hook_contents", "keys_of", "learning_rate_of", "leave_modes", "nested", "neutral_settings", "number_or",
    "optimizers_of", "read_generator", "rounds_stochastically", "script_settings", "seed_everything",
    "seed_generator", "settings", "short_name", "split_groups", "tensors_of", "trained_by", "uncompiled",
    "values_of", "visited", "without_on_demand", "write_generator",
]
