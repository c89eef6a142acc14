"""``loopscope watch --grid``: a command once at each point of a grid of settings, each with its own record.

Like ``loopscope watch``, this module imports no torch.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..console import show_warnings
from ..errors import LoopscopeError, UsageError, counted, short_path
from ..interruption import raise_at_ctrl_c
from ..runs import ATTACHED_RUNS, TRAINED, RunRecord, read_status
from ..sweeps import (
    CommandJob,
    JobOptions,
    JobRecord,
    LocalJobs,
    jobs_in_progress,
    point_name,
    points_of,
    require_submitit,
    submission_lines,
    submit,
    words_of,
)

LOGS = "output"
"""The folder of what the commands print, next to those of their records."""


@dataclass(frozen=True)
class GridPoint:
    """The command at one point of a grid, and the folder of its record."""

    name: str
    folder: Path
    command: Sequence[str]
    options: Sequence[str]

    def words(self, *, overwrite: bool) -> list[str]:
        """Return the words that watch the command."""
        replace = ["--overwrite"] if overwrite else []
        watch = [sys.executable, "-m", "loopscope", "watch", *self.options, "--out", str(self.folder), *replace]
        return [*watch, "--", *self.command]

    @property
    def status(self) -> str | None:
        """The status of the record; ``None`` without a complete one."""
        return read_status(self.folder)

    def is_complete(self) -> bool:
        """Return whether the point has a complete record of this command.

        Raises:
            UsageError: if the record is that of another command.
        """
        if self.status not in TRAINED:
            return False
        recorded = RunRecord.read(self.folder).provenance.get("watch", {}).get("command")
        if recorded is not None and list(recorded) != list(self.command):
            raise UsageError(
                f"{short_path(self.folder)} has the record of another command: {' '.join(recorded)}. Choose another "
                "--out, or add --overwrite."
            )
        return True


def watch_grid(command: Sequence[str], options: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
    """Run a command at each point of a grid that has no complete record, and return the exit status.

    Args:
        command: the command, to which each point appends ``--NAME VALUE`` words.
        options: the options of ``loopscope watch`` for each point.
        settings: ``grid``, ``jobs``, ``on``, ``on_options``, ``out`` and ``overwrite``.
    """
    raise_at_ctrl_c()
    try:
        with show_warnings(_print_warning):
            return _watch_grid(command, options, settings)
    except LoopscopeError as error:
        sys.stderr.write(f"loopscope: {error}\n")
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        sys.stderr.write("loopscope: interrupted.\n")
        return 130


def _print_warning(label: str, sentence: str) -> None:
    sys.stderr.write(f"loopscope: {label}: {sentence}\n")


def _watch_grid(command: Sequence[str], options: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
    folder = Path(settings["out"] or Path(ATTACHED_RUNS, "grid")).absolute()
    words = [*_option_words(options)]
    points = [
        GridPoint(name := point_name(point), folder / name, [*command, *words_of(point)], words)
        for point in points_of(settings["grid"])
    ]
    overwrite = settings["overwrite"]
    open_points = {point.folder: point for point in points if overwrite or not point.is_complete()}
    running = jobs_in_progress([*open_points], overwrite=overwrite)
    if settings["on"] is not None:
        _submit(open_points, running, folder, settings, len(points))
    else:
        _run([point for path, point in open_points.items() if path not in running], folder, settings["jobs"] or 1)
    statuses = {point.name: point.status for point in points}
    missing = [name for name, status in statuses.items() if status not in TRAINED]
    if missing and settings["on"] != "slurm":
        sys.stderr.write(
            f"loopscope: {len(missing)} of {counted(len(points), 'point')} did not complete, such as {missing[0]}; the "
            f"same command starts them again. Output: {short_path(folder / LOGS)}.\n"
        )
        return 1
    if not missing:
        sys.stdout.write(f"{counted(len(points), 'point')} completed. Next: loopscope ls {short_path(folder)}\n")
    return 0


def _run(points: Sequence[GridPoint], folder: Path, at_once: int) -> None:
    """Run the commands as child processes, at most ``at_once`` at a time."""
    logs = folder / LOGS
    logs.mkdir(parents=True, exist_ok=True)

    def run(point: GridPoint) -> None:
        words = point.words(overwrite=point.folder.exists())
        with (logs / f"{point.name}.log").open("wb") as file:
            status = subprocess.run(words, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL).returncode
        sys.stdout.write(f"{point.name}: {point.status or f'ended with status {status}'}\n")
        sys.stdout.flush()

    with ThreadPoolExecutor(at_once) as pool:
        try:
            list(pool.map(run, points))
        except KeyboardInterrupt:  # the commands have received it, too
            pool.shutdown(cancel_futures=True)
            raise


def _submit(
    points: Mapping[Path, GridPoint],
    running: dict[Path, JobRecord],
    folder: Path,
    settings: Mapping[str, Any],
    total: int,
) -> None:
    """Submit the commands as jobs, and wait for local ones."""
    require_submitit()
    wanted = JobOptions.of(settings["on"], settings["on_options"])
    executor = wanted.executor(folder / LOGS, "loopscope", settings["jobs"])
    jobs = [
        CommandJob(point.words(overwrite=path.exists()), point.words(overwrite=True), path, wanted.variables())
        for path, point in points.items()
        if path not in running
    ]
    if not wanted.is_local:
        records = submit(executor, jobs) if jobs else []
        lines = submission_lines(records, running, total - len(points), folder)
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        return
    local = LocalJobs(executor, [*jobs], running, max(1, settings["jobs"] or 1))
    for path, job in local.ended():
        sys.stdout.write(f"{points[path].name}: {points[path].status or f'see {short_path(job.log())}'}\n")
        sys.stdout.flush()


def _option_words(options: Mapping[str, Any]) -> list[str]:
    """Return options of ``loopscope watch`` as words."""
    words = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        values = value if isinstance(value, list) else [] if value is True else [value]
        words += [flag, *map(str, values)] if value is not None and value is not False else []
    return words
