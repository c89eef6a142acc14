"""The path that the parameters take: its length, how far it leads, and how straight it is."""

import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, StepSchedule, TrainingHook
from loopscope.errors import require
from loopscope.hooks import STEP_POINTS, Metrics, RunInfo
from loopscope.state import trainable
from torch import Tensor

from ..measures import FlatLayout, FlatMemory

PLACES = ("start", "interval", "newest")
FOLD = 512  # legs whose lengths wait as single numbers before they are added up


@HookRegistry.register
class PathLength(TrainingHook):
    """Measure the path of the parameters over all steps: length, displacement, efficiency.

    The path leads through the parameters as the strategy starts, after every ``every``-th step, and at every report,
    whatever moved them in between; a leg is the way from one of these places to the next. With ``every=1`` it is the
    path of the optimizer itself, step by step; the default leaves out what happens within four steps and costs a
    quarter. A report comes after every epoch, in the step loop at SNAPSHOT, and tells of the path as a whole and of the
    interval since the last report.

    Assumes that the same parameters are trained throughout: one that is frozen later stands still, one that is
    unfrozen later is not on the path. Keeps three times the parameters, in float32 or wider: those at the start, at
    the last report, and at the newest place.

    Args:
        every: steps from one place of the path to the next.
    """

    name = "path_length"
    loop_points = {
        "epoch": frozenset({HookPoint.POST_BACKWARD, HookPoint.POST_EPOCH}),
        "step": frozenset({HookPoint.POST_BACKWARD, HookPoint.SNAPSHOT}),
    }
    _memory = Remembered(FlatMemory)
    _squares = Remembered(list[Tensor])  # of the legs that are not yet added up
    _path = Remembered(lambda: torch.zeros((), dtype=torch.float64))
    _interval_path = Remembered(lambda: torch.zeros((), dtype=torch.float64))
    _steps = Remembered(int)
    _interval_steps = Remembered(int)
    _done = Remembered[int | None](lambda: None)
    metrics = """
        path_length | Σ ‖l‖₂ over all legs since the strategy began | [0, ∞)
            | How far the parameters have gone, there and back included.
        displacement | ‖θ_t − θ_0‖₂, θ_0 the parameters as the strategy began | [0, path_length]
            | How far they have got; small against ‖θ_0‖: the lazy regime.
        efficiency | displacement / path_length; NaN before anything has moved | [0, 1] | 1: a straight line; n
            independent legs of equal length give 1/√n; falling while the path grows: wandering or oscillating.
        steps | the optimizer steps on the path | 1, 2, … | n = steps / every, for 1/√n.
        interval_path | Σ ‖l‖₂ over the legs of the interval: an epoch, in the step loop since the last SNAPSHOT
            | [0, ∞) | Follows the learning rate; rises without it: the steps grow.
        interval_displacement | ‖θ_t − θ at the interval's beginning‖₂ | [0, interval_path]
            | What remains of the interval's legs.
        interval_efficiency | interval_displacement / interval_path; NaN if nothing moved | [0, 1]
            | Near 1: the legs agree; near 1/√(legs of the interval): they are noise.
        path_per_step | interval_path / steps of the interval | [0, ∞)
            | The length of a usual step with every = 1; less with longer legs, the more so the more steps cancel.
    """

    def __init__(self, *, every: int = 4) -> None:
        require(every >= 1, f"path_length.every is {every}; it must be at least 1.")
        self.step_schedule = StepSchedule(mode="stride", every_n_steps=every)

    def start(self, run: RunInfo) -> None:
        """Note where the path begins, unless it goes on from a checkpoint."""
        if not self._memory.names:
            self._memory.begin(trainable(run.model), *PLACES)

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Measure the leg from the last place, if steps lie between, and report between steps; before any nothing."""
        if not self._memory.names:
            self._memory.begin(trainable(ctx.model), *PLACES)
        between_steps = ctx.hook_point not in STEP_POINTS
        done = ctx.step if between_steps else ctx.step - 1
        layout = self._memory.layout(ctx.model)
        if self._done is not None and done > self._done:
            self._measure(layout, done - self._done)
        self._done = done
        return self._report(layout) if between_steps and self._interval_steps else {}

    def _measure(self, layout: FlatLayout, steps: int) -> None:
        """Turn the vector kept from the place before into the leg, and then into the parameters of now."""
        newest = self._memory.vectors["newest"]
        layout.add(layout.parameters, newest, -1)
        self._squares.append(layout.dot(newest.data, newest.data))
        layout.copy(layout.parameters, newest)
        self._steps += steps
        self._interval_steps += steps
        if len(self._squares) >= FOLD:
            self._fold()

    def _fold(self) -> None:
        """Add the legs that wait to the path of the interval."""
        if self._squares:
            device = self._squares[-1].device
            lengths = torch.stack([square.to(device) for square in self._squares]).sqrt()
            self._interval_path = self._interval_path.to(device) + lengths.sum()
            self._squares = []

    def _report(self, layout: FlatLayout) -> Metrics:
        self._fold()
        vectors, path = self._memory.vectors, self._interval_path
        self._path = self._path.to(path.device) + path
        newest = vectors["newest"].data
        displacement = layout.norm(newest - vectors["start"].data)
        moved = layout.norm(newest - vectors["interval"].data)
        vectors["interval"].data.copy_(newest)
        steps, self._interval_path, self._interval_steps = self._interval_steps, torch.zeros_like(path), 0
        return {
            "path_length": self._path,
            "displacement": displacement,
            "efficiency": displacement / self._path,
            "steps": self._steps,
            "interval_path": path,
            "interval_displacement": moved,
            "interval_efficiency": moved / path,
            "path_per_step": path / steps,
        }
