"""The path that the parameters take: its length, how far it leads, and how sharply it turns from step to step."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from framework.contexts import MetricInfo, RunDataContext, RunInfo
from framework.hook_points import HookPoint
from framework.hooks import TrainingHook
from framework.metrics import Metrics
from framework.param_vectors import trainable
from framework.registry import HookRegistry
from training_hooks.flat_shards import FlatLayout, FlatMemory, FlatVector

FOLD = 512  # steps whose lengths wait as single numbers before they are added up


def turns(lengths: Tensor, products: Tensor) -> Tensor:
    """Return the cosines between successive steps, shape (n − 1,); NaN beside a step of length zero.

    ``lengths`` holds ‖s_1‖ … ‖s_n‖, ``products`` s_1·s_2 … s_{n−1}·s_n.

    >>> turns(torch.tensor([1.0, 2.0, 1.0, 0.0]), torch.tensor([2.0, 0.0, 0.0]))
    tensor([1., 0., nan])
    """
    return (products / (lengths[1:] * lengths[:-1])).clamp(-1, 1)


def sums_over(lengths: Tensor, products: Tensor, *, first: int) -> Tensor:
    """Return the sums over the steps from ``first`` (0 or 1) on: lengths, cosines, angles, turns; shape (4,), float64.

    Step 0 serves the turn between it and step 1. A turn beside a step of length zero is undefined and not counted.
    """
    cosines = turns(lengths, products)
    defined = (~cosines.isnan()).sum()
    return torch.stack([lengths[first:].sum(), cosines.nansum(), cosines.acos().nansum(), defined.double()])


@HookRegistry.register
class PathLength(TrainingHook):
    """Measure the path of the parameters over all steps: length, displacement, efficiency, turning.

    A step is θ_t − θ_{t−1}, the parameters after a step less those after the step before (before the first: as the
    strategy starts), whatever moved them. Every step is measured; the report comes after every epoch, in the step loop
    at SNAPSHOT, and tells of the path as a whole and of the interval since the last report.

    Assumes that the same parameters are trained throughout: one that is frozen later stands still, one that is
    unfrozen later is not on the path. Keeps five times the parameters, in float32 or wider: those at the start, at the
    last report, and now, the last step, and one to work in.

    Args:
        per_step: also report the length and the turn of every step.
    """

    name = "path_length"
    hook_points = frozenset({HookPoint.POST_STEP, HookPoint.POST_EPOCH, HookPoint.SNAPSHOT})
    loop_points = {
        "epoch": frozenset({HookPoint.POST_STEP, HookPoint.POST_EPOCH}),
        "step": frozenset({HookPoint.POST_STEP, HookPoint.SNAPSHOT}),
    }

    def __init__(self, *, per_step: bool = False) -> None:
        self._per_step = per_step
        self._memory = FlatMemory()
        self.reset()

    def reset(self) -> None:
        """Forget the path."""
        self._memory.clear()
        self._spare: FlatVector | None = None
        self._squares: list[Tensor] = []
        self._products: list[Tensor] = []
        self._carried = 0  # 1: the first of the squares is counted already, and waits for the next turn
        self._before = self._sums = torch.zeros(0)
        self._steps = self._interval_steps = 0

    def start(self, run: RunInfo) -> None:
        """Note where the path begins, unless it goes on from a checkpoint."""
        if not self._memory.names:
            self._begin(run.model)

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Measure a step, or report; after no step there is nothing to report."""
        if not self._memory.names:
            self._begin(ctx.model)
        layout = self._memory.layout(ctx.model)
        if ctx.hook_point is HookPoint.POST_STEP:
            return self._measure(layout)
        return self._report(layout) if self._interval_steps else {}

    def _begin(self, model: nn.Module) -> None:
        layout = self._memory.begin(trainable(model))
        self._memory.vectors = {name: layout.values() for name in ("start", "interval", "newest")}
        self._sums = torch.zeros(4, dtype=torch.float64, device=self._memory.vectors["start"].data.device)
        self._before = self._sums[0].clone()

    def _measure(self, layout: FlatLayout) -> Metrics:
        vectors = self._memory.vectors
        now = layout.copy(layout.parameters, self._spare or layout.zeros())
        step, last = vectors["newest"], vectors.get("step")
        torch.sub(now.data, step.data, out=step.data)
        self._squares.append(layout.dot(step.data, step.data))
        if last is not None:
            self._products.append(layout.dot(step.data, last.data))
        vectors["newest"], vectors["step"], self._spare = now, step, last
        self._steps += 1
        self._interval_steps += 1
        metrics = self._of_the_step() if self._per_step else {}
        if len(self._squares) > FOLD:
            self._fold()
        return metrics

    def _of_the_step(self) -> dict[str, Tensor]:
        lengths = torch.stack([square.to(self._sums.device) for square in self._squares[-2:]]).sqrt()
        metrics = {"step_length": lengths[-1]}
        if len(lengths) == 2:
            metrics["step_cosine"] = turns(lengths, self._products[-1])[0]
        return metrics

    def _fold(self) -> None:
        """Add the steps that wait to the sums of the interval; the last one goes on waiting, for the next turn."""
        if len(self._squares) == self._carried:
            return
        device = self._squares[-1].device
        lengths = torch.stack([square.to(device) for square in self._squares]).sqrt()
        products = [product.to(device) for product in self._products]
        joined = torch.stack(products) if products else lengths[:0]
        self._sums = self._sums.to(device) + sums_over(lengths, joined, first=self._carried)
        self._squares, self._products, self._carried = self._squares[-1:], [], 1

    def _report(self, layout: FlatLayout) -> Metrics:
        self._fold()
        vectors, newest = self._memory.vectors, self._memory.vectors["newest"].data
        path, cosines, angles, turned = self._sums.unbind()
        whole_path = self._before.to(path.device) + path
        displacement = self._distance(layout, newest, vectors["start"].data)
        moved = self._distance(layout, newest, vectors["interval"].data)
        metrics: dict[str, Any] = {
            "path_length": whole_path,
            "displacement": displacement,
            "efficiency": displacement / whole_path,
            "steps": self._steps,
            "interval_path": path,
            "interval_displacement": moved,
            "interval_efficiency": moved / path,
            "mean_step": path / self._interval_steps,
        }
        if self._steps > 1:
            metrics |= {"turn_cosine": cosines / turned, "turn_angle": angles / turned}
        vectors["interval"].data.copy_(newest)
        self._before, self._sums, self._interval_steps = whole_path, torch.zeros_like(self._sums), 0
        return metrics

    def _distance(self, layout: FlatLayout, here: Tensor, there: Tensor) -> Tensor:
        self._spare = self._spare or layout.zeros()
        between = torch.sub(here, there, out=self._spare.data)
        return layout.dot(between, between).sqrt()

    def state_dict(self) -> dict[str, Any]:
        """Return the parameters kept, the steps not yet added up, and the sums."""
        return {
            "memory": self._memory.state_dict(),
            "squares": self._squares,
            "products": self._products,
            "carried": self._carried,
            "before": self._before,
            "sums": self._sums,
            "steps": self._steps,
            "interval_steps": self._interval_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the path back."""
        self._memory.load_state_dict(state["memory"])
        self._spare = None
        self._squares, self._products = list(state["squares"]), list(state["products"])
        self._carried, self._before, self._sums = state["carried"], state["before"], state["sums"]
        self._steps, self._interval_steps = state["steps"], state["interval_steps"]

    def describe_metrics(self) -> Sequence[MetricInfo]:
        """Describe the path; s_t = θ_t − θ_{t−1}, an interval is an epoch (step loop: from SNAPSHOT to SNAPSHOT)."""
        return [
            MetricInfo(
                "path_length",
                "Σ_t ‖s_t‖₂ over all steps since the strategy began, s_t = θ_t − θ_{t−1}",
                "[0, ∞)",
                "How far the parameters have gone, there and back included.",
            ),
            MetricInfo(
                "displacement",
                "‖θ_t − θ_0‖₂, θ_0 the parameters as the strategy began",
                "[0, path_length]",
                "How far they have got; small against ‖θ_0‖: the lazy regime.",
            ),
            MetricInfo(
                "efficiency",
                "displacement / path_length; NaN before anything has moved",
                "[0, 1]",
                "1: a straight line; n independent steps of equal length give 1/√n; falling while the path grows: "
                "wandering or oscillating.",
            ),
            MetricInfo("steps", "the number n of steps on the path", "1, 2, …", "For comparing efficiency with 1/√n."),
            MetricInfo(
                "interval_path",
                "Σ ‖s_t‖₂ over the steps of the interval: an epoch, in the step loop since the last SNAPSHOT",
                "[0, ∞)",
                "Follows the learning rate; rises without it: the steps grow.",
            ),
            MetricInfo(
                "interval_displacement",
                "‖θ_t − θ at the interval's beginning‖₂",
                "[0, interval_path]",
                "What remains of the interval's steps.",
            ),
            MetricInfo(
                "interval_efficiency",
                "interval_displacement / interval_path; NaN if nothing moved",
                "[0, 1]",
                "Near 1: the steps agree; near 1/√(steps of the interval): they are noise.",
            ),
            MetricInfo("mean_step", "interval_path / steps of the interval", "[0, ∞)", "The length of a usual step."),
            MetricInfo(
                "turn_cosine",
                "mean over the steps of the interval of cos(s_t, s_{t−1}), without turns beside a step of length zero",
                "[−1, 1]",
                "Near 1: straight on; 0: each step forgets the last; below 0: back and forth across a valley. Momentum "
                "alone makes it positive.",
            ),
            MetricInfo(
                "turn_angle",
                "mean of arccos cos(s_t, s_{t−1}) over the same turns",
                "[0, π] radians",
                "0: straight on; π/2: at a right angle; π: back.",
            ),
            MetricInfo("step_length", "‖s_t‖₂ of one step (per_step)", "[0, ∞)", "A spike: one step went far."),
            MetricInfo(
                "step_cosine",
                "cos(s_t, s_{t−1}) of one step, from the second on (per_step)",
                "[−1, 1]",
                "Below 0: the step takes back some of the one before; NaN: one of them has length zero.",
            ),
        ]
