"""Checkpoints of a run: writing, reading, restoring and comparing them."""

from typing import TYPE_CHECKING

from ..names_on_demand import names_on_demand

if TYPE_CHECKING:
    from .comparison import Moment, Divergence, differing_entries, leaf_values, checkpoints_by_moment
    from .content import RunState, read_content, load_checkpoint, save_checkpoint
    from .digest_log import DIGESTS, Digest, DigestLog, read_digests
    from .flat_state import flatten_state, state_for_rank, gather_tensors, allocate_saved
    from .format import (
        FRESH_STREAMS, MANIFEST, STATE, Checkpoint, checkpoint_folders, newest_intact, open_checkpoint, sync_path,
    )
    from .lock import is_locked, run_lock
    from .row_log import ROWS, RowLog, rows_entry, rows_of_step
    from .schedule import Checkpointing, CheckpointPlan
    from .signals import Signals, StoppedError
    from .writer import CheckpointWriter
else:
    __getattr__ = names_on_demand(__name__)

__all__ = [
    "DIGESTS", "FRESH_STREAMS", "MANIFEST", "ROWS", "STATE", "Checkpoint", "CheckpointPlan", "CheckpointWriter",
    "Checkpointing", "Digest", "DigestLog", "Divergence", "Moment", "RowLog", "RunState", "Signals", "StoppedError",
    "allocate_saved", "checkpoint_folders", "checkpoints_by_moment", "differing_entries", "flatten_state",
    "gather_tensors", "is_locked", "leaf_values", "load_checkpoint", "newest_intact", "open_checkpoint", "read_content",
    "read_digests", "rows_entry", "rows_of_step", "run_lock", "save_checkpoint", "state_for_rank", "sync_path",
]
