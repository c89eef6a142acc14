"""Custom loops of PyTorch, and of the libraries that leave the loop to the script."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tests.trainer_matrix.row import VARIANTS, Attach, row, rows
from tests.trainer_matrix.tiny import (
    LanguageModel,
    classification_loss,
    classifier,
    language_loss,
    loader,
    points,
    token_rows,
)


def validated(model: nn.Module) -> Any:
    """Return a function that evaluates a model with a loader, which draws random numbers."""

    @torch.no_grad()
    def validate() -> dict[str, float]:
        model.eval()
        total = sum(classification_loss(model, batch).item() for batch in loader(points(seed=5)))
        model.train()
        return {"val_loss": total}

    return validate


LOOP_VARIANTS = VARIANTS | {"bfloat16": {"amp": torch.bfloat16}, "float16 with a scaler": {"amp": torch.float16}}


@rows("PyTorch, loop of epochs", variants=LOOP_VARIANTS)
def epochs(attach: Attach, accumulate: int = 1, clip: float = 0.0, evaluates: bool = False, amp: Any = None) -> None:
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14) if amp is torch.float16 else None

    def loss_of(model: nn.Module, batch: Any) -> Any:
        with torch.autocast("cpu", amp) if amp else nullcontext():
            return classification_loss(model, batch) / accumulate

    options = {"accumulate": accumulate, "scheduler": scheduler, "scaler": scaler, "loss": loss_of}
    data = loader()
    with attach(model, optimizer, loader=None if attach.is_bare else loader(), **options) as scope:
        for _ in range(2):
            for index, batch in enumerate(scope.batches(data), start=1):
                scope.backward(loss_of(model, batch))
                if index % accumulate:
                    continue
                if clip:
                    if scaler is not None:
                        scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                    scaler.update()
                scheduler.step()
                optimizer.zero_grad()
            if evaluates and not attach.is_bare:
                scope.evaluate(validated(model))
            scope.epoch_end()


@row("PyTorch, loop of epochs", "only attached, no further changes")
def only_attached(attach: Attach) -> None:
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with attach(model, optimizer, hooks=[]):  # such a loop cannot have interventions
        for batch in loader():
            optimizer.zero_grad()
            classification_loss(model, batch).backward()
            optimizer.step()


@row("PyTorch, loop of epochs", "evaluation, not isolated")
def not_isolated(attach: Attach) -> None:
    """Both trainings evaluate, and the evaluation moves the random numbers of both."""
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with attach(model, optimizer, loss=classification_loss, isolate_evaluation=False) as scope:
        for _ in range(2):
            for batch in scope.batches(loader()):
                scope.backward(classification_loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            scope.evaluate(validated(model))


@rows("PyTorch, loop of steps as in nanoGPT")
def nanogpt(attach: Attach, accumulate: int = 1, clip: float = 0.0, evaluates: bool = False) -> None:
    rows = token_rows()
    model = LanguageModel()
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    vectors = [weight for weight in model.parameters() if weight.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, 1e-2, betas=(0.9, 0.95), fused=True)

    def get_batch() -> Any:
        return rows[torch.randint(len(rows), (4,))]

    def loss_of(model: nn.Module, batch: Any) -> Any:
        return language_loss(model, batch) / accumulate

    def estimate_loss() -> dict[str, float]:
        return {"val_loss": sum(language_loss(model, get_batch()).item() for _ in range(3)) / 3}

    with attach(model, optimizer, loop="step", length=8, accumulate=accumulate, loss=loss_of) as scope:
        batches = scope.batches(iter(get_batch, None))
        for step in range(8):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * (1 - step / 10)
            if evaluates and not attach.is_bare and step % 3 == 0:
                scope.evaluate(estimate_loss)
            for _ in range(accumulate):
                scope.backward(loss_of(model, next(batches)))
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


@rows("Accelerate", "accelerate", variants=VARIANTS | {"bfloat16": {"precision": "bf16"}})
def accelerate(
    attach: Attach, accumulate: int = 1, clip: float = 0.0, evaluates: bool = False, precision: str = "no"
) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, mixed_precision=precision)
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    prepared, optimizer, data, scheduler = accelerator.prepare(model, optimizer, loader(), scheduler)
    options = {"accelerator": accelerator, "scheduler": scheduler, "loss": classification_loss}
    with attach(prepared, optimizer, **options) as scope:
        for _ in range(2):
            for batch in scope.batches(data):
                with accelerator.accumulate(prepared):
                    scope.backward(classification_loss(prepared, batch))
                    if clip and accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(prepared.parameters(), clip)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            if evaluates and not attach.is_bare:
                scope.evaluate(validated(prepared))


@rows("Lightning Fabric", "lightning")
def fabric(attach: Attach, accumulate: int = 1, clip: float = 0.0, evaluates: bool = False) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model = classifier()
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-2)
    prepared, prepared_optimizer = fabric.setup(model, optimizer)
    data = fabric.setup_dataloaders(loader())

    def loss_of(model: nn.Module, batch: Any) -> Any:
        return classification_loss(model, batch) / accumulate

    with attach(model, optimizer, accumulate=accumulate, loss=loss_of) as scope:
        for _ in range(2):
            for index, batch in enumerate(scope.batches(data), start=1):
                with fabric.no_backward_sync(prepared, enabled=bool(index % accumulate)):
                    loss = loss_of(prepared, batch)
                    if attach.is_bare:
                        fabric.backward(loss)
                    else:
                        scope.backward(loss)
                if index % accumulate:
                    continue
                if clip:
                    fabric.clip_gradients(prepared, prepared_optimizer, max_norm=clip)
                prepared_optimizer.step()
                prepared_optimizer.zero_grad()
            if evaluates and not attach.is_bare:
                scope.evaluate(validated(prepared))


@row("Lightning Fabric", "bfloat16", "lightning")
def fabric_in_bfloat16(attach: Attach) -> None:
    """Fabric requires fabric.backward for a precision, so the scope is called after it."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    model = classifier()
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-2)
    prepared, prepared_optimizer = fabric.setup(model, optimizer)
    with attach(model, optimizer) as scope:
        for batch in scope.batches(fabric.setup_dataloaders(loader())):
            loss = classification_loss(prepared, batch)
            fabric.backward(loss)
            scope.gradients_ready(loss.detach())
            prepared_optimizer.step()
            prepared_optimizer.zero_grad()


