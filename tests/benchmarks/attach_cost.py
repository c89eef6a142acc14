"""Costs of hooks attached to a bare custom loop, HF's Trainer and Lightning's Trainer."""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import lightning
import loopscope
import torch
from lightning.pytorch.utilities import grad_norm
from loopscope.loops import epoch_loop
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from tests.benchmarks.rows import MICROSECONDS, TIMES, Effort, Row
from tests.benchmarks.subjects import small_mlp
from tests.benchmarks.timing import Turns, clock, difference, ratio

OBSERVERS = ["training_metrics", "training_diagnostics", "weight_updates"]
"""Loss, the norms of all gradients of every step, and the updates of every parameter every hundred steps."""
WIDTH, ROWS, CLASSES = 512, 512, 10
FIRST_STEPS, STEPS = 8, 24
OURS, THEIRS = "three observers", "its own callback that logs gradient norms"
Train = Callable[[str, Path, int], float]


def bare_attach(effort: Effort) -> Iterator[Row]:
    """Compare a step of a custom loop with only ``attach`` with a step of loopscope's loop."""
    ours, other = small_mlp(), small_mlp()
    manager, task = ours.manager(), other.task

    def own_epoch() -> None:
        ours.task.length = ours.state.loop.epoch + 1
        epoch_loop(ours.task, manager)

    with TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        with loopscope.attach(task.model, task.optimizer, hooks=[], out=path, sinks=[], display="none") as scope:

            def attached_epoch() -> None:
                for batch in scope.batches(task.loader):
                    task.optimizer.zero_grad()
                    scope.backward(task.compute_loss(task.model, batch))
                    task.optimizer.step()

            turns = Turns((attached_epoch, own_epoch))
            turns.round()
            turns.forget()
            for _ in range(effort.times(200)):
                turns.round()
    attached, custom_seconds = ([seconds / len(task.loader) for seconds in each] for each in turns.seconds)
    against = f"loopscope's loop, {median(custom_seconds) * 1e3:.2f} ms"
    figure = "Step of an attached loop without hooks, small MLP"
    yield Row(figure, against, MICROSECONDS, difference(attached, custom_seconds), 15e-6)


class Classifier(nn.Module):
    """A model whose step takes about 20 ms; it returns its loss, as a Trainer requires."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3)]
        self.layers = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": functional.cross_entropy(self.layers(inputs), labels)}


def data(steps: int) -> TensorDataset:
    """Draw rows for a number of steps."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS * steps, WIDTH, generator=generator)
    return TensorDataset(inputs, torch.randint(CLASSES, (len(inputs),), generator=generator))


def collated(rows: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Build a batch in the form that a Trainer accepts."""
    inputs, labels = map(torch.stack, zip(*rows, strict=True))
    return {"inputs": inputs, "labels": labels}


class Clocked(TrainerCallback):
    """A callback that records the time after every step, and optionally logs the norm of every gradient."""

    def __init__(self, *, norms: bool) -> None:
        self.times: list[float] = []
        self._norms = norms

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self._norms:
            found = {name: each.grad.norm() for name, each in model.named_parameters()}
            self.logged = {name: float(norm) for name, norm in found.items()}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.times.append(clock())


def hugging_face(kind: str, folder: Path, steps: int) -> float:
    """Train with HF's Trainer; return the seconds of a step."""
    torch.manual_seed(0)
    clocked = Clocked(norms=kind == THEIRS)
    args = TrainingArguments(
        str(folder), num_train_epochs=1, per_device_train_batch_size=ROWS, report_to=[], use_cpu=True,
        disable_tqdm=True, logging_strategy="no", save_strategy="no", max_grad_norm=0,
    )  # fmt: skip
    trainer = Trainer(Classifier(), args, train_dataset=data(steps), data_collator=collated, callbacks=[clocked])
    trainer.remove_callback(PrinterCallback)
    if kind == OURS:
        loopscope.attach(trainer, hooks=OBSERVERS, display="none")
    trainer.train()
    return per_step(clocked.times)


class Module(lightning.LightningModule):
    """The same callback for Lightning."""

    def __init__(self, *, norms: bool) -> None:
        super().__init__()
        self.model, self.norms = Classifier(), norms
        self.times: list[float] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.model(*batch)["loss"]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.norms:
            self.log_dict(grad_norm(self, norm_type=2))

    def on_train_batch_end(self, *_: Any) -> None:
        self.times.append(clock())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def with_lightning(kind: str, folder: Path, steps: int) -> float:
    """Train with Lightning's Trainer; return the seconds of a step."""
    torch.manual_seed(0)
    module = Module(norms=kind == THEIRS)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=folder, **quiet)
    if kind == OURS:
        loopscope.attach(trainer, hooks=OBSERVERS, display="none")
    trainer.fit(module, DataLoader(data(steps), batch_size=ROWS))
    return per_step(module.times)


def per_step(times: Sequence[float]) -> float:
    """Return the median seconds between two steps, without the first steps, which include the start-up."""
    return median(after - before for before, after in pairwise(times[FIRST_STEPS // 2 :]))


TRAINERS: Mapping[str, Train] = {"HF Trainer": hugging_face, "Lightning": with_lightning}


def trainers(effort: Effort) -> Iterator[Row]:
    """Compare both trainers with three observers, and with their own callback, with the trainers alone."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for name, train in TRAINERS.items():
        seconds: dict[str, list[float]] = {"alone": [], OURS: [], THEIRS: []}
        for turn in range(effort.times(12)):
            for kind in seconds if turn % 2 else reversed(seconds):
                with TemporaryDirectory() as folder, warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    seconds[kind].append(train(kind, Path(folder), FIRST_STEPS + effort.times(STEPS)))
        alone_seconds = seconds["alone"]
        against = f"{name} alone, {median(alone_seconds) * 1e3:.1f} ms"
        yield Row(f"{name} with {OURS}", against, TIMES, ratio(seconds[OURS], alone_seconds), 1.05)
        yield Row(f"{name} with {THEIRS}", against, TIMES, ratio(seconds[THEIRS], alone_seconds))
