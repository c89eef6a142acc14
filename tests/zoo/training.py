"""The ordinary training loop of the cases: whole epochs, validation at their end, and a scheduler."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.zoo.data import clusters, curve, images, loader, text, waves
from tests.zoo.models import ConvNet, Gpt, LstmClassifier, class_loss, letter_loss, mlp, square_loss
from tests.zoo.recorder import Recorder

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass
class Training:
    """A training of a custom loop; cases change its parts, or write a loop instead.

    Args:
        model: the trained model.
        optimizer: its optimizer.
        batches: the batches of an epoch.
        loss: the loss of a batch.
        validation: batches that are evaluated after every epoch; without them there is no validation.
        epochs: passes over the batches.
        scheduler: a learning-rate scheduler.
        scheduler_every: whether the scheduler steps after every epoch or every step.
        clip: the largest norm of the gradient.
        accumulate: the number of batches of a step; the loss is divided by it.
        options: further options of ``loopscope.attach``.
        measure: returns further numbers of an evaluation.
    """

    model: nn.Module
    optimizer: Optimizer
    batches: Iterable[Any]
    loss: Loss = class_loss
    validation: Iterable[Any] | None = None
    epochs: int = 5
    scheduler: Any = None
    scheduler_every: Literal["epoch", "step"] = "epoch"
    clip: float | None = None
    accumulate: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    measure: Callable[[], dict[str, float]] = dict

    def run(self, recorder: Recorder) -> None:
        """Train with the hooks of a recorder."""
        options = {"accumulate": self.accumulate, **self.options}
        with recorder.attach(self.model, self.optimizer, **options) as scope:
            for _ in range(self.epochs):
                self._epoch(scope)
                if self.scheduler is not None and self.scheduler_every == "epoch":
                    self.scheduler.step()
                if self.validation is not None:
                    scope.evaluate(self.validate)

    def _epoch(self, scope: Any) -> None:
        for number, batch in enumerate(scope.batches(self.batches), start=1):
            scope.backward(self.loss(self.model, batch) / self.accumulate)
            if number % self.accumulate:
                continue
            if self.clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.scheduler is not None and self.scheduler_every == "step":
                self.scheduler.step()

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Return the mean loss of the validation batches."""
        assert self.validation is not None
        losses = [self.loss(self.model, batch).item() for batch in self.validation]
        return {"val_loss": sum(losses) / len(losses)} | self.measure()


def adam(model: nn.Module, lr: float = 1e-3) -> Optimizer:
    """Return Adam for all parameters of a model."""
    return torch.optim.Adam(model.parameters(), lr)


def adamw(model: nn.Module, lr: float = 1e-3, decay: float = 0.01) -> Optimizer:
    """Return AdamW for all parameters of a model."""
    return torch.optim.AdamW(model.parameters(), lr, weight_decay=decay)


def sgd(model: nn.Module, lr: float = 0.05, momentum: float = 0.9) -> Optimizer:
    """Return SGD with momentum for all parameters of a model."""
    return torch.optim.SGD(model.parameters(), lr, momentum=momentum)


def mlp_training(
    optimizer: Callable[[nn.Module], Optimizer] = adam, model: nn.Module | None = None, **parts: Any
) -> Training:
    """Return 200 steps of a perceptron on clusters, healthy if no part is changed."""
    model = mlp() if model is None else model
    standard = {"batches": loader(clusters(1280, 1)), "validation": [*loader(clusters(256, 3), 256)], "epochs": 5}
    return Training(model, optimizer(model), **(standard | parts))


def regression_training(
    optimizer: Callable[[nn.Module], Optimizer] = adam, model: nn.Module | None = None, **parts: Any
) -> Training:
    """Return 200 steps of a perceptron on a regression, healthy if no part is changed."""
    model = mlp(out=1) if model is None else model
    standard = {"batches": loader(curve(1280, 1)), "validation": [*loader(curve(256, 3), 256)], "epochs": 5}
    return Training(model, optimizer(model), **({"loss": square_loss} | standard | parts))


def cnn_training(
    optimizer: Callable[[nn.Module], Optimizer] = adam, model: nn.Module | None = None, **parts: Any
) -> Training:
    """Return 160 steps of a convolutional network on gratings, healthy if no part is changed."""
    model = ConvNet() if model is None else model
    standard = {"batches": loader(images(1280, 1)), "validation": [*loader(images(256, 4), 128)], "epochs": 4}
    return Training(model, optimizer(model), **(standard | parts))


def gpt_training(
    optimizer: Callable[[nn.Module], Optimizer] = adamw, model: nn.Module | None = None, **parts: Any
) -> Training:
    """Return 200 steps of a GPT on sums, with clipping, healthy if no part is changed."""
    model = Gpt() if model is None else model
    standard = {"batches": loader(text(1600), 16), "validation": [*loader(text(64, "val"), 64)], "epochs": 2}
    return Training(model, optimizer(model), **({"loss": letter_loss, "clip": 1.0} | standard | parts))


def lstm_training(
    optimizer: Callable[[nn.Module], Optimizer] = adam, model: nn.Module | None = None, **parts: Any
) -> Training:
    """Return 200 steps of an LSTM on waves, with clipping, healthy if no part is changed."""
    model = LstmClassifier() if model is None else model
    standard = {"batches": loader(waves(1280, 1)), "validation": [*loader(waves(256, 4), 256)], "epochs": 5}
    return Training(model, optimizer(model), **({"clip": 1.0} | standard | parts))
