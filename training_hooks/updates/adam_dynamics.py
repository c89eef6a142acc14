"""The dynamics of Adam: moments, the resulting update, effective learning rates, weight decay."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
from loopscope import HookPoint, HookRegistry, InterventionHook, Remembered, RunDataContext, StepSchedule
from loopscope.errors import UnsuitableError, require
from loopscope.hooks import MetricInfo, Metrics, ModelDataContext, OptimizerGroup, RunInfo
from loopscope.tensors import cosine_of, inner_products, live_gradients, norms_of, trainable, unsharded
from torch import Tensor

from ..measures import refuse_complex, refuse_missing_rates, spread_indices

Reading = tuple["Sums", Tensor]
PIECE = 2**17  # elements that are processed together, so that they stay in a processor's cache
OPTIONS = {
    "betas": None,
    "eps": None,
    "decoupled_weight_decay": False,
    "amsgrad": False,
    "maximize": False,
    "fused": None,
}
"""Options that a step of Adam depends on, besides learning rate and weight decay; other options of a group may not be
plain values, and so are not kept."""
PERCENTILES = {"effective_lr_p10": 0.1, "effective_lr_median": 0.5, "effective_lr_p90": 0.9}


def square_norm(tensor: Tensor) -> Tensor:
    """Return the squared norm of a tensor, zero-dimensional."""
    return norms_of([tensor])[0].square()


def inner_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product of two tensors, zero-dimensional."""
    return inner_products([(a, b)])[0]


@dataclass(frozen=True)
class Update:
    """The last step of some parameters; every tensor is flat, shape (elements,)."""

    moment: Tensor
    """m̂, the first moment with bias correction."""
    root: Tensor
    """√v̂, the root of the second moment with bias correction."""
    denominator: Tensor
    """√v̂+ε, rounded like the optimizer's."""
    adaptive: Tensor
    """−η·m̂/(√v̂+ε)."""
    decay: Tensor | None
    """−ηλθ₋; ``None`` without decoupled weight decay."""
    before: Tensor
    """θ₋, the parameters before the step."""

    @property
    def total(self) -> Tensor:
        """Δθ, the change of the parameters."""
        return self.adaptive if self.decay is None else self.adaptive + self.decay


