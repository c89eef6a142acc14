"""Small runs of models with and without quantised layers, and brute-force counts of their losses."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from loopscope.data import TensorLoader, fixed_order
from loopscope.engine import HookManager
from loopscope.hooks import GradientTap, HookPoint, TrainingHook
from loopscope.loops import step_loop
from loopscope.lowbit import quantize_model
from loopscope.lowbit.casts import Cast
from loopscope.state import RandomStreams, TrainingState, seed_everything, without_on_demand
from loopscope.training import TrainingTask
from torch import Tensor, nn
from torch.nn import functional

from tests.support import RecordingSink, run_info

WIDTH, CLASSES, ROWS = 40, 5, 12
LAYERS = ("0", "2")
NAME = "gradient_overflow/"


def network(recipe: Any = None) -> nn.Module:
    """Make two linear layers, the same at every call; with a recipe they are quantised."""
    seed_everything(1)
    model = nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, CLASSES))
    if recipe is not None:
        quantize_model(model, recipe)
    return model


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


@dataclass
class LowBitRun:
    """A run over ``steps`` steps with a newly drawn batch at each."""

    model: nn.Module
    hooks: Sequence[TrainingHook] = ()
    steps: int = 3
    options: dict[str, Any] = field(default_factory=dict)
    audit: bool = True
    offload: bool = False

    def __post_init__(self) -> None:
        seed_everything(2)
        rows = ROWS * self.steps
        scales = torch.logspace(-1, 1, rows)[:, None]
        data = torch.randn(rows, WIDTH) * scales, torch.randint(CLASSES, (rows,))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3, momentum=0.9)
        loader = TensorLoader(data, ROWS, fixed_order(torch.arange(rows)))
        self.task = TrainingTask(
            self.model, optimizer, loader, self.options.pop("compute_loss", cross_entropy),
            length=self.steps, snapshot_every=self.steps, log_every=1, **self.options,
        )  # fmt: skip
        self.state = TrainingState(self.model, optimizer, RandomStreams(1), scaler=self.task.scaler)
        self.sink = RecordingSink()
        self.manager = HookManager(
            self.hooks, self.task, self.state, loop="step", sinks=[self.sink], audit=self.audit,
            offload_state=self.offload,
        )  # fmt: skip

    def train(self, until: int | None = None) -> "LowBitRun":
        """Train, from where the state stands; ``until`` ends the process before the run does."""
        self.manager.start(run_info(self.task, self.manager, "step"))
        self.task.length = until or self.steps
        step_loop(self.task, self.manager)
        if until is None:
            self.manager.end("completed")
        return self

    def values(self, step: int) -> dict[str, Any]:
        """Return the metrics that the hook reported at a step, with dicts flattened."""
        found = {name.removeprefix(NAME): value for name, _, at, value in self.sink.rows(NAME) if at == step}
        nested = {name: value for name, value in found.items() if isinstance(value, dict)}
        inner = {f"{name}/{key}": entry for name, value in nested.items() for key, entry in value.items()}
        return {name: value for name, value in found.items() if name not in nested} | inner

    @property
    def final(self) -> dict[str, int]:
        return without_on_demand(self.state.digest())


class Recorder(TrainingHook):
    """Keeps every tensor that the casts of the layers see, by layer, role and step, without looking at a cast."""

    name = "recorder"
    hook_points = frozenset({HookPoint.PRE_STEP})

    def __init__(self) -> None:
        self.seen: dict[tuple[int, str, str], list[Tensor]] = {}
        self.step = 0

    def keep(self, layer: str, role: str, tensor: Tensor) -> None:
        self.seen.setdefault((self.step, layer, role), []).append(tensor.detach().clone())

    def taps(self, model: nn.Module):
        for layer in LAYERS:
            for role in ("forward_input", "backward_input"):
                yield GradientTap(layer, "input", partial(self.keep, layer, role))
            yield GradientTap(layer, "output", partial(self.keep, layer, "output_grad"))

    def compute(self, ctx):
        self.step = ctx.step
        for layer in LAYERS:
            weight = ctx.model.get_submodule(layer).weight
            self.keep(layer, "forward_weight", weight)
            if layer != LAYERS[0]:  # the first input has no gradient, so its product is never made
                self.keep(layer, "backward_weight", weight)
        return {}

    def describe_metrics(self):
        return []


@dataclass
class Lost:
    """What casts lost, by comparing every value with every number of the format in float64."""

    quantizations: int = 0
    overflowing_quantizations: int = 0
    elements: int = 0
    overflowing: int = 0
    underflowing: int = 0
    upper_half: int = 0
    excess: list[float] = field(default_factory=list)
    squared_error: float = 0.0
    squared_norm: float = 0.0

    def take(self, tensor: Tensor, cast: Cast, scales: Tensor | None = None) -> "Lost":
        """Add one quantisation."""
        magnitude = tensor.detach().double().abs().numpy().reshape(-1, tensor.shape[-1])
        given = (cast.scales(tensor) if scales is None else scales).double().numpy()
        block = cast.blocks() or magnitude.shape[1]
        by_row = given.reshape(len(magnitude), -1) if cast.blocks() else np.full((len(magnitude), 1), given)
        scale = by_row.repeat(block, axis=1)[:, : magnitude.shape[1]]
        limit = scale * cast.number_format.maximum
        rounded = nearest(magnitude / scale, cast) * scale
        over = magnitude > limit
        self.quantizations += 1
        self.overflowing_quantizations += int(over.any())
        self.elements += magnitude.size
        self.overflowing += int(over.sum())
        self.underflowing += int(((rounded == 0) & (magnitude > 0)).sum())
        self.upper_half += int((magnitude > limit / 2).sum())
        self.excess += (magnitude / limit)[over].tolist()
        self.squared_error += float(((rounded - magnitude) ** 2).sum())
        self.squared_norm += float((magnitude**2).sum())
        return self


def nearest(magnitudes: Any, cast: Cast) -> Any:
    """Return the nearest numbers of the format, of two the one with an even place among all of them."""
    grid = cast.number_format.magnitudes().numpy()
    distances = np.abs(magnitudes[..., None] - grid)
    ties = distances == distances.min(-1, keepdims=True)
    return grid[np.where(ties, np.arange(len(grid)) % 2, 2).argmin(-1)]
