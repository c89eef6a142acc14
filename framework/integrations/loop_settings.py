"""Settings of a custom training loop or a Trainer, read from its objects for the record of the run."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..combined_optimizers import optimizer_name, scheduler_name
from ..data import Batch, rows_if_any
from ..durable_files import plain_json
from ..training import TrainingTask

LARGEST_SEED = 2**32
"""Above the seeds that people choose: torch seeds its generator with a random number of 64 bits by default."""


def loop_settings(task: TrainingTask, first: Batch | None, accumulate: int, seed: int) -> dict[str, Any]:
    """Return the settings of the training as plain values.

    Args:
        task: the task of the run.
        first: the first micro-batch, if known.
        accumulate: the number of micro-batches per step.
        seed: the seed of the run, see :func:`seed_of`.
    """
    parameter = next(task.model.parameters())
    settings: dict[str, Any] = {
        "model": type(task.model).__qualname__,
        "optimizer": optimizer_name(task.optimizer),
        **_options(task.optimizer.param_groups[0]),
        "scheduler": scheduler_name(task.scheduler),
        "batch_size": rows_if_any(first),
        "accumulation": accumulate,
        "seed": seed,
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": parameter.device.type,
        "loss_scaler": task.scaler is not None and task.scaler.is_enabled(),
    }
    return dict(plain_json(settings))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group, with the initial learning rate if a scheduler has changed it."""
    options = {name: value for name, value in group.items() if name not in ("params", "initial_lr")}
    options["lr"] = group.get("initial_lr", group.get("lr"))
    # Tensors of several elements, such as a mask, are no settings; plain_json() turns single elements into numbers.
    single = {name: value for name, value in options.items() if not isinstance(value, Tensor) or value.numel() == 1}
    return {("learning_rate" if name == "lr" else name): value for name, value in single.items()}


def seed_of(config: Mapping[str, Any], given: int) -> int:
    """Return the seed of a run: that of its config, of attach, or of ``torch.manual_seed``, the first that is known."""
    if type(config.get("seed")) is int:
        return int(config["seed"])
    seeded = torch.initial_seed()
    return given if given or seeded >= LARGEST_SEED else seeded


def name_without_seed(folder: Path, seed: int) -> str:
    """Return the name of a run's folder without its seed; of a folder that is named only by a seed, its parent's.

    >>> name_without_seed(Path("runs/lr0.1-seed3"), 3), name_without_seed(Path("runs/base/seed-3"), 3)
    ('lr0.1', 'base')
    """
    name = re.sub(rf"(?:^|[-_. ])(?:seed|s)[-_= ]?{seed}(?![\d])", "", folder.absolute().name)
    return name or folder.absolute().parent.name