@torch.no_grad()
def flatten_together(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors of one device to shape (elements,), in float32 or wider; sharded tensors are gathered."""
    vector = torch.cat([unsharded(tensor.detach()).flatten() for tensor in tensors])
    return vector.to(torch.promote_types(vector.dtype, torch.float32))


@torch.no_grad()
def adam_update(parameters: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]], group: OptimizerGroup) -> Update:
    """Reconstruct the update that Adam has just made to parameters of one group and one device.

    With amsgrad, v is the running maximum of the second moments (arXiv 1904.09237); like torch, this takes the maximum
    before the bias correction.

    Args:
        parameters: θ, the parameters after the step.
        states: their optimizer states after the step.
        group: the settings of their group at the step.
    """
    before = flatten_together(parameters)
    steps = torch.stack([unsharded(state["step"]).double() for state in states])
    sizes = [parameter.numel() for parameter in parameters]
    # m̂ = m/(1 − β₁ᵗ) and √v̂ = √v/√(1 − β₂ᵗ); t may differ between parameters, so the corrections have a value for
    # every element, shape (elements,)
    first, second = (_repeated(1 - float(beta) ** steps, sizes, before) for beta in group.options["betas"])
    squares = "max_exp_avg_sq" if group.options["amsgrad"] else "exp_avg_sq"
    moment = flatten_together([state["exp_avg"] for state in states]).div_(first)
    root = flatten_together([state[squares] for state in states]).sqrt_().div_(second.sqrt_())
    denominator = root + group.options["eps"]
    if not group.options.get("fused") and any(state[squares].element_size() < 4 for state in states):
        denominator = flatten_together([_rounded_denominator(state, squares, group) for state in states])
    # θ₋ = (θ + η·m̂/(√v̂+ε)) / (1 − ηλ) with decoupled decay (arXiv 1711.05101), θ + η·m̂/(√v̂+ε) without
    adaptive = torch.div(moment, denominator).mul_(-group.lr)
    before.sub_(adaptive)
    shrinkage = group.lr * group.weight_decay
    if not (group.options["decoupled_weight_decay"] and shrinkage):
        return Update(moment, root, denominator, adaptive, None, before)
    before.div_(1 - shrinkage)
    return Update(moment, root, denominator, adaptive, -shrinkage * before, before)


def _repeated(values: Tensor, counts: Sequence[int], like: Tensor) -> Tensor:
    """Repeat each value as often as ``counts`` says, on the device of ``like``; values of the host are not copied."""
    if values.is_cpu:
        return torch.cat([like.new_full((count,), value) for value, count in zip(values.tolist(), counts, strict=True)])
    return torch.cat([value.expand(count) for value, count in zip(values.to(like), counts, strict=True)])


def _rounded_denominator(state: Mapping[str, Tensor], squares: str, group: OptimizerGroup) -> Tensor:
    """Return √v̂ + ε as torch computes it in the dtype of v, where a small ε rounds to 0 in float16."""
    correction = (1 - float(group.options["betas"][1]) ** unsharded(state["step"]).double()).sqrt()
    return (state[squares].sqrt() / correction).add_(group.options["eps"])


@lru_cache(maxsize=8)
def _levels(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the levels of the percentiles; cached, since every copy to a device waits for it."""
    return torch.tensor(list(PERCENTILES.values()), dtype=dtype, device=device)


@dataclass(frozen=True)
class Sums:
    """Sums over the elements of parameters, zero-dimensional each: squared norms, inner products and counts."""

    first: Tensor
    second: Tensor
    update: Tensor
    adaptive: Tensor
    decay: Tensor
    gradient: Tensor
    coupled_decay: Tensor
    update_gradient: Tensor
    moment_gradient: Tensor
    below_eps: Tensor
    elements: Tensor
    distance: Tensor
    update_distance: Tensor
    gradient_distance: Tensor


def compute_sums(update: Update, gradient: Tensor, group: OptimizerGroup, reference: Tensor | None) -> Sums:
    """Return the sums of an update; terms without decay or reference are 0.

    Args:
        update: the update of some parameters.
        gradient: their gradients, shape (elements,).
        group: the settings of their group.
        reference: their values in the reference solution, shape (elements,).
    """
    total = update.total
    gradient = -gradient if group.options["maximize"] else gradient
    zero = gradient.new_zeros(())
    remaining = None if reference is None else reference - update.before  # d = θ_ref − θ₋
    # Adam(weight_decay=λ) adds λθ₋ to the gradient: ‖λθ₋‖² = λ²·‖θ₋‖².
    coupled = 0.0 if group.options["decoupled_weight_decay"] else group.weight_decay**2
    return Sums(
        first=square_norm(update.moment),
        second=square_norm(update.root),
        update=square_norm(total),
        adaptive=square_norm(update.adaptive),
        decay=zero if update.decay is None else square_norm(update.decay),
        gradient=square_norm(gradient),
        coupled_decay=coupled * square_norm(update.before) if coupled else zero,
        update_gradient=inner_product(total, gradient),
        moment_gradient=inner_product(update.moment, gradient),
        # ε is the rest of the denominator, as the optimizer rounds it
        below_eps=torch.count_nonzero(2 * update.root < update.denominator),
        elements=zero + gradient.numel(),
        distance=zero if remaining is None else square_norm(remaining),
        update_distance=zero if remaining is None else inner_product(total, remaining),
        gradient_distance=zero if remaining is None else inner_product(gradient, remaining),
    )


def add_up(parts: Sequence[Sums]) -> Sums:
    """Add up the sums of several sets of parameters, on the device of the first."""
    device = parts[0].first.device
    rows = [torch.stack([value.to(device) for value in vars(part).values()]) for part in parts]
    return Sums(*torch.stack(rows).sum(dim=0))


def moment_metrics(sums: Sums, rates: Tensor) -> dict[str, Tensor]:
    """Return the metrics of a set of parameters.

    Args:
        sums: the sums over the parameters.
        rates: a sample of their effective learning rates, shape (samples,).
    """
    first, second, update, gradient = (value.sqrt() for value in (sums.first, sums.second, sums.update, sums.gradient))
    decay, coupled = sums.decay.sqrt(), sums.coupled_decay.sqrt()
    levels = _levels(rates.dtype, rates.device)
    update_gradient = cosine_of(-sums.update_gradient, sums.update, sums.gradient)
    # decay_share = ‖ηλθ₋‖/(‖ηλθ₋‖ + ‖η·m̂/(√v̂+ε)‖)
    return {
        "first_moment_norm": first,
        "second_moment_norm": second,
        "moment_ratio": first / second,
        "update_norm": update,
        "update_gradient_cosine": update_gradient,
        "moment_gradient_cosine": cosine_of(sums.moment_gradient, sums.first, sums.gradient),
        "below_eps_fraction": sums.below_eps / sums.elements,
        "decay_share": decay / (decay + sums.adaptive.sqrt()),
        "coupled_decay_share": coupled / (coupled + gradient),
        **dict(zip(PERCENTILES, torch.quantile(rates, levels), strict=True)),
    }


def solution_metrics(sums: Sums) -> dict[str, Tensor]:
    """Return the metrics of update and gradient relative to d, the vector from the parameters to the reference."""
    # cos(Δθ, d), cos(−g, d), and Δθ·d/‖d‖², from the sums Δθ·d, g·d and ‖d‖²
    return {
        "update_solution_cosine": cosine_of(sums.update_distance, sums.update, sums.distance),
        "gradient_solution_cosine": cosine_of(-sums.gradient_distance, sums.gradient, sums.distance),
        "solution_gain": sums.update_distance / sums.distance,
    }


def effective_rates(denominator: Tensor, group: OptimizerGroup, share: float) -> Tensor:
    """Return η/(√v̂ + ε) of an evenly spread ``share`` of the elements, at least one; shape (samples,).

    Args:
        denominator: √v̂ + ε, shape (elements,).
        group: the settings of the parameter group.
        share: share of the elements to take; 1 or more takes all.
    """
    if share < 1:
        count = len(denominator)
        denominator = denominator[spread_indices(count, math.ceil(share * count)).to(denominator.device)]
    return group.lr / denominator


def split_into_pieces(parameters: Mapping[str, Tensor]) -> list[list[str]]:
    """Split parameters into pieces of one device with at most ``PIECE`` elements, or with one larger parameter."""
    pieces: list[list[str]] = []
    size, device = 0, None
    for name, parameter in parameters.items():
        if parameter.device != device or size + parameter.numel() > PIECE:
            pieces.append([])
            size = 0
        pieces[-1].append(name)
        size, device = size + parameter.numel(), parameter.device
    return pieces


MOMENTS = """
    first_moment_norm | ‖m̂‖₂ | [0, ∞) | The gradient that persists over about 1/(1−β₁) steps.
    second_moment_norm | ‖√v̂‖₂ | [0, ∞) | The root mean square gradient of about the last 1/(1−β₂) steps.
    moment_ratio | ‖m̂‖₂ / ‖√v̂‖₂ | [0, ∞), NaN | Near 1: gradients agree from step to step (always so at the first
        step). Near √((1−β₁)/(1+β₁)), 0.23 at β₁ = 0.9: they are noise. Above 1: the gradients have just grown.
    update_norm | ‖Δθ‖₂ | [0, ∞) | The length of the step that Adam has computed, including weight decay. Above the
        measured one (total_update_norm of parameter_norms): the precision of the weights rounds a part of it away.
    update_gradient_cosine | cos(Δθ, −g) | [−1, 1], NaN
        | Positive: the step goes downhill on this batch. Small: preconditioning and momentum turn the step away from
        the negative gradient.
    moment_gradient_cosine | cos(m̂, g) | [−1, 1], NaN
        | Agreement of this batch with the average over this and earlier batches.
    below_eps_fraction | elements with √v̂ < ε / all elements | [0, 1]
        | For these elements ε determines the size of the step, and Adam acts like SGD with momentum at learning rate
        η/ε. High: embedding rows that do not occur, dead units, or an ε that is too large.
    decay_share | ‖ηλθ₋‖₂ / (‖ηλθ₋‖₂ + ‖η·m̂/(√v̂+ε)‖₂), over groups with decoupled decay in the numerator | [0, 1], NaN
        | Above 1/2: weight decay moves the weights more than the gradient does. Omitted without decoupled decay.
    coupled_decay_share | ‖λθ₋‖₂ / (‖λθ₋‖₂ + ‖g‖₂), over groups with Adam(weight_decay=λ) in the first norms | [0, 1]
        | The share of weight decay in the input of the moments. Omitted without coupled decay.
"""
RATE = """
    {name} | {level:.0%} quantile over elements of η/(√v̂ + ε) | [0, ∞] | The effective learning rate of an element of m̂.
        p90/p10 is the spread of the preconditioner; SGD with momentum has 1.
"""
SOLUTION = """
    update_solution_cosine | cos(Δθ, d), d = θ_ref − θ₋ | [−1, 1], NaN
        | Only with a reference solution. Positive: the step goes towards it.
    gradient_solution_cosine | cos(−g, d) | [−1, 1], NaN
        | Positive: plain gradient descent would go towards it. Below update_solution_cosine: the direction of Adam is
        better.
    solution_gain | Δθ·d / ‖d‖² | (−∞, ∞) | The share of the distance to the reference that the step covers; its inverse
        is the number of steps that remain at this pace.
"""


@HookRegistry.register
class AdamDynamics(InterventionHook):
    """Read Adam's moments and measure the update: its direction, its effective learning rates and its weight decay.

    The update is the step that the optimizer has just made, Δθ = −η·(m̂/(√v̂+ε) + λθ₋) for AdamW and
    Δθ = −η·m̂/(√v̂+ε) for Adam, whose gradient includes the weight decay. θ₋ are the parameters before the step, m̂ and
    v̂ the moments with bias correction, and η, λ, ε the settings of each parameter's group at that step (read before the
    scheduler changes the learning rate). g is the gradient that the optimizer received, negated with ``maximize``. The
    hook omits parameters without a gradient in the step, since they did not move, and those of other optimizers.

    Assumes torch.optim.Adam, AdamW or a subclass with the same update rule, in any implementation (foreach, fused,
    amsgrad), and that no committing hook has changed parameters since the step. Δθ is the update that Adam computes;
    parameters in bfloat16 or float16 lose a part of it to rounding. For moments in these dtypes √v̂ + ε is rounded as
    in torch, except with ``fused``: in float16 an ε of 1e-8 is 0, and Δθ is NaN where v̂ and m̂ are 0. Takes the memory
    of ten copies of the largest parameter, or of 131,072 elements.

    Args:
        every_n_steps: steps between two reports.
        sample: largest number of elements, spread evenly over all parameters, from which the percentiles are computed.
    """

    name = "adam_dynamics"
    hook_points = frozenset({HookPoint.PRE_UPDATE, HookPoint.POST_STEP})
    intervention_points = frozenset({HookPoint.POST_STEP})
    mutates = False
    uses_reference_weights = True
    _step = Remembered(int)
    _groups = Remembered(list[dict[str, Any]])  # the optimizer's groups at that step, as plain values
    metrics = MOMENTS + "".join(RATE.format(name=name, level=level) for name, level in PERCENTILES.items()) + SOLUTION

    def __init__(self, *, every_n_steps: int = 100, sample: int = 8192) -> None:
        require(sample >= 1, f"adam_dynamics.sample is {sample}; it must be at least 1.")
        self.step_schedule = StepSchedule(mode="stride", every_n_steps=every_n_steps)
        self.sample = sample

    def start(self, run: RunInfo) -> None:
        """Check that the optimizer, or one of several, is Adam or AdamW.

        Raises:
            UnsuitableError: if none is, or a parameter is complex.
        """
        if not any(issubclass(kind, torch.optim.Adam) for kind in run.optimizer_classes):
            names = " and ".join(kind.__name__ for kind in run.optimizer_classes)
            raise UnsuitableError(
                "Hook 'adam_dynamics' reads the moments of torch.optim.Adam or AdamW, but the optimizer of this run is "
                f"{names}; leave the hook out, or train with Adam or AdamW."
            )
        groups = [group for group in run.optimizer_groups if issubclass(group.optimizer_class, torch.optim.Adam)]
        refuse_missing_rates(self.name, "reads", groups)
        refuse_complex(self.name, run)
        if any(group.betas is None or "eps" not in group.options for group in groups):
            names = " and ".join(dict.fromkeys(group.optimizer_class.__name__ for group in groups))
            raise UnsuitableError(
                f"Hook 'adam_dynamics' reads betas and eps of Adam, which a parameter group of {names} lacks; leave "
                "the hook out, or train with Adam or AdamW."
            )

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Keep the optimizer's settings before its step."""
        groups = [
            replace(group, options={name: group.options.get(name, default) for name, default in OPTIONS.items()})
            for group in ctx.optimizer_groups
            if issubclass(group.optimizer_class, torch.optim.Adam)
        ]
        # Without the class, since a checkpoint holds only plain values.
        fields = [{key: item for key, item in asdict(group).items() if key != "optimizer_class"} for group in groups]
        self._step, self._groups = ctx.step, fields
        return {}

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Metrics:
        """Return the metrics of the step just made; nothing if no parameter had a gradient."""
        if self._step != run_ctx.step:
            return {}
        group_readings = [self._read(OptimizerGroup(**group), run_ctx, model_ctx) for group in self._groups]
        if not any(group_readings):
            return {}
        solution = run_ctx.reference_weights is not None
        metrics: dict[str, Any] = self._metrics([*chain.from_iterable(group_readings)], solution=solution)
        if len(group_readings) > 1:
            by_group = {
                str(number): self._metrics(readings, solution=solution)
                for number, readings in enumerate(group_readings)
                if readings
            }
            metrics |= {
                f"group_{name}": {number: values[name] for number, values in by_group.items()} for name in list(metrics)
            }
        return metrics

    def _read(self, group: OptimizerGroup, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> list[Reading]:
        """Measure, piece by piece, the parameters of a group that the last step moved."""
        states, reference = model_ctx.optimizer_state, run_ctx.reference_weights
        parameters = trainable(run_ctx.model)
        share = self.sample / sum(parameter.numel() for parameter in parameters.values())
        with_state = [name for name in group.names if name in parameters and states.get(name)]
        readings = []
        for names in split_into_pieces(
            {name: parameters[name] for name in with_state if parameters[name].grad is not None}
        ):
            moved = [parameters[name] for name in names]
            update = adam_update(moved, [states[name] for name in names], group)
            target = None if reference is None else flatten_together([reference[name] for name in names])
            sums = compute_sums(update, flatten_together(live_gradients(moved)), group, target)
            readings.append((sums, effective_rates(update.denominator, group, share)))
        return readings

    def _metrics(self, readings: Sequence[Reading], *, solution: bool) -> dict[str, Tensor]:
        """Return the metrics of a set of parameters, without those that do not apply to this optimizer or run."""
        sums = add_up([sums for sums, _ in readings])
        metrics = moment_metrics(sums, torch.cat([rates.to(sums.first.device) for _, rates in readings]))
        if not any(group["options"]["decoupled_weight_decay"] for group in self._groups):
            del metrics["decay_share"]
        if not any(group["weight_decay"] and not group["options"]["decoupled_weight_decay"] for group in self._groups):
            del metrics["coupled_decay_share"]
        return metrics | (solution_metrics(sums) if solution else {})

    def describe_metrics(self) -> Sequence[MetricInfo]:
        """Describe the metrics over all parameters, then those by group, which are reported if there are several."""
        infos = [*super().describe_metrics()]
        for info in infos[:]:
            formula = f"by number of the parameter group, over its parameters: {info.formula}"
            reading = f"As {info.name}; only with several parameter groups."
            infos.append(replace(info, name=f"group_{info.name}", formula=formula, reading=reading))
        return infos
