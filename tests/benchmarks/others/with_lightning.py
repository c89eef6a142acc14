"""The training in Lightning, with callbacks."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import grad_norm
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer

from tests.benchmarks.others.work import DECAY, MAX_NORM, Asked, Callback, Seen, Work

LOGS = "CSVLogger"
CLIPS, AVERAGES, NORMS = "gradient_clip_val", "EMAWeightAveraging", "log_dict(grad_norm(...))"


class Module(lightning.LightningModule):
    """The model with its loss and optimizer."""

    def __init__(self, work: Work, *, norms: bool) -> None:
        super().__init__()
        self.model, self._optimizer, self._norms = work.model, work.optimizer, norms

    def training_step(self, batch: Any, index: int) -> Tensor:
        return functional.cross_entropy(self.model(batch[0]), batch[1])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self._norms:
            self.log_dict(grad_norm(self, norm_type=2))

    def configure_optimizers(self) -> Optimizer:
        return self._optimizer


class Logs(lightning.Callback):
    """Logs the results of a callback."""

    def __init__(self, callback: Callback) -> None:
        self._callback = callback

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        seen = Seen(module.model, outputs["loss"], trainer.optimizers[0].param_groups[0]["lr"])
        for name, value in self._callback(seen).items():
            module.log(name, value)


def train(work: Work, asked: Asked) -> None:
    """Train, with the requested extras."""
    callbacks: list[lightning.Callback] = [Logs(callback) for callback in asked.callbacks]
    callbacks += [lightning.Callback()] * asked.receives_all_events
    callbacks += [EMAWeightAveraging(decay=DECAY)] if asked.averages else []
    logs = asked.norms or bool(asked.callbacks)
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    with _quiet():
        trainer = lightning.Trainer(
            max_epochs=work.epochs, accelerator="cpu", default_root_dir=work.folder, callbacks=callbacks,
            logger=CSVLogger(work.folder) if logs else False, log_every_n_steps=1,
            gradient_clip_val=MAX_NORM if asked.clips else None, **quiet,
        )  # fmt: skip
        trainer.fit(Module(work, norms=asked.norms), work.data)


@contextmanager
def _quiet() -> Iterator[None]:
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
