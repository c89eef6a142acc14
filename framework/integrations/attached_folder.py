"""The folder of an attached run: the one that was given, or the next free number in the default folder."""

import re
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from ..durable_files import path_exists
from ..file_digests import digest_of
from ..hooks import SinkRegistry
from ..runs import ATTACHED_RUNS, CONFIG, RunFolder
from ..training import Ranks


class FolderChoice:
    """The choice of an attached run's folder, which all its ranks share.

    Args:
        out: the folder that was given, or ``None``.
        trained_in: the output folder of the Trainer, which contains the default folder of the run.
    """

    def __init__(self, out: str | Path | None, trained_in: Path | None) -> None:
        # All paths are absolute, so that a script that changes the working directory keeps its folder.
        self._trained_in = trained_in
        self._given = None if out is None else Path(out).absolute()
        self._parent = (trained_in or Path(out or "")).absolute() / ATTACHED_RUNS
        self.folder = self._at(self._given or next(_free_folders(self._parent)))

    def advance(self, training: int, *, overwrite: bool) -> None:
        """Choose the folder for a later training of the same Trainer, which is its ``training``-th: ``out_2``."""
        if self._given is None:
            self.folder = self._at(next(_free_folders(self._parent)))
            return
        paths = (self._given.with_name(f"{self._given.name}_{number}") for number in count(training))
        self.folder = self._at(next(path for path in paths if overwrite or not path.exists()))

    def _at(self, path: Path) -> RunFolder:
        """Return a folder for this run; the strategy is named after it, or after the Trainer's output folder."""
        source = path if self._given is not None or self._trained_in is None else self._trained_in
        return RunFolder(path, source.absolute().name)

    @property
    def named_after(self) -> Path:
        """The path whose name describes the run: a numbered default folder says nothing about it."""
        return self.folder.path if self._given is not None else self._parent.parent

    def create(self, *, overwrite: bool, is_resumed: bool) -> None:
        """Create a new numbered folder, unless one was given; refuse to overwrite another run.

        Raises:
            UsageError: if the folder contains a run that may not be replaced, or cannot be written.
        """
        if self._given is None and not is_resumed:
            folders = map(self._at, _free_folders(self._parent))
            self.folder = next(folder for folder in folders if folder.make())
        advice = "give attach another folder, out=, or overwrite=True"
        self.folder.refuse_to_overwrite(allowed=overwrite or is_resumed, advice=advice)

    def share(self, ranks: Ranks) -> None:
        """Use the folder of the main rank on all ranks."""
        path, strategy = ranks.gather((str(self.folder.path), self.folder.strategy))[0]
        if not ranks.is_main:
            self.folder = RunFolder(Path(path), strategy)

    def resume(self, name: str) -> None:
        """Use the folder of an earlier run of this name: a numbered one, or that of an earlier training."""
        name = Path(name).name
        if self._given is None:
            self.folder = self._at(self._parent / name)
        elif re.fullmatch(rf"{re.escape(self._given.name)}(_\d+)?", name):
            self.folder = self._at(self._given.with_name(name))

    def holds_run_of(self, sinks: Mapping[str, Any], *, overwrite: bool) -> bool:
        """Return whether the folder has a record, which a state with these positions of sinks continues.

        A record that may be overwritten is continued only if its files have content that matches the positions.
        """
        folder = self.folder
        if not path_exists(folder.path / CONFIG):
            return False
        written = ((sink.file_names(folder.strategy), sinks.get(sink.name)) for sink in SinkRegistry)
        digested = [(folder.path / names[0], place) for names, place in written if place and "xxh3_128" in place]
        has_content = any(place["size"] for _, place in digested)
        return not overwrite or (has_content and all(_begins_with(path, place) for path, place in digested))


def _begins_with(path: Path, position: Mapping[str, Any]) -> bool:
    """Return whether a file begins with the content that it had at a checkpoint."""
    try:
        return digest_of(path, int(position["size"])) == str(position["xxh3_128"])
    except OSError:
        return False


def _free_folders(parent: Path) -> Iterator[Path]:
    """Yield folders ``run_N`` in ``parent``, numbered from one above the highest existing number."""
    try:
        names = [path.name for path in parent.iterdir()]
    except OSError:  # the folder does not exist yet; an unwritable one is refused when the run starts
        names = []
    taken = [int(name.removeprefix("run_")) for name in names if re.fullmatch(r"run_\d+", name)]
    yield from (parent / f"run_{number}" for number in count(max(taken, default=-1) + 1))
