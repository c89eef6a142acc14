"""A run on the disk, and back."""

from .comparing import Moment, Parting, differing, leaves, moments_of
from .content import RunState, content_of, load_checkpoint, save_checkpoint
from .digest_log import DIGESTS, Digest, DigestLog, read_digests
from .flat import flattened, for_rank, gathered, room_of
from .format import AFRESH, MANIFEST, STATE, Checkpoint, checkpoints_in, newest_intact, open_checkpoint, sync_path
from .lock import is_locked, run_lock
from .row_log import ROWS, RowLog, rows_entry, rows_of
from .schedule import Checkpointing, CheckpointPlan, Signals, StoppedError
from .writer import CheckpointWriter

__all__ = [
    "AFRESH", "DIGESTS", "MANIFEST", "ROWS", "STATE", "Checkpoint", "CheckpointPlan", "CheckpointWriter",
    "Checkpointing", "Digest", "DigestLog", "Moment", "Parting", "RowLog", "RunState", "Signals", "StoppedError",
    "checkpoints_in", "content_of", "differing", "flattened", "for_rank", "gathered", "is_locked", "leaves",
    "load_checkpoint", "moments_of", "newest_intact", "open_checkpoint", "read_digests", "room_of", "rows_entry",
    "rows_of", "run_lock", "save_checkpoint", "sync_path",
]
