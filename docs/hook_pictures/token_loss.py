"""Loss of the bytes by position, and by tenth of their frequency, in 300 steps of a small GPT with AdamW. The loss does
not depend on the position: up to then the model has learned which bytes follow each other, but not yet to use more
context. It learns the most frequent bytes first, the rarest last."""

from matplotlib import pyplot
from matplotlib.figure import Figure

from docs.hook_pictures._small_gpt import train


def draw() -> Figure:
    """Train and plot, smoothed over five measurements."""
    frame = train("token_loss", {"interval": 5}, steps=300)
    figure, (left, right) = pyplot.subplots(1, 2, sharey=True)
    shown = {
        left: [f"position/{name}" for name in ("0", "1", "2-3", "4-7", "8-15", "32-63")],
        right: [f"frequency/{tenth}" for tenth in (1, 3, 5, 7, 9, 10) if f"frequency/{tenth}" in frame],
    }
    for axes, names in shown.items():
        for number, name in enumerate(names):
            smooth = frame[name].dropna().rolling(5, min_periods=1).mean()
            axes.plot(smooth, label=name, linewidth=1, color=pyplot.colormaps["viridis"](number / len(names)))
        axes.set_xlabel("step")
        axes.legend(fontsize=7)
    return figure
