"""Size, outliers and dead units of activations in 200 steps of a small GPT with ReLU and AdamW. From step 100 on the
learning rate is 10 times too high: units die, and the residual stream grows."""

import tempfile
from pathlib import Path

import loopscope
import torch
from matplotlib import pyplot
from matplotlib.figure import Figure
from torch import nn
from torch.nn import functional

from docs.hook_pictures._small_gpt import GPT, batches

STEPS, BROKEN_AT = 200, 100


def draw() -> Figure:
    """Train and plot."""
    torch.manual_seed(0)
    model = GPT()
    for block in model.blocks:
        block.activation, block.activation_relu_or_gelu = nn.ReLU(), 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    options = {"activations": {"interval": 4, "names": "*"}}
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        with loopscope.attach(
            model, optimizer, hooks=["activations"], hook_options=options, out=run, display="none"
        ) as scope:
            for step, (inputs, targets) in enumerate(scope.batches(batches(STEPS)), start=1):
                for group in optimizer.param_groups:
                    group["lr"] = 3e-3 if step < BROKEN_AT else 3e-2
                scope.backward(functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()))
                optimizer.step()
                optimizer.zero_grad()
        frame = loopscope.read_run(str(run)).frame()
    figure, axes = pyplot.subplots(1, 3)
    for axis, family in zip(axes, ("rms", "outlier_kurtosis", "dead_fraction"), strict=True):
        for name in [name for name in frame if name.startswith(f"activations/{family}/")]:
            axis.plot(frame[name].dropna(), label=name.removeprefix(f"activations/{family}/"), linewidth=1)
        axis.set_title(family)
        axis.set_xlabel("step")
        axis.axvline(BROKEN_AT, color="gray", linewidth=0.5)
        axis.legend(fontsize=6)
    return figure
