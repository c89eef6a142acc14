"""What a run leaves in its folder: configuration, summary, final weights and checkpoints."""

import json
import math
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from framework.checkpoints import atomic_save
from framework.config import RunOptions
from framework.contexts import RunInfo
from framework.errors import UsageError
from framework.hook_config import ConfiguredHook
from framework.manager import HookManager
from framework.train_step import TrainingTask
from framework.training_state import TrainingState

CONFIG = "experiment_config.json"
SUMMARY = "summary.json"


@dataclass(frozen=True)
class RunRecord:
    """The folder of one strategy's run."""

    directory: Path
    strategy: str

    def refuse_to_overwrite(self, *, allowed: bool) -> None:
        """Raise :class:`UsageError` if a run lies here already, or the folder cannot be written; writes nothing."""
        if (self.directory / CONFIG).exists() and not allowed:
            state = "a finished" if (self.directory / SUMMARY).exists() else "an unfinished"
            raise UsageError(
                f"{self.directory} already holds {state} run, which is left as it is; choose another --output-dir, or "
                "write over it with --overwrite."
            )
        existing = next(folder for folder in (self.directory, *self.directory.absolute().parents) if folder.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise UsageError(
                f"The output directory {self.directory} cannot be written: {existing} is not a writable folder."
            )

    def claim(self) -> None:
        """Make the folder and remove the marks of an earlier run that is written over."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            for name in (SUMMARY, CONFIG):
                (self.directory / name).unlink(missing_ok=True)
        except OSError as error:
            raise UsageError(f"The output directory {self.directory} cannot be written: {error.strerror}.") from error

    def write_config(self, run: RunInfo, hooks: Sequence[ConfiguredHook], options: RunOptions) -> None:
        """Write what was run: configuration, hooks with their options, treatments, environment, versions."""
        content = {
            "experiment": run.experiment,
            "strategy": run.strategy,
            "config": run.config.as_dict(),
            "hooks": {item.hook.name: dict(item.options) for item in hooks},
            "treatments": dict(run.treatments),
            "run": {"on_hook_error": options.on_hook_error, "audit_hooks": options.audit_hooks},
            "environment": environment(run.model),
        }
        _write_json(self.directory / CONFIG, content)

    def write_summary(
        self,
        run: RunInfo,
        task: TrainingTask,
        state: TrainingState,
        manager: HookManager,
        *,
        status: str,
        seconds: Mapping[str, float],
        initial: Mapping[str, float],
        final: Mapping[str, float],
    ) -> dict[str, Any]:
        """Write how it went, and return it."""
        loop = state.loop
        parameters = list(task.model.parameters())
        summary: dict[str, Any] = {
            "experiment": run.experiment,
            "strategy": run.strategy,
            "status": status,
            "seed": run.seed,
            "epochs": loop.epoch,
            "steps": loop.step,
            "target_reached": loop.reached,
            "seconds": dict(seconds),
            "steps_per_second": loop.step / seconds["training"] if seconds["training"] else None,
            "model": {
                "parameters": sum(parameter.numel() for parameter in parameters),
                "trainable_parameters": sum(item.numel() for item in parameters if item.requires_grad),
                "bytes": sum(parameter.numel() * parameter.element_size() for parameter in parameters),
            },
            "training_loss": loop.epoch_loss,
            "initial": dict(initial),
            "final": dict(final),
            "deltas": {name: final[name] - initial[name] for name in final if name in initial},
            "treatments": dict(run.treatments),
            "hook_errors": manager.errors,
            "output_dir": str(self.directory),
        }
        if manager.profiler.enabled:
            summary["hook_profile"] = manager.profiler.report()
        _write_json(self.directory / SUMMARY, summary)
        return summary

    def write_weights(self, model: nn.Module) -> None:
        """Write the final weights as a state dict."""
        atomic_save(model.state_dict(), self.directory / f"{self.strategy}_final.pt")

    def checkpoint_path(self, step: int) -> Path:
        """Return where the checkpoint of ``step`` lies."""
        return self.directory / "checkpoints" / f"step_{step:09d}.pt"

    def newest_checkpoint(self) -> Path | None:
        """Return the newest checkpoint, if there is one."""
        return max((self.directory / "checkpoints").glob("step_*.pt"), default=None)


def environment(model: nn.Module) -> dict[str, Any]:
    """Describe what the numbers of a run may depend on besides its configuration."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "device": str(next(model.parameters()).device),
        "threads": torch.get_num_threads(),
        "command": sys.argv[1:],
    }


def _plain(value: Any) -> Any:
    """Make a value JSON: non-finite floats become strings, paths text, tuples lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(_plain(content), indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
