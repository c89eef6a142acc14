"""A small GPT in which the last block divides by zero for one row of step 60. The loss is NaN at that step, and all
weights afterwards; the alert, shown above the plot, names the module and the row."""

import json
import math
import tempfile
import warnings
from pathlib import Path
from textwrap import fill

import loopscope
import torch
from matplotlib import pyplot
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional

from docs.hook_pictures._small_gpt import GPT, batches

STEPS, BROKEN_AT, ROW = 80, 60, 5


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean loss of the next bytes."""
    inputs, targets = batch
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def draw() -> Figure:
    """Train and plot."""
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    layer = model.blocks[2].linear2
    forward = layer.forward
    losses: list[float] = []

    def dividing(hidden: Tensor) -> Tensor:
        scale = torch.ones(len(hidden), 1, 1)
        scale[ROW] = 0
        return forward(hidden) * (scale / scale)

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = Path(folder) / "run"
        with loopscope.attach(
            model, optimizer, hooks=["first_nonfinite"], loss=loss_of, out=run, display="none"
        ) as scope:
            for step, batch in enumerate(scope.batches(batches(STEPS)), start=1):
                layer.forward = dividing if step == BROKEN_AT else forward
                loss = loss_of(model, batch)
                losses.append(loss.item())
                scope.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        alert = json.loads((run / "alerts.jsonl").read_text().splitlines()[0])
    figure, axis = pyplot.subplots()
    axis.plot(range(1, STEPS + 1), losses, linewidth=1, label="loss")
    missing = [step for step, loss in enumerate(losses, start=1) if math.isnan(loss)]
    axis.axvspan(missing[0], missing[-1], color="tab:red", alpha=0.2, label="loss is NaN")
    axis.set_title(fill(alert["sentence"], 100), fontsize=9)
    axis.set_xlabel("step")
    axis.legend()
    return figure
