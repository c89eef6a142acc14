"""Trackio sink."""

from typing import ClassVar

from loopscope.errors import UsageError
from loopscope.hooks import SinkRegistry

from . import trackio_process
from .client_sink import ClientSink


@SinkRegistry.register
class TrackioSink(ClientSink):
    """Send every metric to a Trackio project, and write STRATEGY.jsonl.

    The sink works like :class:`WandbSink`: a separate process reads the record and sends it, so that a client that
    fails costs the run less than a second. A resumed run continues its Trackio run. Trackio's variables are respected:
    TRACKIO_DIR gives the local store, and TRACKIO_SPACE_ID or TRACKIO_SERVER_URL a remote one.

    Args:
        project: the project; by default the name of the experiment.
    """

    name: ClassVar[str] = "trackio"
    flag: ClassVar[str | None] = "--hook-trackio"
    option: ClassVar[str | None] = "project"
    title: ClassVar[str] = "Trackio"
    package: ClassVar[str] = "trackio"
    program: ClassVar[str] = trackio_process.__file__

    def __init__(self, *, project: str | None = None) -> None:
        super().__init__(project)

    @classmethod
    def check_project(cls, project: str) -> None:
        """Raise :class:`UsageError` for a name without the characters that Trackio uses for its files."""
        if not any(character.isalnum() for character in project):
            raise UsageError(f"{project!r} is not a valid Trackio project: use at least one letter or digit.")
