"""Trainers of Hugging Face and Lightning with a handful of hooks."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.oracle import models, product
from tests.oracle.recording import Case, attached_case

HANDFUL: dict[str, dict[str, Any]] = {
    "norms": {},
    "weight_updates": {"interval": 3, "sample_size": 16, "topk": 50},
    "hessian": {"every_n_steps": 4, "burst_length": 2},
    "weight_average": {"decay": 0.9, "interval": 2, "swa_interval": 2},
}
COMMITTING: dict[str, dict[str, Any]] = {"grad_clip": {"max_norm": 0.1}, "model_smoothing": {"update_interval": 3}}


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """Distinct token sequences in Hugging Face's format."""

    def __init__(self) -> None:
        self.rows = torch.randint(24, (16, 6), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def hugging_face(hooks: dict[str, dict[str, Any]], accumulate: int) -> Case:
    """Train a small GPT-2 by Hugging Face's Trainer, with evaluations."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
    from transformers import logging as messages

    messages.set_verbosity_error()
    torch.manual_seed(0)
    sizes = {"vocab_size": 24, "n_positions": 6, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no"}
    arguments = TrainingArguments(
        output_dir="trainer",
        use_cpu=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulate,
        num_train_epochs=2,
        learning_rate=1e-2,
        eval_strategy="epoch",
        seed=4,
        **quiet,
    )
    trainer = Trainer(model, arguments, train_dataset=Sequences(), eval_dataset=Sequences())
    return trained(trainer, lambda: trainer.train(), lambda: (model, trainer.optimizer.optimizer), hooks)


def lightning(hooks: dict[str, dict[str, Any]], accumulate: int) -> Case:
    """Train the classifier of pairs by Lightning's Trainer, with validation."""
    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = models.build_model("pairs")

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return models.mean_loss(self.classifier, batch)

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", models.mean_loss(self.classifier, batch) + torch.rand(()))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    torch.manual_seed(0)
    module, rows = Module(), TensorDataset(*models.training_data())
    quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    trainer = pl.Trainer(**quiet, accelerator="cpu", max_epochs=2, accumulate_grad_batches=accumulate)

    def fit() -> None:
        trainer.fit(module, DataLoader(rows, 3, shuffle=True), DataLoader(rows, 8))

    return trained(trainer, fit, lambda: (module, trainer.optimizers[0]), hooks)


def trained(
    trainer: Any,
    train: Callable[[], Any],
    outcome: Callable[[], tuple[nn.Module, torch.optim.Optimizer]],
    hooks: dict[str, dict[str, Any]],
) -> Case:
    """Train with hooks attached to a trainer and return the record; ``train`` looks up the wrapped method."""

    def attach_and_train() -> tuple[nn.Module, torch.optim.Optimizer]:
        options = {name: chosen for name, chosen in hooks.items() if chosen}
        product.attach(trainer, hooks=list(hooks), hook_options=options, out="attached", seed=5)
        train()
        return outcome()

    return attached_case(attach_and_train, Path("attached"))


CASES = {
    "hugging_face": (hugging_face, HANDFUL, 1),
    "hugging_face/accumulation": (hugging_face, {"norms": {}, "weight_updates": HANDFUL["weight_updates"]}, 2),
    "hugging_face/committing": (hugging_face, COMMITTING, 1),
    "lightning": (lightning, HANDFUL, 1),
    "lightning/accumulation": (lightning, {"norms": {}, "weight_updates": HANDFUL["weight_updates"]}, 2),
    "lightning/committing": (lightning, COMMITTING, 1),
}


def names() -> list[str]:
    """Return the names of all cases of this part."""
    return list(CASES)


def record(name: str) -> Case:
    """Run one case in the current folder and return its record."""
    function, hooks, accumulate = CASES[name]
    return function(hooks, accumulate)