@row("Control", "hooks that clip the gradients", control=True)
def clipped_by_hook(attach: Attach) -> None:
    """A hook that is meant to change the training does so, and the comparison finds it."""
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    options = {"hooks": ["grad_clip"], "hook_options": {"grad_clip": {"max_norm": 0.01}}, "with_hooks": None}
    with attach(model, optimizer, **options) as scope:
        for batch in scope.batches(loader()):
            scope.backward(classification_loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()


@row("Control", "evaluation that draws random numbers", control=True)
def drawing_evaluation(attach: Attach) -> None:
    """A training that evaluates outside of scope.evaluate differs from one that does not evaluate."""
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with attach(model, optimizer) as scope:
        for batch in scope.batches(loader()):
            scope.backward(classification_loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            if not attach.is_bare:
                validated(model)()


@row("Lightning Fabric", "model and optimizer as returned by setup", "lightning")
def wrapped_by_fabric(attach: Attach) -> None:
    """The wrappers are given to attach, in place of the original objects."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model = classifier()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 1e-2))
    with attach(model, optimizer, loss=classification_loss) as scope:
        for batch in scope.batches(fabric.setup_dataloaders(loader())):
            scope.backward(classification_loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()


class Stream(IterableDataset[Any]):
    """Points without a length."""

    def __iter__(self) -> Iterator[Any]:
        """Yield the points in their order."""
        return iter([points()[index] for index in range(24)])


@rows("PyTorch, loop of epochs", variants={"data from two workers": {"workers": 2}, "streamed data": {"stream": True}})
def other_data(attach: Attach, workers: int = 0, stream: bool = False) -> None:
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    data: Any = DataLoader(Stream() if stream else points(), 4, shuffle=not stream, num_workers=workers)
    with attach(model, optimizer, loss=classification_loss) as scope:
        for _ in range(2):
            for batch in scope.batches(data):
                scope.backward(classification_loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()


@row("PyTorch, loop of epochs", "streamed data given as loader=")
def streamed_loader(attach: Attach) -> None:
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with attach(model, optimizer, loss=classification_loss, loader=DataLoader(Stream(), 4)) as scope:
        for batch in scope.batches(DataLoader(Stream(), 4)):
            scope.backward(classification_loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()


@row("PyTorch, loop of epochs", "persistent workers")
def persistent_workers(attach: Attach) -> None:
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    data = DataLoader(points(), 4, shuffle=True, num_workers=1, persistent_workers=True)
    with attach(model, optimizer, loss=classification_loss) as scope:
        for _ in range(2):
            for batch in scope.batches(data):
                scope.backward(classification_loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()


@row("PyTorch, loop of epochs", "batches that the loop drops")
def dropped_batches(attach: Attach) -> None:
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with attach(model, optimizer, loss=classification_loss) as scope:
        for _ in range(2):
            for batch in scope.batches(loader()):
                if batch[1].sum() < 4:
                    continue
                scope.backward(classification_loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()


@row("PyTorch, loop of epochs", "accumulation that changes")
def changing_accumulation(attach: Attach) -> None:
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with attach(model, optimizer, accumulate=3) as scope:
        for count in (1, 3):
            for index, batch in enumerate(scope.batches(loader()), start=1):
                is_last = index % count == 0
                scope.backward(classification_loss(model, batch) / count, last=is_last)
                if is_last:
                    optimizer.step()
                    optimizer.zero_grad()


@row("PyTorch, loop of epochs", "backward pass with create_graph")
def differentiable_backward(attach: Attach) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with attach(model, optimizer, hooks=[]) as scope:
        for batch in scope.batches(loader()):
            scope.backward(classification_loss(model, batch), create_graph=True)
            for weight in model.parameters():
                weight.grad = weight.grad.detach()
            optimizer.step()
            optimizer.zero_grad()
