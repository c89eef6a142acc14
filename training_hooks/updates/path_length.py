"""Length, displacement and straightness of the path of the parameters."""

from functools import partial

import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, StepSchedule, TrainingHook
from loopscope.errors import require
from loopscope.hooks import STEP_POINTS, Metrics, RunInfo
from loopscope.tensors import total_of, trainable
from torch import Tensor, nn

from ..measures import WeightMemory

POINTS = ("start", "interval", "newest")
RARELY_READ_FROM = 4
"""From this number of steps from point to point on, a copy of the newest point counts as rarely read."""
FOLD = 512  # legs that are collected before their lengths are added up in one operation


@HookRegistry.register
class PathLength(TrainingHook):
    """Measure the path of the parameters over all steps: length, displacement, efficiency.

    The path connects the parameters at the start of the strategy, after every ``every``-th step, and at every report; a
    leg is the straight line between two successive points and includes every kind of change. With ``every=1`` it is the
    path of the optimizer, step by step; the default ignores detours within four steps and costs a quarter. The hook
    reports after every epoch, or at SNAPSHOT in the step loop, about the complete path and about the interval since the
    last report.

    Assumes that the same parameters are trained throughout: one that is frozen later does not move, one that is
    unfrozen later is not part of the path. Keeps up to three copies of the parameters, in float32 or wider: at the
    start, at the last report, and at the newest point. Equal copies are one, and parameter_delta shares that at the
    last report. For a model on the CPU, large copies are in a temporary file (in ``TMPDIR``), not in memory; that of
    the newest point only if ``every`` is at least 4.

    Args:
        every: steps from one point of the path to the next.
    """

    name = "path_length"
    has_fixed_schedule = True
    loop_points = {
        "epoch": frozenset({HookPoint.POST_BACKWARD, HookPoint.POST_EPOCH}),
        "step": frozenset({HookPoint.POST_BACKWARD, HookPoint.SNAPSHOT}),
    }
    _memory = Remembered(WeightMemory)
    _squares = Remembered(list[Tensor])  # squared lengths of the legs that are not yet added up
    _path = Remembered(partial(torch.zeros, (), dtype=torch.float64))
    _interval_path = Remembered(partial(torch.zeros, (), dtype=torch.float64))
    _steps = Remembered(int)
    _interval_steps = Remembered(int)
    _done = Remembered[int | None](None)
    metrics = """
        path_length | Σ ‖l‖₂ over all legs since the strategy began | [0, ∞)
            | The distance that the parameters have travelled, including detours.
        displacement | ‖θ_t − θ_0‖₂, θ_0 the parameters as the strategy began | [0, path_length]
            | The distance from the start. Small relative to ‖θ_0‖: the lazy regime.
        efficiency | displacement / path_length; NaN before anything has moved | [0, 1], NaN | 1: a straight line; n
            independent legs of equal length give 1/√n. Falling while the path grows: wandering or oscillating.
        steps | the optimizer steps on the path, without those that a loss scaler skipped | 1, 2, …
            | n = steps / every, for 1/√n.
        interval_path | Σ ‖l‖₂ over the legs of the interval: an epoch, in the step loop since the last SNAPSHOT
            | [0, ∞) | Follows the learning rate. Rising at a constant learning rate: the steps grow.
        interval_efficiency | ‖θ_t − θ'‖₂ / interval_path, θ' the parameters at the interval's beginning; NaN if nothing
            moved | [0, 1], NaN
            | Near 1: the legs agree; near 1/√(legs of the interval): they are noise. The distance itself is
            total_delta of parameter_delta.
        path_per_step | interval_path / steps of the interval | [0, ∞)
            | With every = 1 the mean length of a step; less with longer legs, since steps within a leg partly cancel.
    """

    def __init__(self, *, every: int = 4) -> None:
        require(every >= 1, f"path_length.every is {every}; it must be at least 1.")
        self.step_schedule = StepSchedule(mode="stride", every_n_steps=every)
        self._is_rarely_read = every >= RARELY_READ_FROM

    def start(self, run: RunInfo) -> None:
        """Keep the parameters as the start of the path; a resumed run already has them."""
        if not self._memory.names:
            self._memory.reset_to(run.model, trainable(run.model), *POINTS)

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Add the leg since the last point, if there were steps; at reports return the metrics of the path so far."""
        if not self._memory.names:
            self._memory.reset_to(ctx.model, trainable(ctx.model), *POINTS)
        between_steps = ctx.hook_point not in STEP_POINTS
        # Without the steps that a loss scaler has skipped
        completed_steps = (ctx.step if between_steps else ctx.step - 1) - ctx.skipped_steps
        if self._done is not None and completed_steps > self._done:
            self._add_leg(ctx.model, completed_steps - self._done)
        self._done = completed_steps
        return self._report(ctx.model) if between_steps and self._interval_steps else {}

    def _add_leg(self, model: nn.Module, steps: int) -> None:
        """Measure the leg from the previous point to the current parameters, which become the newest point."""
        distances = self._memory.follow("newest", model, is_rarely_read=self._is_rarely_read)
        self._squares.append(total_of(distances).square())
        self._steps += steps
        self._interval_steps += steps
        if len(self._squares) >= FOLD:
            self._fold()

    def _fold(self) -> None:
        """Add the lengths of the collected legs to the path of the interval."""
        if self._squares:
            device = self._squares[-1].device
            lengths = torch.stack([square.to(device) for square in self._squares]).sqrt()
            self._interval_path = self._interval_path.to(device) + lengths.sum()
            self._squares = []

    def _report(self, model: nn.Module) -> Metrics:
        self._fold()
        path, parameters = self._interval_path, self._memory.parameters(model)
        self._path = self._path.to(path.device) + path
        start, interval = self._memory.copies["start"], self._memory.copies["interval"]
        displacement = total_of(start.distances(parameters))
        # Until the second report, both are one copy
        interval_displacement = displacement if interval is start else total_of(interval.distances(parameters))
        self._memory.keep("interval", model)
        steps, self._interval_path, self._interval_steps = self._interval_steps, torch.zeros_like(path), 0
        return {
            "path_length": self._path,
            "displacement": displacement,
            "efficiency": (displacement / self._path).clamp(max=1),  # which rounding may exceed
            "steps": self._steps,
            "interval_path": path,
            "interval_efficiency": (interval_displacement / path).clamp(max=1),
            "path_per_step": path / steps,
        }
