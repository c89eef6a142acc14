"""The joint gradient norm of each step before and after clipping, and norms of each parameter and its update."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, StepSchedule, TrainingHook
from loopscope.errors import UnsuitableError, require
from loopscope.hooks import Metrics, RunInfo
from loopscope.tensors import Vector, gradients, groups_of, local_shards, over_shards, read_at_once, trainable
from torch import Tensor

from ..measures import FamilyFile, SeriesBudget, WeightCopy, compute_once, gradient_norms, joint_gradient_norm, stacked

CLIPPED_BELOW = 1 - 1e-6
"""A step is clipped if its gradient norm after clipping is less than this multiple of the norm before."""
Families = dict[str, dict[str, float]]


@torch.no_grad()
def zero_fractions(vector: Vector) -> Tensor:
    """Return the share of elements that are exactly 0 in each tensor, shape (tensors,), float64; NaN without elements.

    >>> zero_fractions({"a": torch.tensor([0.0, 2.0])}).tolist()
    [0.5]
    """
    tensors = list(vector.values())
    counts = stacked(
        torch.count_nonzero(shard.coalesce().values() if shard.is_sparse else shard) for shard in local_shards(tensors)
    )
    nonzero = over_shards(counts.double(), groups_of(tensors))
    sizes = torch.tensor([tensor.numel() for tensor in tensors], dtype=torch.float64, device=nonzero.device)
    return 1 - nonzero / sizes


@HookRegistry.register
@dataclass(kw_only=True, eq=False)
class ParameterNorms(TrainingHook):
    """Measure the joint gradient norm of each step before and after clipping, and norms of each parameter.

    The joint norms are reported for every step that updates the weights, so a step that the loss scaler skips is left
    out. The gradient before clipping is that at POST_BACKWARD: complete, unscaled, the mean over ranks. The gradient
    after clipping is the one that the optimizer receives (PRE_UPDATE); the difference is the clipping of the training
    loop and of committing hooks. At step 1 and then every ``interval`` steps, the hook reports the share of clipped
    steps, and gradient, weights and update of each parameter: the update Δθ = θ − θ₋ is the measured difference between
    the weights after and before the optimizer's step, including weight decay.

    Each family with a value per parameter reports the ``top`` largest and ``bottom`` smallest values, and the
    parameters in ``names``; which parameters these are may differ between steps.

    Assumes that clipping only scales gradients down or limits elements, so that it reduces the joint norm. In a loop
    without PRE_UPDATE (closures, or a step within backward) only the joint norm before clipping is reported, every
    ``interval`` steps. Costs two reductions over all gradients in each step. Keeps a copy of the trained parameters in
    float32 or wider from PRE_UPDATE to POST_STEP of every ``interval``-th step, when no activations are in memory, and
    shares it with ``training_checks`` and ``optimizer_health``.

    Args:
        interval: steps from one report on the parameters to the next.
        names: glob patterns, separated by commas, of parameters to report in every family; ``*`` selects all.
        top: number of parameters with the largest values to report in each family.
        bottom: number of parameters with the smallest values to report in each family.
        write_all: write the values of all parameters to the file ``STRATEGY.parameter_norms.jsonl`` of the run.
    """

    name = "parameter_norms"
    hook_points = frozenset({HookPoint.POST_BACKWARD, HookPoint.PRE_UPDATE, HookPoint.POST_STEP})
    in_health = True
    needs_step_series = True
    metrics = """
        total_grad_norm | ‖g‖₂, g the gradient of all parameters of a step before clipping | [0, ∞]
            | Usually falls early and then varies little. Sudden peaks: unusual batches, or a learning rate that is too
            high; peaks that clipping does not cut reach the weights, except under Adam-type optimizers, which divide
            them by the second moment.
        total_clipped_grad_norm | ‖g'‖₂, g' the gradient that the optimizer receives | [0, ∞]
            | Equal to total_grad_norm: not clipped. Constant at the limit: every step is clipped, so the limit rather
            than the gradient sets the length of the step (for SGD), and noise keeps its direction.
        clipped_fraction | steps with ‖g'‖₂ < (1 − 1e-6)·‖g‖₂ / steps, since the last report | [0, 1]
            | 0 without clipping. A few percent: clipping catches rare peaks. Near 1: the limit acts as a schedule of
            the step length; raise it, unless that is intended, as in much training of language models early on.
        total_weight_norm | ‖θ₋‖₂ over all trained parameters, before the update | [0, ∞]
            | Grows until weight decay balances the updates; without decay it grows further.
        total_update_norm | ‖Δθ‖₂ over all trained parameters | [0, ∞]
            | Proportional to the learning rate under Adam and Muon, and to learning rate and gradient under SGD.
            Divided by total_weight_norm it is update_ratio of training_checks.
        grad_norm/<parameter> | ‖g_p‖₂ before clipping | [0, ∞]
            | Far above the others: the layer that dominates the joint norm, and so its clipping. 0: the loss does not
            depend on the parameter in this batch.
        clipped_grad_norm/<parameter> | ‖g'_p‖₂, the gradient that the optimizer receives | [0, ∞]
            | In proportion to grad_norm for clipping by the joint norm. For the parameters of grad_norm.
        zero_fraction/<parameter> | elements of g_p that are exactly 0 / all elements | [0, 1]
            | Near 1 in an embedding: most tokens are not in the batch, which is healthy. Elsewhere: dead units, experts
            without tokens, or underflow in float16.
        weight_norm/<parameter> | ‖θ_p‖₂ before the update | [0, ∞] | Shows which layers grow or decay.
        update_norm/<parameter> | ‖Δθ_p‖₂ | [0, ∞]
            | 0: the parameter does not move: no gradient, learning rate 0, or rounding (in bfloat16).
        update_ratio/<parameter> | ‖Δθ_p‖₂ / ‖θ_p‖₂, without parameters of norm 0 | [0, ∞]
            | Compare parameters with each other and with earlier steps at the same learning rate: far above the others
            is a layer that is overwritten. Parameters that were initialised as zeros have large ratios at first.
    """

    interval: int = 50
    names: str = ""
    top: int = 5
    bottom: int = 3
    write_all: bool = False

    _file = Remembered(FamilyFile)
    _clipped = Remembered(partial(torch.zeros, (), dtype=torch.int64))  # clipped steps since the last report
    _steps = Remembered(int)  # steps since the last report
    _earlier_clipped = Remembered(int)  # clipped steps before the last report
    _earlier_steps = Remembered(int)
    # Values between the points of one step, and that step
    _norm_step = Remembered(0, saved=False)
    _norm = Remembered[float | Tensor](0.0, saved=False)
    _families = Remembered[dict[str, tuple[list[str], Tensor]]](dict, saved=False)  # names, and a value for each
    _copy_step = Remembered(0, saved=False)
    _copy = Remembered[WeightCopy | None](None, saved=False)

    def __post_init__(self) -> None:
        require(self.interval >= 1, f"parameter_norms.interval is {self.interval}; it must be at least 1.")
        self._budget = SeriesBudget(self.name, self.names, self.top, self.bottom)
        self.point_schedules = {HookPoint.POST_STEP: StepSchedule(mode="stride", every_n_steps=self.interval)}

    @classmethod
    def file_names(cls, strategy: str) -> Sequence[str]:
        """Return the name of the file with the values of all parameters."""
        return (FamilyFile.name(cls.name, strategy),)

    def start(self, run: RunInfo) -> None:
        """Check the patterns of names.

        Raises:
            UnsuitableError: if the model has no trainable parameters.
        """
        trained = trainable(run.model)
        if not trained:
            raise UnsuitableError("Hook 'parameter_norms' needs trainable parameters, but the model has none.")
        self._budget.check_names(trained)
        if self.write_all:
            self._file.start(self.name, run)

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Keep the norm before clipping, report both norms before the update, and the parameters after it."""
        if ctx.hook_point is HookPoint.POST_BACKWARD:
            self._measure_gradients(ctx)
            return {}
        if ctx.hook_point is HookPoint.PRE_UPDATE:
            return self._joint_norms(ctx)
        copy = self._copy if self._copy_step == ctx.step else None
        metrics: dict[str, Any] = {} if copy is None else self._parameter_metrics(ctx, copy)
        if self._norm_step == ctx.step and copy is None:  # a step without PRE_UPDATE
            metrics = {"total_grad_norm": self._norm}
        self._copy, self._families = None, {}
        return metrics

    def _is_reported(self, step: int) -> bool:
        return self.point_schedules[HookPoint.POST_STEP].is_due(step)

    def _measure_gradients(self, ctx: RunDataContext) -> None:
        self._families = {}
        self._norm_step, self._norm = ctx.step, self._gradient_norm(ctx, "grad_norm")
        if "grad_norm" in self._families:
            vector = gradients(ctx.model)
            self._families["zero_fraction"] = list(vector), zero_fractions(vector)

    def _joint_norms(self, ctx: RunDataContext) -> Metrics:
        """Return the joint norms and count clipped steps; on a reported step, keep the weights as well."""
        after = self._gradient_norm(ctx, "clipped_grad_norm")
        metrics: dict[str, float | Tensor] = {"total_clipped_grad_norm": after}
        if self._norm_step == ctx.step:
            metrics = {"total_grad_norm": self._norm, **metrics}
            is_clipped = after < CLIPPED_BELOW * self._norm
            if isinstance(is_clipped, Tensor):
                self._clipped = self._clipped.to(is_clipped.device) + is_clipped
            elif is_clipped:
                self._clipped = self._clipped + 1
            self._steps += 1
        if self._is_reported(ctx.step):
            copy = WeightCopy.of(ctx.model)
            self._copy_step, self._copy = ctx.step, copy
            parameters = trainable(ctx.model)
            self._families["weight_norm"] = list(parameters), copy.norms(parameters)
        return metrics

    def _gradient_norm(self, ctx: RunDataContext, family: str) -> float | Tensor:
        """Return the joint norm of the gradients; on a reported step, keep the norm of each as a family as well."""
        if self._is_reported(ctx.step) and gradients(ctx.model):
            norms = compute_once(ctx, gradient_norms)
            self._families[family] = list(norms), stacked(norms.values())
        if ctx.hook_point is HookPoint.POST_BACKWARD and ctx.grad_norm is not None:
            return read_at_once(ctx.grad_norm.clone())  # computed by the loop, for all hooks
        return read_at_once(compute_once(ctx, joint_gradient_norm))

    def _parameter_metrics(self, ctx: RunDataContext, copy: WeightCopy) -> dict[str, float]:
        """Return the totals and the chosen members of each family; transfers everything to the host at once."""
        parameters = {name: value for name, value in trainable(ctx.model).items() if name in copy}
        self._families["update_norm"] = list(parameters), copy.change_norms(parameters)
        names = [members for members, _ in self._families.values()]
        device = self._clipped.device
        columns = [values.to(device).double() for _, values in self._families.values()]
        *numbers, clipped = torch.cat([*columns, self._clipped.double()[None]]).tolist()
        families: Families = {}
        for family, members in zip(self._families, names, strict=True):
            families[family] = dict(zip(members, numbers, strict=False))
            del numbers[: len(members)]
        weights, updates = families["weight_norm"], families["update_norm"]
        families["update_ratio"] = {name: updates[name] / weights[name] for name in updates if weights.get(name)}
        metrics = self._totals(families, int(clipped))
        if self.write_all:
            self._file.append(ctx.step, families)
        chosen = {family: self._budget.choose(values) for family, values in families.items()}
        chosen["clipped_grad_norm"] = chosen.get("grad_norm", chosen.get("clipped_grad_norm", []))
        return metrics | {
            f"{family}/{name}": values[name]
            for family, values in families.items()
            for name in chosen[family]
            if name in values
        }

    def _totals(self, families: Families, clipped: int) -> dict[str, float]:
        """Return the metrics of all parameters together, and start to count clipped steps again."""
        metrics = {}
        if self._steps:
            metrics["clipped_fraction"] = clipped / self._steps
            self._earlier_clipped, self._earlier_steps = (
                self._earlier_clipped + clipped,
                self._earlier_steps + self._steps,
            )
            self._clipped, self._steps = torch.zeros_like(self._clipped), 0
        weight_norm, update_norm = (math.hypot(*families[name].values()) for name in ("weight_norm", "update_norm"))
        return metrics | {"total_weight_norm": weight_norm, "total_update_norm": update_norm}

    def table(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the number of steps of the run, and how many of them were clipped."""
        steps, clipped = self._earlier_steps + self._steps, self._earlier_clipped + int(self._clipped)
        return {"gradients": {"steps": steps, "clipped": clipped, "share": clipped / steps}} if steps else {}
