"""What Adam makes of the gradients: moments, the update they give, effective learning rates, weight decay."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

import torch
from loopscope import HookPoint, HookRegistry, InterventionHook, Remembered, RunDataContext, StepSchedule
from loopscope.errors import UnsuitableError, require
from loopscope.hooks import MetricInfo, Metrics, ModelDataContext, OptimizerGroup, RunInfo
from loopscope.state import live_gradients, trainable, whole
from torch import Tensor

Reading = tuple["Sums", Tensor]
PIECE = 2**17  # elements that are worked on at once: small parameters together, in what a cache holds
OPTIONS = ("betas", "eps", "decoupled_weight_decay", "amsgrad", "maximize")
"""What a step of Adam depends on beside learning rate and decay; other options of a group may not be plain values."""
GOLDEN_RATIO = (5**0.5 - 1) / 2
PERCENTILES = {"effective_lr_p10": 0.1, "effective_lr_median": 0.5, "effective_lr_p90": 0.9}


def spread_indices(count: int, size: int) -> Tensor:
    """Return ``min(count, size)`` ascending, distinct indices below ``count``, one in each of as many equal stretches.

    Where in its stretch an index lies follows the golden ratio, so that no row length falls into step with it. The
    same on every machine and rank.
    """
    size = min(count, size)
    numbers = torch.arange(size + 1)
    borders = numbers * count // size
    within = (numbers * GOLDEN_RATIO).frac()[:-1] * borders.diff()
    return borders[:-1] + within.long()


def energy(tensor: Tensor) -> Tensor:
    """Return the squared norm of a tensor, zero-dimensional."""
    return torch.square(torch.linalg.vector_norm(tensor))


def inner(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product of two tensors, zero-dimensional."""
    return (a * b).sum()


@dataclass(frozen=True)
class Update:
    """The last step of some parameters, flat: m̂, √v̂, −η·m̂/(√v̂+ε), −ηλθ₋ (None: no decoupled decay) and θ₋."""

    moment: Tensor
    root: Tensor
    adaptive: Tensor
    decay: Tensor | None
    before: Tensor

    @property
    def total(self) -> Tensor:
        """Δθ, the change of the parameters."""
        return self.adaptive if self.decay is None else self.adaptive + self.decay


@torch.no_grad()
def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Join tensors of one device, the whole of each if it is sharded, in one dimension and in float32 or wider."""
    joined = torch.cat([whole(tensor.detach()).flatten() for tensor in tensors])
    return joined.to(torch.promote_types(joined.dtype, torch.float32))


@torch.no_grad()
def adam_update(parameters: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]], group: OptimizerGroup) -> Update:
    """Return the update that Adam has just made, from parameters of one group and device and their states after it.

    The parameters before the step are θ₋ = (θ + η·m̂/(√v̂+ε)) / (1 − ηλ) with decoupled decay (arXiv 1711.05101), and
    θ + η·m̂/(√v̂+ε) without. With amsgrad v is the running maximum of the second moments (arXiv 1904.09237); as in
    torch, the maximum is taken before the bias correction.
    """
    before = flat(parameters)
    steps = torch.stack([whole(state["step"]).double() for state in states])
    sizes = [each.numel() for each in parameters]
    corrections = ((1 - beta**steps).to(before) for beta in map(float, group.options["betas"]))
    first, second = (torch.cat([one.expand(n) for one, n in zip(each, sizes, strict=True)]) for each in corrections)
    squares = "max_exp_avg_sq" if group.options["amsgrad"] else "exp_avg_sq"
    moment = flat([state["exp_avg"] for state in states]).div_(first)
    root = flat([state[squares] for state in states]).sqrt_().div_(second.sqrt_())
    adaptive = torch.div(moment, root + group.options["eps"]).mul_(-group.lr)
    before.sub_(adaptive)
    shrinkage = group.lr * group.weight_decay
    if not (group.options["decoupled_weight_decay"] and shrinkage):
        return Update(moment, root, adaptive, None, before)
    before.div_(1 - shrinkage)
    return Update(moment, root, adaptive, -shrinkage * before, before)


@dataclass(frozen=True)
class Sums:
    """What is added up over parameters; every field is zero-dimensional."""

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


def sums_of(update: Update, gradient: Tensor, group: OptimizerGroup, reference: Tensor | None) -> Sums:
    """Return the sums of an update, the gradient and the reference solution flat like it; 0 for what there is not."""
    total = update.total
    gradient = -gradient if group.options["maximize"] else gradient
    zero = gradient.new_zeros(())
    way = None if reference is None else reference - update.before
    coupled = 0.0 if group.options["decoupled_weight_decay"] else group.weight_decay**2
    return Sums(
        first=energy(update.moment),
        second=energy(update.root),
        update=energy(total),
        adaptive=energy(update.adaptive),
        decay=zero if update.decay is None else energy(update.decay),
        gradient=energy(gradient),
        coupled_decay=coupled * energy(update.before) if coupled else zero,
        update_gradient=inner(total, gradient),
        moment_gradient=inner(update.moment, gradient),
        below_eps=torch.count_nonzero(update.root < group.options["eps"]),
        elements=zero + gradient.numel(),
        distance=zero if way is None else energy(way),
        update_distance=zero if way is None else inner(total, way),
        gradient_distance=zero if way is None else inner(gradient, way),
    )


def added(parts: Sequence[Sums]) -> Sums:
    """Add up the sums of many parameters, on the first one's device."""
    device = parts[0].first.device
    rows = [torch.stack([value.to(device) for value in vars(part).values()]) for part in parts]
    return Sums(*torch.stack(rows).sum(dim=0))


