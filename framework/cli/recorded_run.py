"""A recorded run that ``rewind`` and ``verify`` train again, with the same or other hooks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch

from ..console import watch
from ..errors import UsageError
from ..runs import ExperimentRunner, RunRecord, Session, StepRange, check_device
from ..training import torchrun_world_size
from .options import Options, config_of, parse_recorded, run_options, wanted_sinks
from .parser import NAMES, CommandParser


@dataclass(frozen=True)
class RecordedRun:
    """A run with its record, its experiment and the options of its command."""

    folder: Path
    record: RunRecord
    runner: ExperimentRunner[Any]
    options: Options

    @classmethod
    def read(cls, folder: Path) -> "RecordedRun":
        """Return the run in a folder.

        Raises:
            UsageError: if the folder has no run, or its run cannot be trained here.
        """
        record = RunRecord.read(folder)
        experiment, options = parse_recorded(folder)
        options |= {"resume": False, "hook_jsonl": True}
        if not torchrun_world_size():
            options["parallel"] = None
        device = _device(folder, options["device"], record)
        return cls(folder, record, experiment(config_of(experiment, options), device), options)

    def session(
        self, with_hooks: str | None = None, hooks: Sequence[str] = (), hook_config: Sequence[str] = ()
    ) -> Session:
        """Return a session with the given hooks, by default the original ones; committing hooks are kept."""
        recorded, treatments = self.options, self.record.treatments
        changed: Options = {"hook_config": [*recorded["hook_config"], *hook_config]}
        if with_hooks or hooks:
            kept = [name for name in recorded["hooks"] if name.replace("-", "_") in treatments]
            config = [option for option in recorded["hook_config"] if option.partition(".")[0] in treatments]
            added = [name for name in hooks if name not in kept]
            changed = {"with_hooks": with_hooks, "hooks": [*kept, *added], "hook_config": [*config, *hook_config]}
        options = recorded | changed
        return Session(self.runner, run_options(options), wanted_sinks(options))

    def train_again(
        self, stretch: StepRange, hook: str, hook_options: Mapping[str, Any], *, is_silent: bool = False
    ) -> Path:
        """Train a stretch again with one hook and a progress bar, and return the folder of its measurements."""
        config = [f"{hook}.{name}={value}" for name, value in hook_options.items()]
        label = f"steps {stretch.step:,} to {stretch.until:,}, {Path(stretch.name).name}"
        session, rewind = self.session("none", [hook], config), methodcaller("rewind", stretch)
        return Path(watch(session, "none" if is_silent else "silent", rewind, until=stretch.until, label=label)[0])


def add_hook_options(parser: CommandParser, default: str) -> None:
    """Add the options that select hooks; ``default`` describes the hooks without them."""
    parser.add("with_hooks", str, f"a group of hooks (default: {default})", metavar="GROUP")
    parser.add("hooks", NAMES, f"names of hooks (default: {default})", default=[], metavar="NAME")
    parser.add("hook_config", NAMES, "options of hooks: hook.option=value", default=[], metavar="H.O=V")


def given_hooks(given: Mapping[str, Any]) -> Options:
    """Return the options of :func:`add_hook_options`, as arguments of :meth:`RecordedRun.session`."""
    return {name: given[name] for name in ("with_hooks", "hooks", "hook_config")}


def _device(folder: Path, name: str | None, record: RunRecord) -> torch.device:
    """Return the kind of device that a run was trained on; raises :class:`UsageError` if it is not available."""
    name = name or str(record.environment.get("device", "cpu")).partition(":")[0]
    try:
        return check_device(name)
    except UsageError as error:
        raise UsageError(f"{folder} was trained on {name!r}, and other devices give other bits. {error}") from error
