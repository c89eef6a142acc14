"""The largest attention logit in 120 steps of a small GPT with AdamW, without a clip (threshold 1,000,000) and with the
threshold 4, and the number of clipped heads, of 12. Each value is from before the clip of its step, on another batch
than the last clip, so it can exceed the threshold."""

from matplotlib import pyplot
from matplotlib.figure import Figure

from docs.hook_pictures._small_gpt import train

THRESHOLD = 4.0


def draw() -> Figure:
    """Train twice and plot."""
    free = train("qk_clip", {"threshold": 1e6}, steps=120)
    clipped = train("qk_clip", {"threshold": THRESHOLD}, steps=120)
    figure, (left, right) = pyplot.subplots(1, 2)
    left.plot(free["largest_logit"].dropna(), label="largest_logit, not clipped", linewidth=1)
    left.plot(clipped["largest_logit"].dropna(), label=f"largest_logit, threshold {THRESHOLD:g}", linewidth=1)
    left.axhline(THRESHOLD, color="grey", linestyle=":", linewidth=1)
    left.legend(fontsize=7)
    right.plot(clipped["clipped_heads"].dropna(), label="clipped_heads", color="tab:orange", linewidth=1)
    right.legend(fontsize=7)
    for axes in (left, right):
        axes.set_xlabel("step")
    return figure
