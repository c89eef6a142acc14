"""Variance and signal-to-noise ratio of the gradients in windows of steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, StepSchedule, TrainingHook
from loopscope.errors import UnsuitableError, require
from loopscope.hooks import EVERY_STEP, Metrics, RunInfo
from loopscope.option_words import hook_option_text
from loopscope.tensors import Vector, joined_length, length_of, pieces, tensor_of, trainable
from torch import Tensor

from ..measures import FlatLayout, FlatMemory, FlatVector, is_overflowed


@dataclass
class Chunk:
    """The moments of ``count`` successive gradients g.

    ``mean`` is a flat vector (tensors by parameter name right after loading). ``scatter`` is Σ‖g_t − mean‖² of each
    parameter, shape (parameters,). ``changes`` is Σ‖g_{t+1} − g_t‖² over all parameters, ``link`` the squared change
    from the last gradient before the chunk to its first one. ``owners`` names the parameters that had a gradient.
    """

    mean: Any
    scatter: Tensor
    changes: Tensor
    link: Tensor
    count: int
    owners: list[str]

    @classmethod
    def empty(cls, layout: FlatLayout) -> "Chunk":
        """Return a chunk without gradients."""
        mean = layout.zeros().data
        scatter = torch.zeros(len(layout.names), dtype=torch.float64, device=mean.device)
        return cls(mean, scatter, scatter.new_zeros(()), scatter.new_zeros(()), 0, [])

    def on(self, layout: FlatLayout) -> "Chunk":
        """Return the chunk on the device of a layout, with its mean as a flat vector of that layout."""
        moved = {name: value.to(layout.device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return Chunk(**vars(self) | moved | {"mean": layout.flat(self.mean)})


@torch.no_grad()
def extend(chunk: Chunk, layout: FlatLayout, gradients: Vector, previous: FlatVector | None) -> None:
    """Add gradients to a chunk in place, and overwrite the previous ones by them.

    Args:
        chunk: the chunk.
        layout: the layout of the chunk's mean and of ``previous``.
        gradients: gradients by parameter name; zeros for missing names.
        previous: the gradients of the step before, None if they are unknown.
    """
    chunk.count += 1
    vectors = [FlatVector(chunk.mean)] if previous is None else [FlatVector(chunk.mean), previous]
    deviations, changes = list[float | Tensor](), list[float | Tensor]()
    for tensors in zip(layout.shards(gradients), *map(layout.views, vectors), strict=True):
        of_deviation, of_change = list[float | Tensor](), list[float | Tensor]()
        for new, mean, *before in pieces(*tensors):
            # Welford's recurrence: δ = g_n − mean_{n−1}, scatter += ‖δ‖²·(n − 1)/n, mean += δ/n
            deviation = new.to(mean.dtype) - mean
            of_deviation.append(length_of(deviation))
            mean.add_(deviation, alpha=1 / chunk.count)
            for old in before:
                of_change.append(length_of(torch.sub(new, old, out=deviation)))
                old.copy_(new)
        deviations.append(joined_length(of_deviation))
        changes.append(joined_length(of_change))
    if chunk.count > 1:
        chunk.scatter += layout.over_ranks(tensor_of(deviations).square()) * ((chunk.count - 1) / chunk.count)
    if previous is not None:
        (chunk.changes if chunk.count > 1 else chunk.link).add_(layout.over_ranks(tensor_of(changes).square()).sum())


def merge(chunks: Sequence[Chunk], layout: FlatLayout) -> Chunk:
    """Merge successive chunks into one (Chan, Golub and LeVeque 1983, extended to more than two)."""
    if len(chunks) == 1:
        return chunks[0]
    # mean = Σ n_c·mean_c / n and scatter = Σ (scatter_c + n_c·‖mean_c − mean‖²) over the chunks c
    count = sum(chunk.count for chunk in chunks)
    mean, merged = torch.zeros_like(chunks[0].mean), Chunk.empty(layout)
    for chunk in chunks:
        mean.add_(chunk.mean, alpha=chunk.count / count)
    # The change into a chunk (its link) counts inside the window; that into the first chunk is before the window.
    for chunk in chunks:
        difference = chunk.mean - mean
        merged.scatter += chunk.scatter + layout.dots(difference, difference) * chunk.count
        merged.changes += chunk.changes + (0 if chunk is chunks[0] else chunk.link)
    owners = [name for name in layout.names if any(name in chunk.owners for chunk in chunks)]
    return replace(merged, mean=mean, count=count, link=chunks[0].link, owners=owners)


def statistics(window: Chunk, layout: FlatLayout) -> dict[str, Tensor]:
    """Return the metrics of :class:`Variance` from a window's moments."""
    # tr Σ̂ = Σ_t ‖g_t − ḡ‖²/(W − 1) by parameter, shape (parameters,); the total is the sum over parameters.
    count = window.count
    signals, variances = layout.dots(window.mean, window.mean), window.scatter / (count - 1)
    signal, variance = signals.sum(), variances.sum()
    # The difference of two independent draws has twice their variance: Σ_t ‖g_{t+1} − g_t‖²/(2(W − 1)).
    successive = window.changes / (2 * (count - 1))
    metrics = {
        "total_variance": variance,
        "mean_norm": signal.sqrt(),
        "signal_to_noise": signal / variance,
        # E‖ḡ‖² = ‖E g‖² + tr Σ/W, so noise contributes 1/W to the ratio.
        "noise_corrected_signal_to_noise": signal / variance - 1 / count,
        "successive_variance": successive,
        "successive_ratio": successive / variance,
    }
    by_parameter = {"parameter_variance": variances, "parameter_signal_to_noise": signals / variances}
    for metric, values in by_parameter.items():
        named = layout.by_name(values)
        metrics |= {f"{metric}/{name}": named[name] for name in layout.names if name in window.owners}
    return metrics


