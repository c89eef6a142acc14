"""Attached loops that write checkpoints, in processes that are killed at a chosen moment and started again."""

import json
import os
import random
import signal
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import loopscope
import torch
from torch import Tensor, nn

from tests.framework.checkpoints.crash_runs import PLACES, Kill, Outcome, outcome, watch
from tests.framework.runs.small_experiment import read_json
from tests.support.processes import fork_server
from tests.trainer_matrix.interventions import Idle, Restless

EPOCHS, STEPS, SAVED_EVERY = 3, 8, 5
OPTIONS: dict[str, Any] = {
    "hook_options": {
        **{"variance": {"window": 2, "every": 2}, "loss_spikes": {"window": 2}},
        **{"path_length": {"every": 1}, "weight_average": {"interval": 1, "swa_interval": 1, "evaluate_every": 1}},
    },
    **{"sinks": ("jsonl", "csv"), "display": "none", "log_every": 3},
}
HOOKS = ("norms", "training_metrics", "variance", "loss_spikes", "path_length", "weight_average")


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Create a model, its optimizer and its scheduler."""
    torch.manual_seed(0)
    random.seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7)


def batches_of(epoch: int) -> list[tuple[Tensor, Tensor]]:
    """Return the batches of an epoch in their order."""
    generator = torch.Generator().manual_seed(epoch)
    points = torch.randn(STEPS, 6, 4, generator=generator)
    return [(point, (point.sum(1) > 0).long()) for point in points]


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of a batch."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def custom_loop(folder: Path) -> None:
    """Train in a custom loop, and continue from its checkpoint if there is one."""
    model, optimizer, scheduler = model_and_optimizer()
    path, step = folder / "checkpoint.pt", 0
    stored = torch.load(path) if path.exists() else None
    given = {"hooks": [*HOOKS, Idle(), Restless()], "out": folder / "run", "overwrite": stored is None, "seed": 1}

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        return {"val_loss": loss_of(model, batches_of(99)[0]).item() + torch.rand(1).item()}

    with loopscope.attach(model, optimizer, scheduler=scheduler, loss=loss_of, **given, **OPTIONS) as scope:
        if stored is not None:
            for part in (model, optimizer, scheduler):
                part.load_state_dict(stored[type(part).__name__])
            scope.load_state_dict(stored["scope"])
            torch.set_rng_state(stored["generator"])
            step = stored["step"]
        for epoch in range(step // STEPS, EPOCHS):
            for batch in scope.batches(batches_of(epoch)[step % STEPS :]):
                scope.backward(loss_of(model, batch))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                step += 1
                if step % SAVED_EVERY == 0:
                    parts = {type(part).__name__: part.state_dict() for part in (model, optimizer, scheduler)}
                    parts |= {"scope": scope.state_dict(), "generator": torch.get_rng_state(), "step": step}
                    torch.save(parts, path.with_suffix(".new"))
                    path.with_suffix(".new").replace(path)
            scope.evaluate(evaluate)
            scope.epoch_end()
    torch.save(model.state_dict(), folder / "weights.pt")


def hugging_face(folder: Path) -> None:
    """Train with Hugging Face's Trainer, and continue from its last complete checkpoint if there is one."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model_and_optimizer()[0]

        def forward(self, points: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": nn.functional.cross_entropy(self.layers(points), labels)}

    class Complete(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            (Path(args.output_dir) / f"checkpoint-{state.global_step}" / "complete").touch()

    rows = [{"points": point, "labels": label} for batch in batches_of(0) for point, label in zip(*batch, strict=True)]
    arguments = TrainingArguments(
        str(folder), num_train_epochs=EPOCHS, per_device_train_batch_size=6, save_strategy="steps", seed=1,
        save_steps=SAVED_EVERY, use_cpu=True, report_to=[], disable_tqdm=True, logging_strategy="no",
        learning_rate=1e-2,
    )  # fmt: skip
    complete = sorted(folder.glob("checkpoint-*/complete"), key=lambda path: int(path.parent.name.split("-")[1]))
    trainer = Trainer(Classifier(), arguments, train_dataset=rows)
    given = {"hooks": [*HOOKS, Idle(), Restless()], "out": folder / "run", "overwrite": not complete}
    loopscope.attach(trainer, **given, **OPTIONS)
    trainer.add_callback(Complete())
    trainer.train(resume_from_checkpoint=str(complete[-1].parent) if complete else None)
    torch.save(trainer.model.state_dict(), folder / "weights.pt")


LOOPS: dict[str, Callable[[Path], None]] = {"custom loop": custom_loop, "Hugging Face Trainer": hugging_face}


def _child(loop: str, folder: Path, kill: Kill | None) -> None:
    os.setsid()
    warnings.simplefilter("ignore")
    with folder.with_suffix(".log").open("a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    counts: dict[str, int] = {}
    for place in PLACES:
        watch(place, counts, kill)
    LOOPS[loop](folder)
    folder.with_suffix(".counts").write_text(json.dumps(counts))


def start(loop: str, folder: Path, kill: Kill | None = None) -> Any:
    """Start a loop in a new process and process group, with its output in a file next to its folder."""
    folder.mkdir(exist_ok=True)
    process = fork_server().Process(target=_child, args=(loop, folder, kill), daemon=True)
    process.start()
    return process


def run(loop: str, folder: Path, kill: Kill | None = None) -> int:
    """Run a loop to its end and return its exit status, -9 after a kill."""
    process = start(loop, folder, kill)
    process.join(300)
    status: int | None = process.exitcode
    assert status is not None, folder.with_suffix(".log").read_text()
    return status


@dataclass(frozen=True)
class AttachedCase:
    """A loop, its outcome without a kill, and the ``counts`` of calls of each place."""

    loop: str
    expected: Outcome
    counts: dict[str, int]

    @classmethod
    def of(cls, loop: str, folder: Path) -> "AttachedCase":
        """Run the loop without a kill."""
        assert run(loop, folder) == 0, folder.with_suffix(".log").read_text()
        return cls(loop, outcome_of(folder), read_json(folder.with_suffix(".counts")))

    def killed(self, folder: Path, kills: Sequence[Kill]) -> int:
        """Run the loop, kill it at each of ``kills`` and start it again, to its end; return the number of kills."""
        for died, kill in enumerate([*kills, None]):
            status = run(self.loop, folder, kill)
            if status == 0:
                return died
            assert status == -signal.SIGKILL, folder.with_suffix(".log").read_text()
        raise AssertionError(f"{self.loop} does not end.")


def outcome_of(folder: Path) -> Outcome:
    """Return the weights and the record, without the checkpoints of the loop and the settings of its Trainer."""
    found = outcome(folder)
    for name in [name for name in found.files if name.startswith("checkpoint") or name == "training_args.bin"]:
        del found.files[name]
    return found
