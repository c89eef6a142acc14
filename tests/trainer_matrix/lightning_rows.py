"""Trainings by Lightning's Trainer."""

from typing import Any

import torch
from torch import nn

from tests.trainer_matrix import tiny
from tests.trainer_matrix.row import VARIANTS, Attach, row, rows

QUIET: dict[str, Any] = {
    "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "max_epochs": 2, "num_sanity_val_steps": 0,
}  # fmt: skip


def module_class(package: Any) -> Any:
    """Return a module of one of the two packages of Lightning."""

    class Classifier(package.LightningModule):  # type: ignore[misc]
        returns_none = False

        def __init__(self) -> None:
            super().__init__()
            self.layers = tiny.classifier()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = tiny.classification_loss(self.layers, batch)
            self.log("loss", loss)
            return None if self.returns_none and batch_idx == 2 else loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", tiny.classification_loss(self.layers, batch))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Classifier


def fit(attach: Attach, trainer: Any, module: Any, evaluates: bool = False) -> None:
    """Attach hooks and fit; only the training with hooks validates."""
    attach(trainer)
    validation = tiny.loader(tiny.points(8, seed=5)) if evaluates and not attach.is_bare else None
    trainer.fit(module, tiny.loader(), validation)


LIGHTNING_VARIANTS: dict[str, dict[str, Any]] = VARIANTS | {"bfloat16": {"precision": "bf16-mixed"}}


@rows("Lightning Trainer", "lightning", variants=LIGHTNING_VARIANTS)
def lightning(
    attach: Attach, accumulate: int = 1, clip: float | None = None, evaluates: bool = False, **changed: Any
) -> None:
    import lightning.pytorch

    options = QUIET | {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip} | changed
    fit(attach, lightning.pytorch.Trainer(**options), module_class(lightning.pytorch)(), evaluates)


@row("Lightning Trainer", "package pytorch_lightning", "pytorch-lightning")
def old_package(attach: Attach) -> None:
    import pytorch_lightning

    fit(attach, pytorch_lightning.Trainer(**QUIET), module_class(pytorch_lightning)())


@row("Lightning Trainer", "averaging callbacks", "lightning")
def averages(attach: Attach) -> None:
    import lightning.pytorch
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    callbacks = [StochasticWeightAveraging(1e-2, swa_epoch_start=1)]
    trainer = lightning.pytorch.Trainer(**QUIET | {"max_epochs": 3}, callbacks=callbacks)
    fit(attach, trainer, module_class(lightning.pytorch)())


@row("Lightning Trainer", "training_step returns None", "lightning")
def without_loss(attach: Attach) -> None:
    import lightning.pytorch

    kind = module_class(lightning.pytorch)
    kind.returns_none = True
    fit(attach, lightning.pytorch.Trainer(**QUIET), kind())


@rows(
    "Lightning Trainer, manual optimisation",
    "lightning",
    variants={"one optimizer": {"several": False}, "two optimizers": {"several": True}},
)
def manual(attach: Attach, several: bool) -> None:
    import lightning.pytorch

    class Manual(lightning.pytorch.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizers = self.optimizers() if several else [self.optimizers()]
            for optimizer in optimizers:
                hidden = nn.functional.dropout(self.first(batch[0]), 0.2)
                loss = nn.functional.cross_entropy(self.second(hidden), batch[1])
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

        def configure_optimizers(self) -> Any:
            if not several:
                return torch.optim.AdamW(self.parameters(), 1e-2)
            return [torch.optim.AdamW(part.parameters(), 1e-2) for part in (self.first, self.second)]

    fit(attach, lightning.pytorch.Trainer(**QUIET), Manual())


@row("Lightning Trainer, manual optimisation", "GAN", "lightning")
def manual_gan(attach: Attach) -> None:
    import lightning.pytorch

    class Gan(lightning.pytorch.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
            self.discriminator = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(), nn.Dropout(0.1), nn.Linear(8, 1))

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            score, loss_of = self.discriminator, nn.functional.binary_cross_entropy_with_logits
            real, noise = batch[0], torch.randn(len(batch[0]), 4)
            self.toggle_optimizer(first)
            fooled = score(self.generator(noise))
            self.manual_backward(loss_of(fooled, torch.ones_like(fooled)))
            first.step()
            first.zero_grad()
            self.untoggle_optimizer(first)
            self.toggle_optimizer(second)
            genuine, fake = score(real), score(self.generator(noise).detach())
            self.manual_backward(loss_of(genuine, torch.ones_like(genuine)) + loss_of(fake, torch.zeros_like(fake)))
            second.step()
            second.zero_grad()
            self.untoggle_optimizer(second)

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(part.parameters(), 1e-2) for part in (self.generator, self.discriminator)]

    fit(attach, lightning.pytorch.Trainer(**QUIET), Gan())