@HookRegistry.register
class Variance(TrainingHook):
    """Measure the variance of the steps' gradients over windows of steps, and their signal-to-noise ratio.

    The gradients are those at POST_BACKWARD. A window of ``window`` successive steps starts every ``every`` steps and
    is reported at its last step. If ``every`` is at least ``window``, the windows do not overlap, and steps between
    them cost nothing; otherwise the window slides by ``every`` steps.

    Assumes that the gradients of a window are draws around one mean although the parameters move in the meantime;
    ``successive_ratio`` measures how well that holds. A window with a step that a loss scaler skips has no report;
    windows that slide start again after it. A parameter without a gradient in a step counts as zero. Keeps two
    gradients in float32 or wider within a window, the mean and the newest one, and ``window/every − 1`` more if windows
    slide.

    Args:
        window: steps in a window.
        every: steps from the start of a window to the start of the next; if below ``window``, it must divide it.
    """

    name = "variance"
    needs_dense_gradients = True
    hook_points = frozenset({HookPoint.POST_BACKWARD})
    _memory = Remembered(FlatMemory)
    _chunks = Remembered(list[Chunk], saved=False)
    _last_step = Remembered(int)
    metrics = """
        total_variance | tr Σ̂ = Σ_t ‖g_t − ḡ‖² / (W − 1), g_t the W = window gradients, ḡ their mean | [0, ∞)
            | The mean squared deviation of a step's gradient from the mean. Inversely proportional to the batch size if
            the steps are independent draws.
        mean_norm | ‖ḡ‖₂ | [0, ∞) | The part of the gradient that persists over the window.
        signal_to_noise | ‖ḡ‖² / tr Σ̂; NaN if all gradients are zero | [0, ∞], NaN
            | Noise alone gives about 1/W. Above 1: the steps agree; far below 1: they wander.
        noise_corrected_signal_to_noise | (‖ḡ‖² − tr Σ̂/W) / tr Σ̂ | [−1/W, ∞], NaN
            | The same without the contribution of noise to ‖ḡ‖². Around 0: no signal above the noise. Numerator and
            denominator are unbiased, but their ratio is not: for Gaussian gradients of signal-to-noise q its mean is
            (q + 1/W)·ν/(ν − 2) − 1/W, ν = (W − 1)·(tr Σ)²/tr Σ², exactly so if the noise is isotropic. The bias is
            large if the noise has one dimension and small if it has many.
        successive_variance | Σ_t ‖g_{t+1} − g_t‖² / (2(W − 1)), over the W − 1 successive pairs | [0, ∞)
            | The variance without slow drift, since drift cancels in the differences.
        successive_ratio | successive_variance / total_variance (von Neumann's ratio / 2) | [0, 2], NaN
            | About 1: independent draws around one mean, as assumed. Below 1: the mean drifts, and the drift is part of
            total_variance. Above 1: the gradients alternate, as in an oscillation.
        parameter_variance/<parameter> | tr Σ̂ of one parameter that had a gradient in the window | [0, ∞)
            | Shows which layers have noisy gradients. The values add up to total_variance.
        parameter_signal_to_noise/<parameter> | ‖ḡ_p‖² / tr Σ̂_p of one parameter; NaN if its gradients are all zero
            | [0, ∞], NaN | Shows which layers still have a signal. Noise alone gives about 1/W.
    """

    def __init__(self, *, window: int = 20, every: int = 200) -> None:
        require(window >= 2, f"variance.window is {window}; it must be at least 2.")
        is_valid = every >= window or (every >= 1 and window % every == 0)
        limits = f"a divisor of variance.window ({window}), or at least as large"
        require(is_valid, f"variance.every is {every}; it must be {limits}.")
        self._window = window
        self._length = min(window, every)
        bursts = StepSchedule(mode="burst", every_n_steps=every, burst_length=window) if every > window else None
        self.step_schedule = bursts or EVERY_STEP

    def start(self, run: RunInfo) -> None:
        """Check that the run has at least one window.

        Raises:
            UnsuitableError: if the run is shorter than a window.
        """
        if run.steps < self._window:
            raise UnsuitableError(
                f"Hook 'variance' measures windows of {self._window} steps, but the run has only {run.steps} steps. "
                f"Set a shorter window with {hook_option_text(self.name, window='STEPS')}."
            )

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Add a step's gradient; return the metrics of the window that it completes, if any."""
        if ctx.step != self._last_step + 1:
            self.reset()
        if is_overflowed(ctx):
            self.reset()  # a window consists of successive steps
            self._last_step = ctx.step
            return {}
        layout = self._extend(ctx)
        self._last_step = ctx.step
        if self._chunks[-1].count < self._length:
            return {}
        chunks_per_window = self._window // self._length
        chunks = [chunk.on(layout) for chunk in self._chunks]
        self._chunks = chunks[1:] if len(chunks) == chunks_per_window else chunks
        if not self._chunks:
            self._memory.vectors = {}  # windows do not slide, so the next one starts without a previous gradient
        return statistics(merge(chunks, layout), layout) if len(chunks) == chunks_per_window else {}

    def _layout(self, ctx: RunDataContext) -> FlatLayout:
        """Return the layout of the trained parameters; start a new chunk with the current ones if the last is full."""
        if self._chunks and self._chunks[-1].count < self._length:
            return self._memory.layout(ctx.model)
        trained = trainable(ctx.model)
        if not self._memory.holds(trained):
            self.reset()
            self._memory.reset_to(trained)
        layout = self._memory.layout(ctx.model)
        self._chunks.append(Chunk.empty(layout))
        return layout

    def _extend(self, ctx: RunDataContext) -> FlatLayout:
        """Add the step's gradient to the newest chunk, or to a new one if that is full."""
        layout, vectors = self._layout(ctx), self._memory.vectors
        started = [chunk for chunk in self._chunks if chunk.count]
        if started and "previous" not in vectors:
            # The second gradient of a window: the mean so far is the first one.
            vectors["previous"] = FlatVector(started[-1].on(layout).mean.clone())
        gradients = layout.gradients()
        chunk = self._chunks[-1] = self._chunks[-1].on(layout)
        chunk.owners += [name for name in gradients if name not in chunk.owners]
        extend(chunk, layout, gradients, vectors.get("previous"))
        return layout

    def state_dict(self) -> dict[str, Any]:
        """Return the newest gradient and the moments of the unfinished windows."""
        chunks = [vars(chunk) | {"mean": self._memory.named(chunk.mean)} for chunk in self._chunks]
        return super().state_dict() | {"chunks": chunks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self._chunks = [Chunk(**{**chunk, "owners": list(chunk["owners"])}) for chunk in state["chunks"]]
