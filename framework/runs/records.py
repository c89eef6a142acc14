"""What a run leaves in its folder: configuration, summary, final weights and checkpoints."""

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn

from ..checkpoints import checkpoints_in, save_tensors, write_json
from ..errors import UsageError
from ..firing import HookManager
from ..hooks import ConfiguredHook, HookRegistry, RunInfo, SinkRegistry
from ..state import TrainingState, settings
from ..training import TrainingTask
from .config import RunOptions

CONFIG = "experiment_config.json"
SUMMARY = "summary.json"
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class RunRecord:
    """The folder of one strategy's run."""

    directory: Path
    strategy: str
    _made: list[Path] = field(default_factory=list)
    """The folders that did not exist before, outermost first."""

    def refuse_to_overwrite(self, *, allowed: bool) -> None:
        """Raise :class:`UsageError` if a run lies here already, or the folder cannot be written; writes nothing."""
        try:
            if not allowed and any(path.exists() for path in self._left_by_a_run()):
                raise UsageError(
                    f"{self.directory} already holds {self._earlier_run()}, which is left as it is; choose another "
                    "--output-dir, or write over it with --overwrite."
                )
            existing = next(path for path in (self.directory, *self.directory.absolute().parents) if path.exists())
        except OSError as error:
            raise self._not_writable(error) from error
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise UsageError(
                f"The output directory {self.directory} cannot be written: {existing} is not a writable folder."
            )

    def make_folder(self) -> None:
        """Make the folder; what lies in it stays as it is."""
        missing = [path for path in (self.directory, *self.directory.parents) if not path.exists()]
        try:
            for path in reversed(missing):
                path.mkdir(exist_ok=True)
                self._made.append(path)
        except OSError as error:
            self.give_back()
            raise self._not_writable(error) from error

    def give_back(self) -> None:
        """Remove the folders that were made, unless something lies in them by now."""
        with suppress(OSError):
            while self._made:
                self._made.pop().rmdir()

    def claim(self, reference: Path | None = None) -> Path | None:
        """Remove what an earlier run left here, of which nothing else would be written over.

        Its final weights stay under another name if they are the ``reference`` of the run that begins, which may have
        to be resumed with them. Return where the reference lies from now on.
        """
        lies = None if reference is None else reference.resolve()
        if lies == self.weights_path.resolve():
            self.weights_path.replace(self.reference_path)
            reference = self.reference_path
        elif lies != self.reference_path.resolve():
            self.reference_path.unlink(missing_ok=True)
        for path in self._left_by_a_run():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        return reference

    def _left_by_a_run(self) -> Iterator[Path]:
        """Yield every path that a run may write here, the one by which it is known last."""
        for entry in (*SinkRegistry, *HookRegistry):
            yield from (self.directory / name for name in entry.leaves(self.strategy))
        yield self.weights_path
        yield self.checkpoints
        yield self.directory / SUMMARY
        yield self.directory / CONFIG

    def _earlier_run(self) -> str:
        """Say in a few words what lies here."""
        try:
            status = json.loads((self.directory / SUMMARY).read_text("utf-8"))["status"]
        except (OSError, ValueError, KeyError, TypeError):
            return "an unfinished run"
        return "a finished run" if status == "completed" else f"a run that ended as {status!r}"

    def _not_writable(self, error: OSError) -> UsageError:
        return UsageError(f"The output directory {self.directory} cannot be written: {error.strerror}.")

    def write_config(
        self,
        run: RunInfo,
        hooks: Sequence[ConfiguredHook],
        options: RunOptions,
        reference: Path | None = None,
        data: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Write what was run: configuration, data, hooks with their options, treatments, environment, versions."""
        content = {
            "experiment": run.experiment,
            "strategy": run.strategy,
            "config": run.config.as_dict(),
            "data": dict(data),
            "hooks": {item.hook.name: dict(item.options) for item in hooks},
            "treatments": dict(run.treatments),
            "run": {
                "on_hook_error": options.on_hook_error,
                "audit_hooks": options.audit_hooks,
                "reference": None if reference is None else str(reference),
            },
            "options": dict(options.recorded),
            "versions": versions(),
            "environment": environment(run.model),
        }
        write_json(self.directory / CONFIG, content)

    def write_summary(
        self,
        run: RunInfo,
        task: TrainingTask,
        state: TrainingState,
        manager: HookManager,
        *,
        status: str,
        error: BaseException | None,
        seconds: Mapping[str, float],
        initial: Mapping[str, float],
        final: Mapping[str, float],
        sample: str | None = None,
    ) -> dict[str, Any]:
        """Write how it went, and return it."""
        loop = state.loop
        summary: dict[str, Any] = {
            "experiment": run.experiment,
            "strategy": run.strategy,
            "status": status,
            "error": None if error is None else " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":"),
            "seed": run.seed,
            "epochs": loop.epoch,
            "steps": loop.step,
            "skipped_steps": loop.skipped_steps,
            "target_reached": loop.reached,
            "seconds": dict(seconds),
            "steps_per_second": loop.step / seconds["training"] if seconds["training"] else None,
            "model": model_size(task.model),
            "training_loss": loop.epoch_loss,
            "initial": dict(initial),
            "final": dict(final),
            "deltas": {name: final[name] - initial[name] for name in final if name in initial},
            "metrics": newest(manager.dispatch.last(), run.compared_metrics),
            "sample": sample,
            "treatments": dict(run.treatments),
            "hook_errors": manager.hooks.failures.errors,
            "hooks_left_out": manager.hooks.failures.left_out,
            "hook_tables": manager.hooks.tables,
            "hook_samples": manager.profiler.samples,
            "output_dir": str(self.directory),
        }
        if manager.profiler.enabled:
            summary["hook_profile"] = manager.profiler.report()
        write_json(self.directory / SUMMARY, summary)
        return summary

    @property
    def weights_path(self) -> Path:
        """Where the final weights lie."""
        return self.directory / weights_name(self.strategy)

    @property
    def reference_path(self) -> Path:
        """Where final weights that a run has written over lie, if it measures against them."""
        return self.directory / reference_name(self.strategy)

    def write_weights(self, model: nn.Module) -> None:
        """Write the final weights as a state dict."""
        save_tensors(model.state_dict(), self.weights_path)

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.directory / CHECKPOINTS

    def newest_checkpoint(self) -> Path | None:
        """Return the newest checkpoint, if there is one."""
        return next(checkpoints_in(self.checkpoints), None)

    def recorded(self) -> dict[str, Any] | None:
        """Return what the configuration of a run that lies here says, if it can be read."""
        try:
            content: dict[str, Any] = json.loads((self.directory / CONFIG).read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return content

    def finished(self) -> dict[str, Any] | None:
        """Return the summary of a run that is complete, if one lies here."""
        try:
            summary: dict[str, Any] = json.loads((self.directory / SUMMARY).read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return summary if summary.get("status") == "completed" and self.weights_path.exists() else None


def newest(metrics: Mapping[str, Any], names: Sequence[str]) -> dict[str, float]:
    """Return the newest values of the named metrics that are there, as numbers."""
    return {name: float(metrics[name]) for name in names if name in metrics}


def weights_name(strategy: str) -> str:
    """Return the name of the file of a strategy's final weights."""
    return f"{strategy}_final.pt"


def reference_name(strategy: str) -> str:
    """Return the name of the file of the final weights that a run has written over and measures against."""
    return f"{strategy}_reference.pt"


def model_size(model: nn.Module) -> dict[str, int]:
    """Count the parameters, those that are trained, and the bytes of all of them."""
    parameters = list(model.parameters())
    return {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trainable_parameters": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "bytes": sum(parameter.numel() * parameter.element_size() for parameter in parameters),
    }


def versions() -> dict[str, str]:
    """Return the versions of loopscope and of what its numbers depend on."""
    try:
        own = version("loopscope")
    except PackageNotFoundError:
        own = "not installed"
    return {"loopscope": own, "python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}


def environment(model: nn.Module) -> dict[str, Any]:
    """Describe what else the numbers of a run may depend on, and the command that started it."""
    return {
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": str(next(model.parameters()).device),
        "threads": torch.get_num_threads(),
        **settings(),
        "command": sys.argv[1:],
    }
