"""Averages of the weights: exponential (EMA), and equal over the last part of the run (SWA)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, StepSchedule, TrainingHook
from loopscope.durable_files import save_tensors
from loopscope.errors import UnsuitableError, UsageError, require, unknown
from loopscope.hooks import MetricInfo, Metrics, Remembering, RunInfo, metric_table
from loopscope.tensors import fully_sharded_modules, is_sharded, local_shards, norm, trainable, unsharded
from torch import Tensor, nn

from ..measures import sharded_like
from .shadow_copies import ShadowCopies, floating_buffers, refuse_factors, step_markers
from .smoothing import distance


class Average(Remembering):
    """The average of the sampled weights, step i with the factor dᵗ⁻ⁱ, t the last sampled step.

    d = 1 is the equal average of SWA (arXiv 1803.05407). d < 1 is an exponential moving average with bias correction,
    like Adam's moments: the initial values have no weight, and the first average is the first sample. The decay is per
    step, for any distance of the samples.

    The average covers the parameters that are trained at the first sample, and all floating-point buffers, such as
    the statistics of batch normalisation. It is in float32 or wider, since a bfloat16 average would not move at d =
    0.999. For a DTensor it is this rank's shard.
    """

    samples = Remembered(int)
    last_step = Remembered(int)
    _total = Remembered(float)
    _copies = Remembered(ShadowCopies, merged=True)
    _parameters = Remembered(dict[str, nn.Parameter], saved=False)

    def __init__(self, decay: float) -> None:
        self.decay = decay

    @torch.no_grad()
    def sample(self, model: nn.Module, step: int) -> None:
        """Include the weights after ``step`` in the average."""
        # With W_t = Σ dᵗ⁻ⁱ over the samples, θ̄ ← θ̄ + (θ − θ̄) / W_t.
        buffers = floating_buffers(model)
        self._total = self._total * self.decay ** (step - self.last_step) + 1
        self.samples, self.last_step = self.samples + 1, step
        if self.samples == 1:
            self._copies.take(model, trainable(model) | buffers, widen=True)
            return
        copies = self._copies.copies
        if not self._parameters:
            self._parameters = {name: value for name, value in model.named_parameters() if name in copies}
        live = local_shards(self._parameters.values())
        with step_markers(live):
            _move(local_shards(copies[name] for name in self._parameters), live, 1 / self._total)
            for name, buffer in buffers.items():
                _move_buffer(copies, name, buffer, 1 / self._total)

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the averages by name, as DTensors for sharded tensors; the next sample changes them."""
        live = {**dict(model.named_parameters()), **floating_buffers(model)}
        return self._copies.of(name for name in self._copies.copies if name in live)

    def fit(self, model: nn.Module) -> None:
        """Move loaded averages to the model's devices; raises ``ValueError`` if they belong to another model."""
        if self.samples:
            self._copies.fit(model, widen=True)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume with the averages of :meth:`state_dict`; :meth:`fit` rejects averages of another model."""
        super().load_state_dict(state)
        self._parameters = {}


def _move(averages: list[Tensor], live: list[Tensor], weight: float) -> None:
    """Move averages towards tensors of the same or a narrower dtype, in place."""
    # lerp_ needs equal dtypes, so only such pairs share one call of the private torch._foreach_lerp_.
    pairs = list(zip(averages, live, strict=True))
    alike = [pair for pair in pairs if pair[0].dtype is pair[1].dtype]
    if alike:
        torch._foreach_lerp_([average for average, _ in alike], [tensor for _, tensor in alike], weight)
    for average, tensor in pairs if len(alike) < len(pairs) else ():
        if average.dtype is not tensor.dtype:
            average.lerp_(tensor.to(average.dtype), weight)


def _move_buffer(averages: dict[str, Tensor], name: str, buffer: Tensor, weight: float) -> None:
    """Move the average of a buffer; constant elements stay exact, even the −∞ of a mask.

    A new buffer, or one that has changed its shape, starts a new average.
    """
    average, live = local_shards([averages.get(name, buffer), buffer])
    wide = live.to(torch.promote_types(live.dtype, torch.float32))
    if name not in averages or average.shape != wide.shape:
        averages[name] = sharded_like(wide.clone(), buffer)
    else:
        average.copy_(torch.where(average == wide, wide, average.lerp(wide, weight)))


def averaged_state_dict(model: nn.Module, averages: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the model's state dict with averages in place of its tensors, with its names and dtypes.

    Tensors without an average (frozen parameters, counters) have their current values. All ranks gather sharded
    tensors.
    """
    live = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = {id(tensor): name for name, tensor in live.items()}
    # keep_vars returns the parameters themselves, whose identity leads to the names of the averages.
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    for key, value in state.items():
        if isinstance(value, Tensor):
            average = averages.get(names.get(id(value), ""), value)
            state[key] = unsharded(average.detach()).to(value.dtype)
    return state


