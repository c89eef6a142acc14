"""An experiment with a planted cause at one step, and explanations of its runs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from loopscope.data import Batch, Loader, TensorLoader, random_order
from loopscope.laboratory.questions import Explanation, explain
from loopscope.runs import ExperimentConfig, ExperimentRunner, RunOptions, Session, StepRange
from loopscope.sinks import JSONLSink
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

Plant = Literal["none", "corrupted_row", "repeated_row", "rate", "second_moment", "overflow", "bit", "overwritten"]
PLANTS = get_args(Plant)
CAUSES: Mapping[str, str | None] = {
    "none": None,
    "corrupted_row": "data",
    "repeated_row": "data",
    "rate": "step size",
    "second_moment": "optimizer state",
    "overflow": "precision",
    "bit": "fault",
    "overwritten": None,
}
ROWS, INPUTS, HIDDEN, CLASSES = 2048, 12, 32, 5
LAYER, FLIPPED, OVERWRITTEN = "2", "4.weight", "3.weight"
COPIES = 50


@dataclass(frozen=True, kw_only=True)
class PlantedConfig(ExperimentConfig):
    """Options of planted.

    Args:
        steps: number of training steps.
        plant: the event at ``plant_step``.
        plant_step: step of the event, counted from 1.
        dropout: dropout probability.
        layer_norm: whether a layer limits the size of hidden values, and so the loss of a corrupted row.
    """

    steps: int = 300
    batch_size: int = 64
    plant: Plant = "none"
    plant_step: int = 200
    dropout: float = 0.0
    layer_norm: bool = True
    eval_every: int = 100
    snapshot_every: int = 50


class PlantedLoader(TensorLoader):
    """Loader with a bad batch, which has a corrupted row or many copies of one row."""

    def __init__(self, config: PlantedConfig, data: tuple[Tensor, Tensor]) -> None:
        super().__init__(data, config.batch_size, random_order(ROWS, config.seed))
        self._config = config

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        config = self._config
        for number, (x, y) in enumerate(super().batches(epoch, start), epoch * len(self) + start + 1):
            if number == config.plant_step and config.plant == "corrupted_row":
                x, y = x.clone(), y.clone()
                x[7] *= 40
                y[7] = (y[7] + 1) % CLASSES
            if number == config.plant_step and config.plant == "repeated_row":
                x, y = x.clone(), y.clone()
                x[1:COPIES], y[1:COPIES] = x[0], y[0]
            yield x, y

    def row_indices(self, epoch: int, start: int = 0) -> Iterator[Tensor]:
        for number, index in enumerate(
            TensorLoader.row_indices(self._plain(), epoch, start), epoch * len(self) + start + 1
        ):
            if number == self._config.plant_step and self._config.plant == "repeated_row":
                index = index.clone()
                index[1:COPIES] = index[0]
            yield index

    def _plain(self) -> TensorLoader:
        return TensorLoader(self._tensors, self._batch_size, self._order)


class PlantedAdamW(AdamW):
    """AdamW that resets its second moments, flips a bit of a weight, or overwrites a layer, in one step."""

    config: PlantedConfig

    def step(self, closure: Any = None) -> Any:
        parameters = self.param_groups[0]["params"]
        count = next(iter(self.state.values()))["step"].item() + 1 if self.state else 1
        if self.config.plant == "second_moment" and count == self.config.plant_step:
            for parameter in parameters:
                self.state[parameter]["exp_avg_sq"].zero_()
        result = super().step(closure)
        if self.config.plant == "bit" and count == self.config.plant_step:
            place = self.config.seed * 37 % parameters[4].numel()
            bits = parameters[4].data.view(torch.int32).flatten()
            bits[place] ^= 1 << (30 if self.config.seed % 2 else 29)
        if self.config.plant == "overwritten" and count == self.config.plant_step:
            parameters[2].data.normal_(generator=torch.Generator().manual_seed(self.config.seed))
        return result


class Overflowing(nn.Module):
    """Identity in bfloat16 with an overflow at one step."""

    def __init__(self, config: PlantedConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.config.plant != "overflow":
            return x
        if self.training and torch.is_grad_enabled():
            self.count += 1
        large = 1e38 if int(self.count) == self.config.plant_step - (not torch.is_grad_enabled()) else 1.0
        return (x.to(torch.bfloat16) * large * (16 if large > 1 else 1)).float() / (large * (16 if large > 1 else 1))


class Planted(ExperimentRunner[PlantedConfig]):
    """Classification with labels of a random network."""

    name = "planted"
    config_class = PlantedConfig
    strategies = ("plain",)
    loop = "step"

    @property
    def length(self) -> int:
        return self.config.steps

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(INPUTS, HIDDEN),
            nn.ReLU(),
            Overflowing(self.config),
            nn.Linear(HIDDEN, HIDDEN),
            nn.LayerNorm(HIDDEN) if self.config.layer_norm else nn.Identity(),
            nn.ReLU(),
            nn.Dropout(self.config.dropout),
            nn.Linear(HIDDEN, CLASSES),
        )

    def data(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.config.seed)
        x = torch.randn(ROWS, INPUTS, generator=generator)
        hidden = torch.relu(x @ torch.randn(INPUTS, 24, generator=generator))
        return x, (hidden @ torch.randn(24, CLASSES, generator=generator)).argmax(1)

    def build_loader(self, strategy: str) -> Loader:
        return PlantedLoader(self.config, self.data())

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        optimizer = PlantedAdamW(model.parameters(), lr=3e-3)
        optimizer.config = self.config
        return optimizer

    def build_scheduler(self, optimizer: Optimizer) -> LambdaLR:
        spiked = self.config.plant_step - 1 if self.config.plant == "rate" else -1
        return LambdaLR(optimizer, lambda step: 100.0 if step == spiked else 1.0)

    def compute_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {}

    def describe_row(self, index: int) -> str:
        return f"the row {index}"


def session(folder: Path, hooks: Mapping[str, Mapping[str, Any]] | None = None, **options: Any) -> Session:
    run = RunOptions(hooks=[*(hooks or {})], hook_options=dict(hooks or {}))
    return Session(Planted(PlantedConfig(output_dir=folder, **options)), run, lambda: [JSONLSink()])


def explanation_of(folder: Path, step: int, **options: Any) -> Explanation:
    """Train a run, then explain a step of it."""
    session(folder, **options).run()

    def train_again(stretch: StepRange, hook: str, hook_options: Mapping[str, Any]) -> Path:
        return session(folder, {hook: hook_options}, **options).rewind(stretch)[0]

    runner = Planted(PlantedConfig(**options))
    run = folder / "planted/plain"
    return explain(train_again, run, step, describe=runner.describe_row, left_out=(), last=None)


def explained_plant(folder: Path, plant: str, seed: int, *, early: bool = False) -> tuple[int, Explanation]:
    """Explain the step after the planted one in a short run; the planted step depends on the seed.

    It is between 150 and 239, or ``early``, while the loss still falls, between 41 and 130.
    """
    step = (41 if early else 150) + seed * 29 % 90
    options = {"plant": plant, "plant_step": step, "seed": seed, "steps": step + 12, "dropout": 0.1 * (seed % 2)}
    return step, explanation_of(folder, step + 1, **options)


explained_plants = {plant: partial(explained_plant, plant=plant) for plant in PLANTS}
