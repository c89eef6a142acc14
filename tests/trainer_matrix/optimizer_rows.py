"""One loop with many optimizers, of torch and of other libraries."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

from tests.trainer_matrix.row import Attach, row, rows
from tests.trainer_matrix.tiny import (
    LanguageModel,
    classification_loss,
    classifier,
    language_loss,
    loader,
    points,
    token_rows,
)

TORCH: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD with momentum": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "Adam with amsgrad": ("Adam", {"amsgrad": True}),
    "AdamW, foreach": ("AdamW", {"foreach": True}),
    "AdamW, fused": ("AdamW", {"fused": True}),
    "AdamW, one tensor at a time": ("AdamW", {"foreach": False}),
    "RAdam": ("RAdam", {}),
    "NAdam": ("NAdam", {}),
    "RMSprop": ("RMSprop", {"momentum": 0.9, "centered": True}),
    "Adagrad": ("Adagrad", {}),
    "Adafactor": ("Adafactor", {}),
    "Rprop": ("Rprop", {}),
    "ASGD": ("ASGD", {}),
}


def train(attach: Attach, optimizer_of: Callable[[nn.Module], Any]) -> None:
    """Train a language model for six steps."""
    model = LanguageModel()
    run(attach, model, optimizer_of(model), language_loss, token_rows())


def run(attach: Attach, model: nn.Module, optimizer: Any, loss_of: Any, data: Any) -> None:
    """Train a model for one epoch."""
    if hasattr(optimizer, "train"):  # schedule-free optimizers have modes
        optimizer.train()
    with attach(model, optimizer, loss=loss_of) as scope:
        for batch in scope.batches(loader(data)):
            scope.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()


@rows("Optimizer of torch", variants={name: {"name": name} for name in TORCH})
def of_torch(attach: Attach, name: str) -> None:
    kind, options = TORCH[name]
    train(attach, lambda model: getattr(torch.optim, kind)(model.parameters(), lr=1e-2, **options))


@row("Optimizer of torch", "Muon for the matrices alone")
def muon(attach: Attach) -> None:
    train(
        attach, lambda model: torch.optim.Muon([weight for weight in model.parameters() if weight.ndim == 2], lr=1e-2)
    )


def wide() -> nn.Module:
    """Create a network with a matrix of 4,096 elements, from which on torchao stores moments in few bits."""
    return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))


def of_library(module: str, kind: str, **options: Any) -> Callable[[Attach], None]:
    """Return a training with an optimizer of a library."""

    def training(attach: Attach) -> None:
        made = getattr(import_module(module), kind)
        chosen = {"lr": 1e-2} | options
        if "bit" in kind:
            model = wide()
            run(attach, model, made(model.parameters(), **chosen), classification_loss, points())
        else:
            train(attach, lambda model: made(model.parameters(), **chosen))

    return training


OTHERS = {
    "Adafactor of transformers": ("transformers", "transformers", "Adafactor", {"lr": None}),
    "SOAP": ("pytorch_optimizer", "pytorch_optimizer", "SOAP", {"precondition_frequency": 2}),
    "Shampoo": ("pytorch_optimizer", "pytorch_optimizer", "ScalableShampoo", {}),
    "Lion": ("pytorch_optimizer", "pytorch_optimizer", "Lion", {}),
    "Prodigy": ("pytorch_optimizer", "pytorch_optimizer", "Prodigy", {"lr": 1.0}),
    "LAMB": ("pytorch_optimizer", "pytorch_optimizer", "Lamb", {}),
    "schedule-free AdamW": ("schedulefree", "schedulefree", "AdamWScheduleFree", {}),
    "schedule-free SGD": ("schedulefree", "schedulefree", "SGDScheduleFree", {}),
    "8-bit AdamW of bitsandbytes": ("bitsandbytes", "bitsandbytes.optim", "AdamW8bit", {"min_8bit_size": 256}),
    "8-bit Lion of bitsandbytes": ("bitsandbytes", "bitsandbytes.optim", "Lion8bit", {"min_8bit_size": 256}),
    "8-bit AdamW of torchao": ("torchao", "torchao.optim", "AdamW8bit", {}),
    "4-bit AdamW of torchao": ("torchao", "torchao.optim", "AdamW4bit", {}),
}
for _name, (_package, _module, _kind, _options) in OTHERS.items():
    row("Optimizer", _name, _package)(of_library(_module, _kind, **_options))


@row("Optimizer", "LBFGS with a closure")
def lbfgs(attach: Attach) -> None:
    model = classifier()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    with attach(model, optimizer, loss=classification_loss, hooks=[]) as scope:
        for batch in scope.batches(loader()):

            def closure(batch: Any = batch) -> Any:
                optimizer.zero_grad()
                loss = classification_loss(model, batch)
                loss.backward()
                return loss

            optimizer.step(scope.closure(closure))


@row("Optimizer", "Muon and AdamW on one model")
def two_optimizers(attach: Attach) -> None:
    model = LanguageModel()
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "blocks" in name]
    chosen = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in chosen]
    optimizers = [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, 1e-2)]
    with attach(model, optimizers, loss=language_loss) as scope:
        for batch in scope.batches(loader(token_rows())):
            scope.backward(language_loss(model, batch))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
