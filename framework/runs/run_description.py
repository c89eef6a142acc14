"""Descriptions of runs for their records: planned runs, and the versions and the environment of this process."""

import platform
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ..durable_files import plain_json
from ..hooks import treatments
from ..hooks.selection import ConfiguredHook
from ..optional_packages import installed_version
from ..state.settings import settings
from ..training import Ranks
from .config import RunSettings
from .records import RunRecord


def planned_record(
    hooks: Sequence[ConfiguredHook], run_settings: RunSettings, reference: Any = None, **fields: Any
) -> RunRecord:
    """Describe a planned run with these ``hooks``; further ``fields`` of the record by their names.

    With ``compiled="all"``, taps may change the numbers of compiled graphs, which is a treatment.
    """
    run = {"on_hook_error": run_settings.on_hook_error, "audit_hooks": run_settings.audit_hooks}
    fields |= {"run": {**run, "reference": reference}, "hooks": {item.hook.name: item.options for item in hooks}}
    kept = {"taps in compiled graphs": ("last bits",)} if run_settings.compiled == "all" else {}
    fields["treatments"] = {**treatments(item.hook for item in hooks), **kept}
    return RunRecord(**plain_json(fields | {"versions": versions()}))


def versions() -> dict[str, str]:
    """Return the versions of loopscope, Python, torch and NumPy."""
    return {
        "loopscope": installed_version("loopscope"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def environment(model: nn.Module, ranks: Ranks | None = None) -> dict[str, Any]:
    """Return the settings, besides versions, that a run's numbers may depend on, and the command that started it."""
    return {
        "processes": (ranks or Ranks()).rank_and_count[1],
        "sharing": (ranks or Ranks()).sharing,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": str(next(model.parameters()).device),
        "threads": torch.get_num_threads(),
        **settings(),
        "command": sys.argv[1:],
    }
