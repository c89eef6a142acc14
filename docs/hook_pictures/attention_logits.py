"""The largest attention logit of all heads and of three heads, and the mean entropy of each layer, every 4 steps of 120
of a small GPT with AdamW. The rows of a causal mask see 1 to 64 keys, so attention to all keys alike has the entropy
3.2 nats (dotted). Heads learn to select keys while their logits grow."""

import math

from matplotlib import pyplot
from matplotlib.figure import Figure

from docs.hook_pictures._small_gpt import LENGTH, train

HEADS = ("blocks.0.self_attn.0", "blocks.1.self_attn.0", "blocks.2.self_attn.0")


def draw() -> Figure:
    """Train and plot."""
    frame = train("attention_logits", {"interval": 4, "names": ",".join(HEADS)}, steps=120)
    figure, (left, right) = pyplot.subplots(1, 2)
    left.plot(frame["largest_logit"].dropna(), label="largest_logit", color="black", linewidth=1)
    for head in HEADS:
        left.plot(frame[f"max_logit/{head}"].dropna(), label=f"max_logit/{head}", linewidth=1)
    for layer in range(3):
        name = f"entropy/blocks.{layer}.self_attn"
        right.plot(frame[name].dropna(), label=name, linewidth=1)
    uniform = sum(math.log(keys) for keys in range(1, LENGTH + 1)) / LENGTH
    right.axhline(uniform, color="grey", linestyle=":", linewidth=1)
    left.set_ylim(0, 10)  # room for the legend
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.legend(fontsize=7)
    return figure
