"""Entropy of the singular values of the update (left), and its largest singular value scaled by the shape (right), of
one matrix of the second block in 100 steps of a small GPT with AdamW or, for the matrices of its blocks, with Muon. The
updates of Muon have nearly equal singular values, so their entropy is near 1, and their scaled norm follows exactly the
schedule of the learning rate (warm-up over 20 steps, then linear decay)."""

import torch
from matplotlib import pyplot
from matplotlib.figure import Figure
from torch import nn

from docs.hook_pictures._small_gpt import adamw, train

MATRIX = "blocks.1.linear1.weight"


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the blocks, and AdamW for the other parameters."""
    named = dict(model.named_parameters())
    matrices = {name for name, value in named.items() if name.startswith("blocks") and value.ndim == 2}
    others = [value for name, value in named.items() if name not in matrices]
    return [torch.optim.Muon([named[name] for name in sorted(matrices)], lr=0.02, weight_decay=0.0), adamw(others)]


def draw() -> Figure:
    """Train twice and plot."""
    options = {"interval": 5, "matrices": 1, "names": MATRIX}
    frames = {
        "AdamW": train("matrix_updates", options, steps=100),
        "Muon": train("matrix_updates", options, steps=100, optimizers=muon),
    }
    figure, panels = pyplot.subplots(1, 2)
    for axes, family in zip(panels, ("update_entropy", "scaled_update"), strict=True):
        for optimizer, frame in frames.items():
            axes.plot(frame[f"{family}/{MATRIX}"].dropna(), label=optimizer, linewidth=1)
        axes.set_xlabel("step")
        axes.set_ylabel(f"{family}/{MATRIX}", fontsize=7)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=7)
    return figure
