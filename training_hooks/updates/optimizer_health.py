"""Second moments of the optimizer against the gradient, and updates against the learning rate."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from loopscope import HookPoint, HookRegistry, InterventionHook, Remembered, RunDataContext, StepSchedule
from loopscope.errors import UnsuitableError, counted, listed, require
from loopscope.hooks import Metrics, ModelDataContext, OptimizerGroup, RunInfo
from loopscope.tensors import groups_of, laid_out_like, local_shards, norm_of_each, over_shards, trainable
from torch import Tensor, nn

from ..measures import FamilyFile, SeriesBudget, WeightCopy, compute_once, gradient_norms, notice, stacked
from .second_moments import WITHOUT_MOMENTS, SecondMoment, coupled_decay, second_moment, square_of_epsilon, step_of

PIECE = 2**16
"""Elements that are processed together."""
SAME = 1e-4
"""The largest relative difference between the norms of a gradient before and after the step of an optimizer that has
not overwritten it; unscaling by a loss scaler may round."""
ROUNDING = 0.02
"""Tolerance of the upper bound of g²/v̂, for moments in bfloat16."""
Numbers = dict[str, float]


@torch.no_grad()
def ratio_sums(gradient: Tensor, moment: SecondMoment, floor: float) -> tuple[Tensor, Tensor]:
    """Return Σ g²/max(v̂, floor) and the number of elements with v̂ < floor, float64, zero-dimensional.

    An element with g = 0 and v̂ = 0 adds 0.

    >>> moment = SecondMoment(torch.tensor([4.0, 0.0]))
    >>> [value.item() for value in ratio_sums(torch.tensor([2.0, 1.0]), moment, 1.0)]
    [2.0, 1.0]
    """
    stored, gradient = moment.stored.reshape(-1), gradient.reshape(-1).to(moment.stored.dtype)
    least = max(floor, torch.finfo(stored.dtype).tiny)
    buffer = torch.empty_like(stored[:PIECE])
    squares, counts = [gradient.new_zeros((), dtype=torch.float64)], [gradient.new_zeros((), dtype=torch.int64)]
    # In pieces that stay in a processor's cache: half the time of whole tensors, and no memory of their size.
    for values, elements in zip(torch.split(stored, PIECE), torch.split(gradient, PIECE), strict=True):
        root = torch.div(values, moment.correction, out=buffer[: len(values)])
        if floor:
            counts.append(torch.count_nonzero(root < floor))
        # g/√v̂ is near 1, so that its square neither over- nor underflows where g² does.
        ratio = root.clamp_(min=least).rsqrt_().mul_(elements)
        squares.append(torch.dot(ratio, ratio).double())
    return torch.stack(squares).sum(), torch.stack(counts).sum().double()


def implied_rms(group: OptimizerGroup, step: float, weight_rms: float) -> float:
    """Return the RMS of an update that the learning rate η implies, with a moment of 1: η, or Adafactor's η·RMS(θ).

    Args:
        group: the settings of the parameter's group at the step.
        step: the number t of steps that the parameter has made.
        weight_rms: RMS(θ₋), the root mean square of the parameter before the step.
    """
    if issubclass(group.optimizer_class, torch.optim.Adafactor):  # max(ε₂, RMS(θ₋))·min(η, 1/√t)
        return max(float(group.options["eps"][1]), weight_rms) * min(group.lr, 1 / math.sqrt(step))
    if group.options.get("scale_parameter"):  # Adafactor of transformers
        return max(float(group.options["eps"][1]), weight_rms) * group.lr
    return group.lr


@HookRegistry.register
@dataclass(kw_only=True, eq=False)
class OptimizerHealth(InterventionHook):
    """Compare the gradient with the optimizer's second moments, and the update with the learning rate.

    g is the gradient that the optimizer received (PRE_UPDATE), v̂ its second moment after the step, with bias correction
    if the optimizer makes one, and Δθ the measured change of the weights, including weight decay. RMS(g/√v̂) of a tensor
    is near 1 while its gradients are like the recent ones. If it is well above 1, the second moment is out of date, and
    Adam's step is too large: in large models such spikes, above all of the embedding, precede spikes of the loss by a
    few steps (Wortsman et al., arXiv 2304.13013, section 3.4, who call it RMS_t). After t − 1 equal gradients, one that
    is c times as large gives c·√((1 − β₂ᵗ)/(β₂ − β₂ᵗ + (1 − β₂)·c²)) under Adam.

    Reads ``exp_avg_sq`` (Adam, AdamW, NAdam, RAdam and others), ``max_exp_avg_sq`` (amsgrad), ``square_avg`` (RMSprop,
    Adadelta) and the factored moments of Adafactor, whole or sharded. If weight decay λ is part of the gradient (Adam
    with weight_decay), g is g + λθ₋.

    Assumes that the optimizer averages the squares of the elements of g. Parameters are left out, and named in a
    notice, if they have no such state (Muon, quantised or rotated moments), or if the optimizer overwrites gradients.
    Keeps a copy of the trained parameters in float32 or wider from PRE_UPDATE to POST_STEP of a measured step, which it
    shares with ``parameter_norms`` and ``training_checks``.

    Args:
        interval: steps between two measurements; 1 to see spikes before those of the loss.
        names: glob patterns, separated by commas, of parameters to report in every family; ``*`` selects all.
        top: number of parameters with the largest values to report in each family.
        bottom: number of parameters with the smallest values to report in each family.
        write_all: write the values of all parameters to the file ``STRATEGY.optimizer_health.jsonl`` of the run.
    """

    name = "optimizer_health"
    hook_points = frozenset({HookPoint.PRE_UPDATE, HookPoint.POST_STEP})
    in_health = True
    intervention_points = frozenset({HookPoint.POST_STEP})
    mutates = False
    metrics = """
        gradient_rms_median | median over the parameters of gradient_rms; of an even count the mean of the middle two
            | [0, ∞) | Near 1: typical second moments are up to date. Exactly 1 at the first step of Adam, below 1
            while gradients shrink.
        gradient_rms_max | max over the parameters of gradient_rms | [0, ∞)
            | Above about 2.3 (the threshold of arXiv 2304.13013): a parameter gets much larger gradients than its
            second moment knows. If it happens often: lower β₂ or the learning rate, or clip. Rare rows of an embedding
            raise it without harm.
        below_eps_fraction | elements with v̂ < ε² (Adadelta: v̂ < ε) / all elements, over the parameters with an ε
            | [0, 1] | For these elements ε determines the step, so the optimizer acts like SGD. High in embeddings with
            rows that do not occur; elsewhere, or rising: gradients become too small for ε, reduce it.
        update_per_lr_median | median over the parameters of update_per_lr | [0, ∞]
            | 0.1 to 1 under Adam-type optimizers; it does not depend on the schedule of the learning rate.
        update_per_lr_max | max over the parameters of update_per_lr | [0, ∞]
            | Above about 1 under Adam: the update exceeds what the learning rate implies, in a spike of gradient_rms or
            through large weight decay.
        gradient_rms/<parameter> | √(mean over elements of g²/max(v̂, ε²)), Adadelta: g²/max(v̂, ε) | [0, ∞)
            | About 1, less in embeddings with rare tokens. Names the parameter in which a spike starts. Under Adam
            at most √((1−β₂ᵗ)/(1−β₂)), except for rounding.
        below_eps/<parameter> | elements with v̂ < ε² (Adadelta: v̂ < ε) / elements of the parameter | [0, 1]
            | 1: the complete parameter gets steps of SGD.
        update_per_lr/<parameter> | RMS(Δθ)/η, η the learning rate of the step, under Adafactor min(η, 1/√t)·max(ε₂,
            RMS(θ₋)); without groups of learning rate 0 or unknown | [0, ∞]
            | √((1−β₁)/(1+β₁)), 0.23 at β₁ = 0.9, if the gradients are noise, 1 if they agree from step to step; more
            where decoupled weight decay λ is large, so that λ·RMS(θ) counts. Near 0: no gradient, v̂ < ε², or an update
            that is clipped or rounded away.
    """

    interval: int = 50
    names: str = ""
    top: int = 5
    bottom: int = 3
    write_all: bool = False

    _file = Remembered(FamilyFile)
    _notices = Remembered(list[str])  # causes for which parameters were left out, each reported once
    # Values between the points of one step, and that step
    _step = Remembered(0, saved=False)
    _groups = Remembered[dict[str, OptimizerGroup]](dict, saved=False)  # the settings by parameter
    _norms = Remembered[dict[str, Tensor]](dict, saved=False)  # of the gradients
    _copy = Remembered[WeightCopy | None](None, saved=False)
    _sizes = Remembered[dict[str, int]](dict, saved=False)

    def __post_init__(self) -> None:
        require(self.interval >= 1, f"optimizer_health.interval is {self.interval}; it must be at least 1.")
        self._budget = SeriesBudget(self.name, self.names, self.top, self.bottom)
        self.step_schedule = StepSchedule(mode="stride", every_n_steps=self.interval)

    @classmethod
    def file_names(cls, strategy: str) -> Sequence[str]:
        """Return the name of the file with the values of all parameters."""
        return (FamilyFile.name(cls.name, strategy),)

    def start(self, run: RunInfo) -> None:
        """Check the optimizer and the patterns of names.

        Raises:
            UnsuitableError: if no optimizer of the run has second moments.
        """
        if all(issubclass(kind, WITHOUT_MOMENTS) for kind in run.optimizer_classes):
            names = " and ".join(kind.__name__ for kind in run.optimizer_classes)
            raise UnsuitableError(
                "Hook 'optimizer_health' reads second moments, such as those of Adam, RMSprop and Adafactor, but the "
                f"optimizer of this run is {names}; leave the hook out, or train with such an optimizer."
            )
        self._budget.check_names(trainable(run.model))
        if self.write_all:
            self._file.start(self.name, run)

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Keep settings, gradient norms and weights before the step."""
        norms = compute_once(ctx, gradient_norms)
        if not norms:
            return {}
        # At POST_STEP the scheduler has already set the learning rates of the next step.
        self._groups = {name: group for group in ctx.optimizer_groups for name in group.names}
        self._step, self._norms, self._copy = ctx.step, norms, WeightCopy.of(ctx.model)
        return {}

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Metrics:
        """Return the metrics of the step just made; nothing if no parameter had a gradient."""
        if self._step != run_ctx.step or self._copy is None:
            return {}
        parameters, columns, missing = self._measured_columns(run_ctx.model, model_ctx.optimizer_state, self._copy)
        self._leave_out(missing, "the optimizer keeps no second moment that the hook can read")
        families = self._families(parameters, columns, self._copy) if parameters else {}
        self._copy, self._groups, self._norms = None, {}, {}
        return self._metrics(run_ctx.step, families) if any(families.values()) else {}

    def _measured_columns(
        self, model: nn.Module, states: Mapping[str, Mapping[str, Any]], copy: WeightCopy
    ) -> tuple[dict[str, nn.Parameter], list[Tensor], list[str]]:
        """Measure the parameters one after the other.

        Returns:
            The measured parameters, for each a column of Σ g²/max(v̂, ε²), the number of elements with v̂ < ε², both of
            this rank's elements, and the number of steps t of the parameter; and the names without a second moment.
        """
        parameters, columns, missing = {}, [], []
        for name, parameter in trainable(model).items():
            if name not in self._groups or name not in self._norms or name not in copy or parameter.grad is None:
                continue
            group, state = self._groups[name], states.get(name, {})
            moment = second_moment(state, group, parameter)
            if moment is None:
                missing.append(name)
                continue
            gradient = _gradient_on_rank(parameter)
            if decay := coupled_decay(group):
                gradient = (-gradient if group.options.get("maximize") else gradient) + decay * copy[name]
            sums = ratio_sums(gradient, moment, square_of_epsilon(group, parameter.dtype))
            parameters[name] = parameter
            columns.append(torch.stack([*sums, _number_on(moment.stored.device, step_of(state, group))]))
        return parameters, columns, missing

    def _families(
        self, parameters: Mapping[str, nn.Parameter], columns: list[Tensor], copy: WeightCopy
    ) -> dict[str, Numbers]:
        """Return the values of all parameters by family, with one transfer to the host."""
        table = stacked(columns).T.contiguous()
        table[:2] = over_shards(table[:2].contiguous(), groups_of(parameters.values()))
        live = norm_of_each({name: value.grad for name, value in parameters.items() if value.grad is not None})
        before, after = (stacked(norms[name] for name in parameters).to(table) for norms in (self._norms, live))
        change, weight = copy.change_norms(parameters).to(table), copy.norms(parameters).to(table)
        rows = torch.cat([table, torch.stack([before, after, change, weight])]).T.tolist()
        families: dict[str, Numbers] = {"gradient_rms": {}, "below_eps": {}, "update_per_lr": {}}
        overwritten, misfits = [], []
        for (name, parameter), row in zip(parameters.items(), rows, strict=True):
            ratios, below, step, norm_before, norm_after, change_norm, weight_norm = row
            group, size = self._groups[name], parameter.numel()
            if abs(norm_after - norm_before) > SAME * norm_before:  # false for NaN
                overwritten.append(name)
                continue
            if ratios / size > _largest_ratio(group, step) * (1 + ROUNDING):
                misfits.append(name)
                continue
            families["gradient_rms"][name] = math.sqrt(ratios / size)
            if square_of_epsilon(group, parameter.dtype):
                families["below_eps"][name] = below / size
            if group.lr > 0:  # false for an unknown rate
                implied = implied_rms(group, step, weight_norm / math.sqrt(size))
                families["update_per_lr"][name] = change_norm / math.sqrt(size) / implied
        self._leave_out(overwritten, "the optimizer overwrites the gradient")
        self._leave_out(misfits, "the second moment is not an average of squared gradients")
        self._sizes = {name: parameter.numel() for name, parameter in parameters.items()}
        return families

    def _leave_out(self, names: Sequence[str], cause: str) -> None:
        """Report parameters that are left out, once for each cause."""
        if names and cause not in self._notices:
            self._notices.append(cause)
            notice(
                f"optimizer_health leaves out {counted(len(names), 'parameter')}, since {cause}: {listed(names, 3)}."
            )

    def _metrics(self, step: int, families: dict[str, Numbers]) -> Metrics:
        """Return the summaries, and the chosen members of each family."""
        metrics: dict[str, float] = {}
        for family in ("gradient_rms", "update_per_lr"):
            if values := families[family].values():
                metrics |= {f"{family}_median": median(values), f"{family}_max": largest(values)}
        if below := families["below_eps"]:
            # Σ_p n_p·f_p / Σ_p n_p
            total = sum(self._sizes[name] for name in below)
            metrics["below_eps_fraction"] = sum(self._sizes[name] * value for name, value in below.items()) / total
        if self.write_all:
            self._file.append(step, families)
        chosen = {family: self._budget.choose(values) for family, values in families.items()}
        return metrics | {
            f"{family}/{name}": families[family][name] for family, names in chosen.items() for name in names
        }


def largest(values: Collection[float]) -> float:
    """Return the largest value; NaN if any is NaN."""
    return math.nan if any(map(math.isnan, values)) else max(values)


def _largest_ratio(group: OptimizerGroup, step: float) -> float:
    """Return the upper bound of g²/v̂ if v̂ averages g² with weight 1 − β₂, and bias correction after t steps."""
    # v ≥ (1−β₂)·g², so g²/v̂ ≤ (1−β₂ᵗ)/(1−β₂)
    if group.betas is None or len(group.betas) < 2 or not step:
        return math.inf
    beta = group.betas[1]
    return (1 - beta**step) / (1 - beta) if beta < 1 else math.inf


def _number_on(device: torch.device, step: Any) -> Tensor:
    """Return a number of steps on a device, float64, without a copy of a number of the host."""
    if isinstance(step, Tensor) and step.device == device:
        return step.detach().reshape(()).double()
    return torch.full((), float(step or 0), dtype=torch.float64, device=device)


def _gradient_on_rank(parameter: nn.Parameter) -> Tensor:
    """Return this rank's part of a gradient, dense, in the layout of its parameter."""
    (part,) = local_shards([laid_out_like(parameter.grad, parameter)])
    return part.to_dense() if part.is_sparse else part
