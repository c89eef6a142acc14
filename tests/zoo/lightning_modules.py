"""A module of Lightning and its training."""

from typing import Any

import lightning
import torch
from torch import Tensor, nn

from tests.zoo.models import class_loss
from tests.zoo.recorder import Recorder


class Classifier(lightning.LightningModule):
    """A classifier that is trained by Adam."""

    def __init__(self, net: nn.Module, lr: float = 3e-3) -> None:
        super().__init__()
        self.net, self.lr = net, lr

    def forward(self, rows: Tensor) -> Tensor:
        """Return the logits."""
        return self.net(rows)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Return the loss of a batch."""
        return class_loss(self, batch)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        """Log the loss of a validation batch."""
        self.log("val_loss", class_loss(self, batch))

    def configure_optimizers(self) -> Any:
        """Return Adam for all parameters."""
        return torch.optim.Adam(self.parameters(), self.lr)


def fit(recorder: Recorder, module: Classifier, rows: Any, validation: Any = None, **arguments: Any) -> None:
    """Train a module for four epochs; further arguments are those of Lightning's Trainer."""
    standard = {
        "max_epochs": 4,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(recorder.folder / "trainer"),
    }
    trainer = lightning.Trainer(**(standard | arguments))
    recorder.attach(trainer)
    trainer.fit(module, rows, validation)
