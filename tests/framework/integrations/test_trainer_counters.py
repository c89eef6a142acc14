"""Counters of Trainers, which passes of hooks restore, and records of LightningModules, which validations keep."""

from typing import Any

import lightning
import loopscope
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.framework.integrations.hf_trainers import InOrder, attached, trainer

pytestmark = pytest.mark.trainer


class Counting(InOrder):
    """Counts the rows of its losses in a number, a list in a dict and a tensor, and logs them."""

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        if not hasattr(self, "rows"):
            self.rows, self.metrics, self.total = 0, {"train": []}, torch.zeros(())
        self.rows += len(inputs["input_ids"])
        self.metrics["train"].append(self.rows)
        self.total += 1
        return super().compute_loss(model, inputs, *arguments, **options)

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        counts = {"rows": self.rows, "losses": len(self.metrics["train"]), "total": self.total.item()}
        super().log(logs | counts, *arguments, **options)


@pytest.mark.slow
def test_logs_of_trainers_count_no_passes_of_hooks(tmp_path: Any) -> None:
    def logs(hooks: Any) -> list[Any]:
        made = trainer(tmp_path / str(hooks), kind=Counting, logging_steps=1, num_train_epochs=1)
        if hooks:
            attached(made, hooks)
        made.train()
        return [[row.get(name) for name in ("rows", "losses", "total", "loss")] for row in made.state.log_history]

    assert logs(["hessian"]) == logs(None)


class Growing(lightning.LightningModule):
    """Has a buffer of positions that grows with the longest batch, and keeps the scores of its validations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scores, self.best, self.longest = nn.Linear(4, 2), list[float](), 1e9, 8
        self.register_buffer("positions", torch.linspace(0, 1, 8)[:, None], persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        self.longest = max(self.longest, len(inputs))
        if self.longest > len(self.positions):
            self.positions = torch.linspace(0, 1, self.longest)[:, None]
        return self.layer(inputs + self.positions[: len(inputs)])

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self(batch).square().mean()

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.scores.append(self(batch).square().mean().item())
        self.best = min(self.best, self.scores[-1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder: Any, *, validates: bool) -> Growing:
    lightning.seed_everything(0, verbose=False)
    module, data = Growing(), [torch.randn(8, 4) for _ in range(4)]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    made = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        enable_model_summary=False,
        num_sanity_val_steps=0,
        inference_mode=False,
        **quiet,
    )
    if validates:
        loopscope.attach(made, hooks=["norms"], out=folder, display="none")
    made.fit(module, DataLoader(data, None), DataLoader([torch.ones(32, 4)], None) if validates else None)
    return module


@pytest.mark.filterwarnings("ignore")
def test_validations_restore_caches_and_keep_records(tmp_path: Any) -> None:
    """The training is that without validations; scores stay on the module, what ``forward`` changes does not."""
    validated, plain = fit(tmp_path / "run", validates=True), fit(None, validates=False)
    assert validated.layer.weight.tolist() == plain.layer.weight.tolist()
    assert (len(validated.positions), validated.longest) == (8, 8)
    assert len(validated.scores) == 2
    assert validated.best == min(validated.scores)