def moment_metrics(sums: Sums, rates: Tensor) -> dict[str, Tensor]:
    """Return the metrics of a set of parameters from their sums and a sample of their effective learning rates."""
    first, second, update, gradient = (value.sqrt() for value in (sums.first, sums.second, sums.update, sums.gradient))
    decay, coupled = sums.decay.sqrt(), sums.coupled_decay.sqrt()
    levels = torch.tensor(list(PERCENTILES.values()), dtype=rates.dtype, device=rates.device)
    return {
        "first_moment_norm": first,
        "second_moment_norm": second,
        "moment_ratio": first / second,
        "update_norm": update,
        "update_gradient_cosine": -sums.update_gradient / (update * gradient),
        "moment_gradient_cosine": sums.moment_gradient / (first * gradient),
        "below_eps_fraction": sums.below_eps / sums.elements,
        "decay_share": decay / (decay + sums.adaptive.sqrt()),
        "coupled_decay_share": coupled / (coupled + gradient),
        **dict(zip(PERCENTILES, torch.quantile(rates, levels), strict=True)),
    }


def solution_metrics(sums: Sums) -> dict[str, Tensor]:
    """Return how the update and the gradient lie to the way d from the parameters to the reference solution."""
    distance = sums.distance.sqrt()
    return {
        "update_solution_cosine": sums.update_distance / (sums.update.sqrt() * distance),
        "gradient_solution_cosine": -sums.gradient_distance / (sums.gradient.sqrt() * distance),
        "solution_gain": sums.update_distance / sums.distance,
    }


def effective_rates(root: Tensor, group: OptimizerGroup, share: float) -> Tensor:
    """Return η/(√v̂ + ε) of a share of the elements of √v̂ (at least one), spread evenly; one-dimensional."""
    if share < 1:
        root = root[spread_indices(len(root), math.ceil(share * len(root))).to(root.device)]
    return group.lr / (root + float(group.options["eps"]))


def pieces(parameters: Mapping[str, Tensor]) -> list[list[str]]:
    """Part parameters into runs of one device with at most ``PIECE`` elements together, or a single larger one."""
    runs: list[list[str]] = []
    size, device = 0, None
    for name, parameter in parameters.items():
        if parameter.device != device or size + parameter.numel() > PIECE:
            runs.append([])
            size = 0
        runs[-1].append(name)
        size, device = size + parameter.numel(), parameter.device
    return runs


MOMENTS = """
    first_moment_norm | ‖m̂‖₂ | [0, ∞) | The gradient that persists over about 1/(1−β₁) steps.
    second_moment_norm | ‖√v̂‖₂ | [0, ∞) | The root mean square gradient of about the last 1/(1−β₂) steps.
    moment_ratio | ‖m̂‖₂ / ‖√v̂‖₂ | [0, ∞) | Near 1: gradients agree from step to step (always so at the first step).
        Near √((1−β₁)/(1+β₁)), 0.23 at β₁ = 0.9: they are noise. Above 1: the gradients have just grown.
    update_norm | ‖Δθ‖₂ | [0, ∞) | The length of the step, weight decay included.
    update_gradient_cosine | cos(Δθ, −g) | [−1, 1]
        | Positive: the step goes downhill on this batch. Small: preconditioning and momentum turn it far away.
    moment_gradient_cosine | cos(m̂, g) | [−1, 1]
        | Agreement of this batch with the average of those before it and itself.
    below_eps_fraction | elements with √v̂ < ε / all elements | [0, 1]
        | There ε decides the size of the step, and Adam acts like SGD with momentum at rate η/ε. High: embedding rows
        that are not drawn, dead units, or an ε that is too large.
    decay_share | ‖ηλθ₋‖₂ / (‖ηλθ₋‖₂ + ‖η·m̂/(√v̂+ε)‖₂), over groups with decoupled decay in the numerator | [0, 1]
        | Above one half weight decay moves the weights more than the gradient does. Left out if no decay is decoupled.
    coupled_decay_share | ‖λθ₋‖₂ / (‖λθ₋‖₂ + ‖g‖₂), over groups with Adam(weight_decay=λ) in the first norms | [0, 1]
        | How much of what enters the moments is weight decay. Left out unless a group has such decay.
"""
RATE = """
    {name} | {level:.0%} quantile over elements of η/(√v̂ + ε) | [0, ∞) | The learning rate that an element of m̂ is
        given. p90/p10 is the spread of the preconditioner: 1 would be SGD with momentum.
"""
SOLUTION = """
    update_solution_cosine | cos(Δθ, d), d = θ_ref − θ₋ | [−1, 1]
        | Only with a reference solution. Positive: the step goes towards it.
    gradient_solution_cosine | cos(−g, d) | [−1, 1]
        | Positive: plain gradient descent would go towards it; below update_solution_cosine: Adam finds the better way.
    solution_gain | Δθ·d / ‖d‖² | (−∞, ∞) | The share of the distance to the reference that the step covers; its inverse
        counts the steps that remain at this pace.
"""


