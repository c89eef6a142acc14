"""Selection of the members of a family of series that a hook reports, and a file with the complete family."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from loopscope.errors import require
from loopscope.hooks import Remembered, Remembering, RunInfo
from loopscope.training import is_main_process


@dataclass(frozen=True)
class SeriesBudget:
    """The members of a family that are reported: one series for each parameter, layer, head or expert can be thousands.

    Args:
        hook: name of the hook, for errors.
        names: glob patterns, separated by commas, of members that are always reported; ``*`` selects all.
        top: number of members with the largest values that are reported in addition.
        bottom: number of members with the smallest values that are reported in addition.

    >>> SeriesBudget("norms", "head.*", top=1, bottom=0).choose({"a": 3.0, "b": 2.0, "head.bias": 0.5})
    ['a', 'head.bias']
    """

    hook: str
    names: str = ""
    top: int = 10
    bottom: int = 5

    def __post_init__(self) -> None:
        for option in ("top", "bottom"):
            value = getattr(self, option)
            require(value >= 0, f"{self.hook}.{option} is {value}; it must be at least 0.")

    @property
    def patterns(self) -> list[str]:
        """Glob patterns in ``names``."""
        return [pattern for pattern in map(str.strip, self.names.split(",")) if pattern]

    def choose(self, values: Mapping[str, float]) -> list[str]:
        """Return the members to report, in the order of ``values``; NaN counts as larger than every number.

        Values that agree to nine digits rank in the order of ``values``, so that rounding errors, which differ between
        processors and numbers of ranks, do not decide which members are reported.
        """
        ranked = sorted(values, key=lambda name: _rank(values[name]))
        extremes = {*ranked[: self.bottom], *ranked[max(0, len(ranked) - self.top) :]}
        patterns = self.patterns
        return [name for name in values if name in extremes or any(fnmatchcase(name, p) for p in patterns)]

    def check_names(self, members: Mapping[str, object] | list[str]) -> None:
        """Raise :class:`UsageError` for a pattern that matches no member."""
        for pattern in self.patterns:
            require(
                any(fnmatchcase(name, pattern) for name in members),
                f"{self.hook}.names has the pattern {pattern!r}, which matches none of the {len(members):,} names; "
                f"the first are {', '.join(map(repr, list(members)[:3]))}.",
            )


def _rank(value: float) -> float:
    return math.inf if math.isnan(value) else float(f"{value:.9g}")


class FamilyFile(Remembering):
    """A file of JSON lines with all members of a hook's families, in the run's folder: one line per measured step.

    A resumed run continues the file at the position of the checkpoint.
    """

    _size = Remembered(0)
    _path: Path | None = None

    @staticmethod
    def name(hook: str, strategy: str) -> str:
        """Return the name of the file, for :meth:`TrainingHook.file_names`."""
        return f"{strategy}.{hook}.jsonl"

    def start(self, hook: str, run: RunInfo) -> None:
        """Choose the file of a run; of several processes, only the first one writes."""
        writes = is_main_process() and run.output_dir.is_dir()
        self._path = run.output_dir / self.name(hook, run.strategy) if writes else None

    def append(self, step: int, families: Mapping[str, Mapping[str, float]]) -> None:
        """Append a line with the step and the values of all members by family; NaN and infinities as in Python."""
        if self._path is None:
            return
        line = json.dumps({"step": step, **{family: dict(values) for family, values in families.items()}}) + "\n"
        self._path.touch()
        with self._path.open("r+b") as file:
            file.seek(self._size)
            file.truncate()
            self._size += file.write(line.encode())
