"""Mean of ln Z, largest logit and entropy of the predictions, and their calibration, in 300 steps of a small GPT with
AdamW. Accuracy and confidence rise together; after about 100 steps the calibration error is that of a calibrated model,
up to the noise of 512 predictions, as is usual while a model sees every text once."""

from matplotlib import pyplot
from matplotlib.figure import Figure

from docs.hook_pictures._small_gpt import train


def draw() -> Figure:
    """Train and plot."""
    frame = train("output_logits", {"interval": 5}, steps=300)
    figure, (left, right) = pyplot.subplots(1, 2)
    for name in ("log_z_mean", "max_logit", "entropy"):
        left.plot(frame[name].dropna(), label=name, linewidth=1)
    for name in ("accuracy", "confidence", "calibration_error", "calibration_noise"):
        right.plot(frame[name].dropna(), label=name, linewidth=1)
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.legend(fontsize=7)
    return figure
