"""W&B sink."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from loopscope.errors import UsageError
from loopscope.hooks import SinkRegistry

from . import wandb_process
from .client_process import new_run_id
from .client_sink import ClientSink

FORBIDDEN = "/\\#?%:"
LONGEST_NAME = 128


@SinkRegistry.register
class WandbSink(ClientSink):
    """Send every metric to a W&B project, and write STRATEGY.jsonl.

    The sink includes :class:`JSONLSink`; another process reads that file and sends it. Therefore a client that fails,
    hangs or has no network costs the run less than a second and does not change it; ``loopscope replay`` can send the
    record later. A resumed run continues its W&B run: the client sends only the rows that W&B does not have yet.
    Without a W&B login the client works offline. W&B's variables are respected; with WANDB_MODE=disabled no client is
    started. The page on sinks describes how W&B shows a metric.

    Args:
        project: the project; by default that of WANDB_PROJECT, or else the name of the experiment.
    """

    name: ClassVar[str] = "wandb"
    flag: ClassVar[str | None] = "--hook-wandb"
    option: ClassVar[str | None] = "project"
    title: ClassVar[str] = "W&B"
    package: ClassVar[str] = "wandb"
    program: ClassVar[str] = wandb_process.__file__

    def __init__(self, *, project: str | None = None) -> None:
        super().__init__(project)

    @classmethod
    def check_project(cls, project: str) -> None:
        """Raise :class:`UsageError` for a name that W&B does not accept."""
        if not project or len(project) > LONGEST_NAME or set(FORBIDDEN) & set(project):
            raise UsageError(
                f"{project!r} is not a valid W&B project: use 1 to {LONGEST_NAME} characters without {FORBIDDEN}; "
                "set the entity with WANDB_ENTITY."
            )

    @classmethod
    def check_enabled(cls) -> bool:
        """Return whether WANDB_MODE allows a client."""
        return os.environ.get("WANDB_MODE") != "disabled"

    @classmethod
    def new_run_id(cls) -> str:
        """Return the id in WANDB_RUN_ID, or else a new one."""
        return os.environ.get("WANDB_RUN_ID") or new_run_id()

    @classmethod
    def replay(cls, folder: Path, **options: str) -> Callable[[], str]:
        """Send the record of a finished run as a new W&B run."""
        send = super().replay(folder, **options)
        if not cls.check_enabled():
            raise UsageError("WANDB_MODE is disabled, so nothing would be sent; unset it or set it to offline.")
        return send
