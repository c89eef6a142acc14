"""Gradients against second moments (left), and updates against the learning rate (right), in 150 steps of a small GPT
with AdamW, β₂ = 0.95. The ratios are between 0.2 and 1.7, and lower in the embedding, most of whose rows do not occur
in a batch. Batch 75 consists of random bytes: the gradients of the embedding and the output projection exceed what
their second moments know. The update per learning rate does not follow the schedule of the learning rate (warm-up over
20 steps, then linear decay)."""

from matplotlib import pyplot
from matplotlib.figure import Figure

from docs.hook_pictures._small_gpt import spoil, train

SHOWN = ("tokens.weight", "blocks.0.linear1.weight", "head.weight")


def draw() -> Figure:
    """Train and plot."""
    options = {"interval": 1, "names": ",".join(SHOWN), "top": 0, "bottom": 0}
    frame = train("optimizer_health", options, steps=150, change=spoil)
    figure, panels = pyplot.subplots(1, 2)
    for axes, family in zip(panels, ("gradient_rms", "update_per_lr"), strict=True):
        for name in SHOWN:
            axes.plot(frame[f"{family}/{name}"], label=f"{family}/{name}", linewidth=1)
        axes.set_xlabel("step")
        axes.legend(fontsize=7)
    return figure