KINDS = {"ema": "the exponential moving average", "swa": "the equal average (SWA)"}
AVERAGE = """
    {kind} | the results of the experiment's evaluation, by name, with {label} in place of the weights
        | the range of the evaluation | Compare with the evaluation of the same step. Better: the run oscillates around
        a better point than its current one. Worse early in the run: the average lags behind.
    {kind}_distance | ‖θ̄ − θ‖₂ over the averaged parameters, θ̄ {label} as of its last update | [0, ∞)
        | Distance of the average from the live weights: lag plus oscillation. Shrinks with the learning rate.
    {kind}_relative_distance | ‖θ̄ − θ‖₂ / ‖θ‖₂ | [0, ∞], NaN
        | Near 0: the average equals the model. Above about 0.1: it lags or spans a valley; judge it by its evaluation.
    {kind}_samples | number of updates in {label} | 1, 2, 3, … | Few: hardly an average.
"""
"""The metrics of one average θ̄; θ are the live weights at SNAPSHOT."""


@HookRegistry.register
@dataclass(kw_only=True, eq=False)
class WeightAverage(TrainingHook):
    """Average the weights over the steps, exponentially (EMA) and equally over the last part of the run (SWA).

    The live weights are never changed. At SNAPSHOT the experiment's evaluation runs with each average, on the same
    random stream as for the live weights. The end of the run writes the averages to STRATEGY_ema.pt and
    STRATEGY_swa.pt in its folder, as state dicts of the model with its dtypes.

    EMA: θ̄ = Σ dᵗ⁻ⁱθᵢ / Σ dᵗ⁻ⁱ over the updates i so far. The decay d is per step, for any distance of the updates, and
    the initial values have no weight. SWA: the mean of the weights from `swa_start` on. Floating-point buffers, such
    as the statistics of batch normalisation, are averaged in the same way; counters have the values of the live model.

    Assumes that the parameters that are trained at the first update are those of interest: parameters that are thawed
    later have no average. Each average needs a copy of them in float32 or wider. Under FSDP2 there is no evaluation,
    since its wrappers keep references to their parameters.

    Args:
        decay: d, per step, in (0, 1).
        interval: steps between two updates, of either average.
        swa_start: the first step of SWA, or, below 1, a share of the planned steps.
        swa_interval: steps between two samples of SWA; rounded up to a multiple of ``interval``.
        averages: the averages to keep: ``ema``, ``swa`` or ``both``.
        evaluate: whether to evaluate the averages.
        evaluate_every: SNAPSHOTs between two evaluations; the last SNAPSHOT of the run is always evaluated.
    """

    name = "weight_average"
    has_fixed_schedule = True
    hook_points = frozenset({HookPoint.POST_STEP, HookPoint.SNAPSHOT})
    _snapshots = Remembered(int)
    _averages = Remembered(
        lambda hook: {kind: Average(decay) for kind, decay in hook.decays.items()}, by_options=True, saved=False
    )

    decay: float = 0.999
    interval: int = 10
    swa_start: float = 0.75
    swa_interval: int = 10
    averages: Literal["ema", "swa", "both"] = "both"
    evaluate: bool = True
    evaluate_every: int = 5

    def __post_init__(self) -> None:
        interval, start, every = self.interval, self.swa_start, self.evaluate_every
        require(0 < self.decay < 1, f"weight_average.decay is {self.decay}; it must be between 0 and 1.")
        for option, value in {"interval": interval, "swa_interval": self.swa_interval}.items():
            require(value >= 1, f"weight_average.{option} is {value}; it must be at least 1 step.")
        require(every >= 1, f"weight_average.evaluate_every is {every}; it must be at least 1.")
        sentence = f"weight_average.swa_start is {start}; it must be a share of the steps in [0, 1) or a whole step."
        require(0 <= start < 1 or (start >= 1 and float(start).is_integer()), sentence)
        decays = {"ema": self.decay, "swa": 1.0}
        if self.averages not in (*decays, "both"):
            raise unknown("choice of weight_average.averages:", self.averages, [*decays, "both"])
        self.decays = decays if self.averages == "both" else {self.averages: decays[self.averages]}
        self.step_schedule = StepSchedule(mode="stride", every_n_steps=interval, warmup=interval - 1)
        self._run: RunInfo | None = None

    def start(self, run: RunInfo) -> None:
        """Reject a model without trained parameters, and averages from another model's checkpoint."""
        if not trainable(run.model):
            raise UnsuitableError("Hook 'weight_average' needs trained parameters; the model has none.")
        refuse_factors(self.name, "averages", run.model)
        self._run = run
        try:
            for average in self._averages.values():
                average.fit(run.model)
        except ValueError as error:
            raise UsageError(f"Hook 'weight_average' cannot resume from its checkpoint. {error}") from error

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Include the weights after a step; at SNAPSHOT compare the averages with the live weights."""
        if ctx.hook_point is HookPoint.SNAPSHOT:
            return self._compare(ctx)
        for kind, average in self._averages.items():
            if kind == "swa" and ctx.step < self._swa_from:
                average.reset()  # the plan has grown, for example by fewer micro-batches per step
                continue
            if kind == "ema" or not average.samples or ctx.step - average.last_step >= self.swa_interval:
                average.sample(ctx.model, ctx.step)
        return {}

    @property
    def _swa_from(self) -> int:
        """The first step of SWA; a share of the planned steps moves with the plan."""
        planned = 0 if self._run is None else self._run.steps
        return math.ceil(self.swa_start * planned) if self.swa_start < 1 else int(self.swa_start)

    def _compare(self, ctx: RunDataContext) -> Metrics:
        metrics: dict[str, Any] = {}
        live = dict(ctx.model.named_parameters())
        self._snapshots += 1
        is_last = self._run is not None and ctx.step == self._run.steps
        due = self.evaluate and (is_last or self._snapshots % self.evaluate_every == 0)
        can_evaluate = due and not fully_sharded_modules(ctx.model)
        for kind, average in self._averages.items():
            if average.samples:
                weights = average.weights(ctx.model)
                averaged = {name: live[name] for name in weights if name in live}
                gap = distance(averaged, weights)
                metrics |= {f"{kind}_distance": gap, f"{kind}_relative_distance": gap / norm(averaged)}
                metrics[f"{kind}_samples"] = average.samples
                results = ctx.evaluate(weights) if can_evaluate else {}
                metrics |= {kind: results} if results else {}
        return metrics

    @classmethod
    def file_names(cls, strategy: str) -> Sequence[str]:
        """Return the file names of both averages."""
        return [average_name(strategy, kind) for kind in KINDS]

    def end(self, status: str) -> None:
        """Write the averages to the run's folder, if any; for a sharded model on rank 0 and only of a completed run."""
        run = self._run
        if run is None or not run.output_dir.is_dir():
            return
        sharded = any(map(is_sharded, run.model.parameters()))
        if sharded and status != "completed":
            return  # gathering shards would wait for ranks that may have failed
        for kind, average in self._averages.items():
            if average.samples:
                state = averaged_state_dict(run.model, average.weights(run.model))
                if not sharded or torch.distributed.get_rank() == 0:
                    save_tensors(state, run.output_dir / average_name(run.strategy, kind))

    def state_dict(self) -> dict[str, Any]:
        """Return the averages and the number of SNAPSHOTs so far."""
        return super().state_dict() | {kind: average.state_dict() for kind, average in self._averages.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from :meth:`state_dict`, with the averages that this hook keeps."""
        self.reset()
        super().load_state_dict({"snapshots": 0, **state})
        for kind, average in self._averages.items():
            if kind in state:
                average.load_state_dict(state[kind])

    def describe_metrics(self) -> Sequence[MetricInfo]:
        """Describe the metrics of each average."""
        return metric_table("".join(AVERAGE.format(kind=kind, label=KINDS[kind]) for kind in self.decays))


def average_name(strategy: str, kind: str) -> str:
    """Return the file name of a strategy's averaged weights."""
    return f"{strategy}_{kind}.pt"
