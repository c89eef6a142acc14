"""Joint gradient norm before and after clipping at 1, and the update ratios of some parameters, in 150 steps of a small
GPT with AdamW. Batch 75 consists of random bytes: its gradient exceeds the limit and is clipped. The update ratios
follow the learning rate (warm-up over 20 steps, then linear decay)."""

from matplotlib import pyplot
from matplotlib.figure import Figure

from docs.hook_pictures._small_gpt import spoil, train

SHOWN = ("tokens.weight", "blocks.0.linear1.weight", "blocks.2.linear2.weight", "head.weight")


def draw() -> Figure:
    """Train and plot."""
    options = {"interval": 5, "names": ",".join(SHOWN), "top": 0, "bottom": 0}
    frame = train("parameter_norms", options, steps=150, change=spoil)
    figure, (left, right) = pyplot.subplots(1, 2)
    left.semilogy(frame["total_grad_norm"].dropna(), label="total_grad_norm", linewidth=1)
    left.semilogy(frame["total_clipped_grad_norm"].dropna(), label="total_clipped_grad_norm", linewidth=1)
    for name in SHOWN:
        right.semilogy(frame[f"update_ratio/{name}"].dropna(), label=f"update_ratio/{name}", linewidth=1)
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.legend(fontsize=7)
    return figure
