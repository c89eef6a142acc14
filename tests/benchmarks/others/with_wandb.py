"""A bare loop that logs its loss to W&B, offline, with or without ``watch``."""

import os
from unittest.mock import patch

import wandb
from torch.nn import functional

from tests.benchmarks.others.work import Work

DEFAULT_EVERY = 1000
"""Default number of steps between two of ``watch``'s histograms."""


def train(work: Work, every: int | None) -> None:
    """Train; ``watch`` logs a histogram of each gradient at regular intervals."""
    homes = ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR")
    with patch.dict(os.environ, dict.fromkeys(homes, str(work.folder))):
        settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True)
        run = wandb.init(mode="offline", dir=str(work.folder), settings=settings)
        if every is not None:
            run.watch(work.model, log="gradients", log_freq=every)
        for _ in range(work.epochs):
            for inputs, targets in work.data:
                work.optimizer.zero_grad()
                loss = functional.cross_entropy(work.model(inputs), targets)
                loss.backward()
                work.optimizer.step()
                run.log({"loss": float(loss.detach())})
        if every is not None:
            run.unwatch(work.model)
        run.finish()
