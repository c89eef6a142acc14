"""The folder of an attached run: the one that was given, or the next free number in the default folder."""

import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from ..runs import ATTACHED_RUNS, RunFolder
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
        self._is_given = out is not None
        self._parent = (trained_in or Path()).absolute() / ATTACHED_RUNS
        self.folder = self._at(Path(out).absolute() if out is not None else next(_free_folders(self._parent)))

    def _at(self, path: Path) -> RunFolder:
        """Return a folder for this run; the strategy is named after it, or after the Trainer's output folder."""
        source = path if self._is_given or self._trained_in is None else self._trained_in
        return RunFolder(path, source.absolute().name)

    @property
    def named_after(self) -> Path:
        """The path whose name describes the run: a numbered default folder says nothing about it."""
        return self.folder.path if self._is_given else self._parent.parent

    def create(self, *, overwrite: bool, is_resumed: bool) -> None:
        """Create a new numbered folder, unless one was given; refuse to overwrite another run.

        Raises:
            UsageError: if the folder contains a run that may not be replaced, or cannot be written.
        """
        if not (self._is_given or is_resumed):
            folders = map(self._at, _free_folders(self._parent))
            self.folder = next(folder for folder in folders if folder.make_new())
        advice = "give attach another folder, out=, or overwrite=True"
        self.folder.refuse_to_overwrite(allowed=overwrite or is_resumed, advice=advice)

    def share(self, ranks: Ranks) -> None:
        """Use the folder of the main rank on all ranks."""
        path, strategy = ranks.gather((str(self.folder.path), self.folder.strategy))[0]
        if not ranks.is_main:
            self.folder = RunFolder(Path(path), strategy)

    def resume(self, name: str) -> None:
        """Use the numbered folder of an earlier run, unless a folder was given."""
        if not self._is_given:
            self.folder = self._at(self._parent / Path(name).name)


def _free_folders(parent: Path) -> Iterator[Path]:
    """Yield folders ``run_N`` in ``parent``, numbered from one above the highest existing number."""
    try:
        names = [path.name for path in parent.iterdir()]
    except OSError:  # the folder does not exist yet; an unwritable one is refused when the run starts
        names = []
    taken = [int(name.removeprefix("run_")) for name in names if re.fullmatch(r"run_\d+", name)]
    yield from (parent / f"run_{number}" for number in count(max(taken, default=-1) + 1))
