"""Runs with unusual models, optimizers, schedulers and batches, each with state that affects the following steps."""

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from loopscope.engine import HookManager
from loopscope.experiments.mod_arithmetic.model import SelfAttention
from loopscope.hooks import TrainingHook
from loopscope.lowbit import MetisOptions, Recipe, quantize_model
from loopscope.state import TrainingState
from loopscope.training import TrainingTask
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from tests.support.models import BATCH, TOKENS, data_for
from tests.support.odd_batches import Views, parts
from tests.support.odd_objects import Average, Preconditioner, Record, Schedule, Slotted, Warmup, Wrapped
from tests.support.runs import Case, Run, train

STEPS = 4
"""Number of steps in the step loop; the epoch loop takes two epochs of three steps."""


@dataclass(frozen=True)
class Place:
    """A place for a model's state: ``make`` creates it; ``move`` updates it in training and returns an offset."""

    make: Callable[[], Any]
    move: Callable[[Any, Tensor], Any]
    in_closure: bool = False

    def put(self, model: "OddTransformer") -> None:
        kept = self.make()
        if self.in_closure:
            model.register_forward_hook(drifting(kept, self.move))
        else:
            model.kept, model.move = kept, self.move


class OddTransformer(nn.Module):
    """A transformer with tied embeddings whose outputs depend on all its earlier forward passes in train mode."""

    kept: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 4)
        self.blocks = nn.ModuleList(SelfAttention(4, 2) for _ in range(2))
        self.dropout = nn.Dropout(0.2)
        self.decoder = nn.Linear(4, TOKENS, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, pairs: Tensor) -> Tensor:
        hidden = self.embedding(pairs)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits = self.decoder(self.dropout(hidden).mean(dim=1))
        return drifted(logits, self.kept, self.move) if self.training and self.kept is not None else logits


def drifted(logits: Tensor, kept: Any, move: Callable[[Any, Tensor], Any]) -> Tensor:
    with torch.no_grad():
        drift = torch.as_tensor(move(kept, logits.detach()), dtype=logits.dtype)
    return logits * (1.5 + drift.tanh())


def drifting(kept: Any, move: Callable[[Any, Tensor], Any]) -> Callable[..., Tensor | None]:
    """Make a forward hook that keeps a number and an object in its closure."""
    calls = 0

    def hook(module: nn.Module, inputs: Any, logits: Tensor) -> Tensor | None:
        nonlocal calls
        if not module.training:
            return None
        calls += 1
        return drifted(logits * (1 + 0.1 * calls), kept, move)

    return hook


def tensor(kept: Tensor, logits: Tensor) -> Tensor:
    kept.data.mul_(0.9).add_(logits.mean(0) + 0.1)  # does not increase the version
    return kept


def listed(kept: list[Tensor], logits: Tensor) -> Tensor:
    kept[0] = kept[0] * 0.9 + logits.mean(0) + 0.1
    return kept[0]


def named(kept: dict[str, Any], logits: Tensor) -> Tensor:
    kept["calls"] += 1
    return listed(kept["means"], logits) / kept["calls"]


def queued(kept: deque[Tensor], logits: Tensor) -> Tensor:
    kept.append(kept[-1] * 0.9 + logits.mean(0) + 0.1)
    return kept[0] + kept[-1]


def normed(kept: list[nn.BatchNorm1d], logits: Tensor) -> Tensor:
    if len(logits) > 1:
        kept[0](logits + 1)
    return kept[0].running_mean * 3


def recorded(kept: Record, logits: Tensor) -> Tensor:
    kept.total += 0.1
    kept.seen[0][:] = 0.9 * kept.seen[0] + logits.mean(0).numpy()
    return torch.from_numpy(kept.seen[0]) + kept.total


def drawn(kept: Sequence[Any], logits: Tensor) -> float:
    return kept[0].normal() + kept[1].gauss(0, 1)


def slotted(kept: Slotted, logits: Tensor) -> Tensor:
    kept.count += 1
    kept.mean.mul_(0.9).add_(logits.mean())
    return kept.mean[0] + 0.1 * kept.count