@HookRegistry.register
class AdamDynamics(InterventionHook):
    """Read Adam's moments and measure the update they gave: against the gradient, by element, and its weight decay.

    Reports the step that the optimizer has just made, Δθ = −η·(m̂/(√v̂+ε) + λθ₋) for AdamW and Δθ = −η·m̂/(√v̂+ε) for
    Adam, whose weight decay is inside the gradient; θ₋ are the parameters before the step, m̂ and v̂ the moments with
    bias correction, η, λ, ε those of each parameter's group at that step (the learning rate is noted before the
    scheduler moves on). g is the gradient that the optimizer was given, its sign turned with ``maximize``. Parameters
    that had no gradient at this step did not move and are left out.

    Assumes torch.optim.Adam, AdamW or a subclass with the same update rule, in any implementation (foreach, fused,
    amsgrad), and that no committing hook has changed parameters since. Δθ is what Adam computes: parameters in bfloat16
    or float16 round a part of it away. Takes the memory of ten copies of the largest parameter,
    or of 131,072 elements.

    Args:
        every_n_steps: steps between two reports.
        sample: at most so many elements, spread evenly over all parameters, stand for all in the percentiles.
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
        """Refuse an optimizer that is not Adam or AdamW."""
        if not issubclass(run.optimizer_class, torch.optim.Adam):
            raise UnsuitableError(
                "Hook 'adam_dynamics' needs torch.optim.Adam or AdamW, whose moments it reads; the run's optimizer is "
                f"{run.optimizer_class.__name__}."
            )

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Note the settings with which the optimizer is about to make its step."""
        noted = [replace(each, options={name: each.options[name] for name in OPTIONS}) for each in ctx.optimizer_groups]
        self._step, self._groups = ctx.step, [asdict(group) for group in noted]
        return {}

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Metrics:
        """Return the metrics of the step just made; nothing if no parameter had a gradient."""
        if self._step != run_ctx.step:
            return {}
        made = [self._read(OptimizerGroup(**group), run_ctx, model_ctx) for group in self._groups]
        if not any(made):
            return {}
        solution = run_ctx.reference_weights is not None
        metrics: dict[str, Any] = self._metrics([*chain.from_iterable(made)], solution=solution)
        if len(made) > 1:
            groups = {str(n): self._metrics(each, solution=solution) for n, each in enumerate(made) if each}
            metrics |= {f"group_{name}": {n: of[name] for n, of in groups.items()} for name in list(metrics)}
        return metrics

    def _read(self, group: OptimizerGroup, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> list[Reading]:
        """Measure the parameters of a group that the last step moved, in pieces."""
        states, reference = model_ctx.optimizer_state, run_ctx.reference_weights
        every = trainable(run_ctx.model)
        share = self.sample / sum(parameter.numel() for parameter in every.values())
        trained = [name for name in group.names if name in every and states.get(name)]
        readings = []
        for names in pieces({name: every[name] for name in trained if every[name].grad is not None}):
            moved = [every[name] for name in names]
            update = adam_update(moved, [states[name] for name in names], group)
            way_point = None if reference is None else flat([reference[name] for name in names])
            sums = sums_of(update, flat(live_gradients(moved)), group, way_point)
            readings.append((sums, effective_rates(update.root, group, share)))
        return readings

    def _metrics(self, readings: Sequence[Reading], *, solution: bool) -> dict[str, Tensor]:
        """Return the metrics of a set of parameters, leaving out those that this optimizer or run cannot have."""
        sums = added([each for each, _ in readings])
        metrics = moment_metrics(sums, torch.cat([rates.to(sums.first.device) for _, rates in readings]))
        if not any(group["options"]["decoupled_weight_decay"] for group in self._groups):
            del metrics["decay_share"]
        if not any(each["weight_decay"] and not each["options"]["decoupled_weight_decay"] for each in self._groups):
            del metrics["coupled_decay_share"]
        return metrics | (solution_metrics(sums) if solution else {})

    def describe_metrics(self) -> Sequence[MetricInfo]:
        """Describe the metrics over all parameters, then those of each group, reported if there are several."""
        infos = [*super().describe_metrics()]
        for info in infos[:]:
            formula = f"by number of the parameter group, over its parameters: {info.formula}"
            reading = f"As {info.name}; only with several parameter groups."
            infos.append(replace(info, name=f"group_{info.name}", formula=formula, reading=reading))
        return infos
