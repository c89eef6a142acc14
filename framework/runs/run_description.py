"""Descriptions of runs for their records: planned runs, and the versions and the environment of this process."""

import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from torch import nn

from ..durable_files import plain_json
from ..hooks import treatments
from ..hooks.selection import ConfiguredHook
from ..state.settings import settings
from ..training import Ranks
from .records import RunRecord


def planned_record(
    hooks: Sequence[ConfiguredHook],
    on_hook_error: str,
    audit_hooks: bool,
    reference: Any = None,
    compiled: str = "safe",
    **fields: Any,
) -> RunRecord:
    """Describe a planned run with these ``hooks``; further ``fields`` of the record by their names.

    With ``compiled="all"``, taps may change the numbers of compiled graphs, which is a treatment.
    """
    fields["run"] = {"on_hook_error": on_hook_error, "audit_hooks": audit_hooks, "reference": reference}
    fields["hooks"] = {item.hook.name: item.options for item in hooks}
    kept = {"taps in compiled graphs": ("last bits",)} if compiled == "all" else {}
    fields["treatments"] = {**treatments(item.hook for item in hooks), **kept}
    return RunRecord(**plain_json(fields | {"versions": versions()}))


def versions() -> dict[str, str]:
    """Return the versions of loopscope, Python, torch and NumPy."""
    try:
        loopscope_version = version("loopscope")
    except PackageNotFoundError:
        loopscope_version = "not installed"
    return {
        "loopscope": loopscope_version,
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
