"""Smoothing of the weights towards those of the last smoothing, as a declared change of the run."""

import warnings
from collections.abc import Mapping
from typing import Any

from loopscope import HookPoint, HookRegistry, InterventionHook, Remembered, RunDataContext, StepSchedule
from loopscope.errors import UnsuitableError, UsageError, listed
from loopscope.hooks import Metrics, ModelDataContext, RunInfo, StatePart
from loopscope.lowbit import layers_with_factors
from loopscope.state import norm, trainable

from .shadow_copies import ShadowCopies
from .smoothing import SmoothingConfig, blend_buffers, distance


@HookRegistry.register
class ModelSmoothing(InterventionHook):
    """Blend the weights with those of the last smoothing, every ``update_interval`` steps, and train on from there.

    After an optimizer step whose number is a multiple of the interval: live ← (1 − α)·live + α·buffer, then buffer ←
    live. The buffer begins as the starting weights. The optimizer's moments stay as they were. The arithmetic is that
    of ``loopscope.training_hooks.ModelSmoother``, with which a loop of one's own makes the same run bit for bit.

    Assumes a run of many intervals: a short one, or fine-tuning, is pulled back to where it began. Keeps one copy of
    the parameters that are trained when the run starts, each shared one once; one that is frozen later is left alone,
    one that is thawed later is not smoothed. A smoothing whose step is skipped (float16) is left out.

    Args:
        update_interval: steps from one smoothing to the next.
        alpha: α, the weight of the buffer, in (0, 1]; at 1 the weights return to the start every time.
    """

    name = "model_smoothing"
    hook_points = frozenset({HookPoint.POST_STEP})
    mutates = False
    commits = frozenset({StatePart.PARAMETERS})
    _copies = Remembered(ShadowCopies, merged=True)
    _smoothings = Remembered(int)
    _thawed = Remembered(list[str], saved=False)
    _warned = Remembered(bool, saved=False)
    metrics = """
        distance | ‖θ − b‖₂, θ the weights before the smoothing, b the buffer: the weights after the one before it, at
            first those of the start | [0, ∞)
            | How far training went in an interval. Steady: each interval repeats what smoothing takes back, or the
            weights wander; falling: they settle.
        relative_jump | α·‖θ − b‖₂ / ‖θ‖₂ | [0, ∞]
            | How far the smoothing moves the weights, relative to them. Above about 0.1 expect a spike of the loss and
            moments of the optimizer that belong to other weights: smooth more often, or with a smaller α.
        smoothings | number of smoothings so far, this one included | 1, 2, 3, … | Counts them.
    """

    def __init__(self, *, update_interval: int = 1000, alpha: float = 0.5) -> None:
        try:
            self.config = SmoothingConfig(update_interval=update_interval, alpha=alpha)
        except ValueError as error:
            raise UsageError(f"model_smoothing.{error}") from error
        self.step_schedule = StepSchedule(mode="stride", every_n_steps=update_interval, warmup=update_interval - 1)

    def start(self, run: RunInfo) -> None:
        """Copy the weights that the strategy begins with, unless it goes on from a checkpoint."""
        apart = layers_with_factors(run.model)
        if apart:
            raise UnsuitableError(
                f"Hook {self.name!r} blends weights of different steps, but a Metis split makes other quantities of "
                f"those of {listed(apart, 3)}; leave the hook out, or choose a recipe whose metis has forward=False."
            )
        if not self._copies.shards:
            self._copies.take(run.model, trainable(run.model))
            return
        try:
            self._copies.fit(run.model)
        except ValueError as error:
            raise UsageError(f"Hook 'model_smoothing' cannot go on from its checkpoint. {error}") from error

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Metrics:
        """Blend the buffer with the weights, ask for the weights to become it, and return how far they jump."""
        live = trainable(run_ctx.model)
        smoothed = {name: live[name] for name in self._copies.shards if name in live}
        self._thawed = [name for name in live if name not in smoothed]
        if not smoothed:
            return {}
        buffers = self._copies.like(smoothed)
        before = distance(smoothed, buffers)
        blend_buffers(smoothed, buffers, self.config.alpha, write_back=False)
        model_ctx.blend_parameters(buffers, 1.0)
        self._smoothings += 1
        return {
            "distance": before,
            "relative_jump": self.config.alpha * before / norm(smoothed),
            "smoothings": self._smoothings,
        }

    def check(self, values: Mapping[str, Any], step: int) -> None:
        """Warn, once, of parameters that are trained but were frozen when the buffer was made."""
        if self._thawed and not self._warned:
            self._warned = True
            warnings.warn(
                f"model_smoothing leaves {listed(self._thawed, 3)} alone at step {step}: frozen when the run started, "
                "and so without a buffer.",
                stacklevel=2,
            )