PLACES = {
    "tensor": Place(lambda: torch.zeros(TOKENS), tensor),
    "list": Place(lambda: [torch.zeros(TOKENS)], listed),
    "dict": Place(lambda: {"calls": 0, "means": [torch.zeros(TOKENS)]}, named),
    "deque": Place(lambda: deque([torch.zeros(TOKENS)], 2), queued),
    "module in a list": Place(lambda: [nn.BatchNorm1d(TOKENS)], normed),
    "dataclass": Place(lambda: Record(seen=[np.zeros(TOKENS, np.float32)]), recorded),
    "generators": Place(lambda: (np.random.default_rng(1), random.Random(2)), drawn),
    "slots in a closure": Place(Slotted, slotted, in_closure=True),
}


class Preconditioned(torch.optim.SGD):
    """Gradient descent with an object for each parameter."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    preconditioner = self.state[parameter].setdefault("preconditioner", Preconditioner())
                    parameter.sub_(group["lr"] * preconditioner(parameter.grad))


class Pulling(Average):
    """An average of the parameters that pulls them towards it after every step."""

    def update(self, *_: Any) -> None:
        super().update()
        with torch.no_grad():
            for average, parameter in zip(self.shadow, self.model.parameters(), strict=True):
                parameter.lerp_(average, 0.1 / self.updates)


def drawn_to_average(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    optimizer.register_step_post_hook(Pulling(model).update)
    return optimizer


@dataclass(frozen=True)
class Update:
    """An optimizer and its scheduler."""

    optimizer: Callable[[nn.Module], Any]
    scheduler: Callable[[Any], Any] = lambda optimizer: None


UPDATES = {
    "two optimizers": Update(Wrapped),
    "preconditioner": Update(lambda model: Preconditioned(model.parameters(), 0.1)),
    "closure": Update(lambda model: torch.optim.LBFGS(model.parameters(), 0.2, max_iter=3, history_size=3)),
    "timm": Update(lambda model: torch.optim.AdamW(model.parameters(), 0.01), Warmup),
    "lambda": Update(
        lambda model: torch.optim.AdamW(model.parameters(), 0.01, fused=True),
        lambda optimizer: LambdaLR(optimizer, Schedule().factor),
    ),
    "average and plateau": Update(
        drawn_to_average, lambda optimizer: ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.5)
    ),
}
BATCHES = ("tuple", "UserDict", "dataclass", "nested arrays")


@dataclass(frozen=True)
class Odd:
    """One row of the matrix of odd runs: place, update, kind of batch, and loop."""

    place: str
    update: str
    batch: str
    loop: str = "epoch"
    low_bit: bool = False
    """Whether the layers cast their operands, as hooks for low-bit layers require."""

    def __str__(self) -> str:
        return "-".join((self.place, self.update, self.batch, self.loop))

    def introduce(self, task: TrainingTask, state: TrainingState) -> None:
        model = OddTransformer()
        if self.low_bit:
            quantize_model(model, Recipe("exact", metis=MetisOptions(rank=0.5, forward_warmup_steps=1, merge_steps=2)))
        PLACES[self.place].put(model)
        task.model = state.model = model
        task.optimizer = state.optimizer = UPDATES[self.update].optimizer(model)
        task.scheduler = state.scheduler = UPDATES[self.update].scheduler(task.optimizer)


def odd_loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = parts(batch)
    return functional.cross_entropy(model(inputs), targets)


def train_oddly(
    odd: Odd,
    hooks: Sequence[TrainingHook] = (),
    *,
    manager_class: type[HookManager] = HookManager,
    reference_weights: Mapping[str, Tensor] | None = None,
    compute_loss: Callable[[nn.Module, Any], Tensor] = odd_loss,
    **options: Any,
) -> Run:
    """Run the loop of a row with hooks; a refusal propagates."""
    return train(
        Case("tied", "sgd_momentum", odd.loop),
        hooks,
        steps=STEPS,
        audit=False,
        every_step=False,
        manager_class=manager_class,
        reference_weights=reference_weights,
        introduce=odd.introduce,
        loader=Views(odd.batch, kept=True, data=data_for("tied"), size=BATCH),
        compute_loss=compute_loss,
        scheduler_interval="step",
        scheduler_metric="val_acc",
        snapshot_every=1,
        **options,
    )
