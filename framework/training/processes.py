"""The processes that torchrun starts, as its environment variables describe them; torch is not imported."""

import os
from typing import Literal

Parallel = Literal["ddp", "fsdp", "tp", "fsdp+tp"]


def torchrun_world_size() -> int:
    """Return the number of processes that torchrun started; 0 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", 0))


def is_restarted() -> bool:
    """Return whether torchrun started this process after a failure (``--max-restarts``)."""
    return restart_count() > 0


def restart_count() -> int:
    """Return how often torchrun has started the processes again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def is_main_process() -> bool:
    """Return whether this is the main process of torchrun, or the only process."""
    return torchrun_world_size() == 0 or os.environ.get("RANK", "0") == "0"
