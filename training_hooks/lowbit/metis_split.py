"""Split of low-bit weights into trained factors and a residual (Metis), as a declared intervention."""

import torch
from loopscope import HookPoint, HookRegistry, InterventionHook, RunDataContext, StatePart, StepSchedule
from loopscope.data import derived_seed
from loopscope.errors import UnsuitableError, UsageError, listed
from loopscope.hooks import Metrics, ModelDataContext, RunInfo
from loopscope.lowbit import BitLinear, Decomposition, MetisOptions, split_weight
from loopscope.tensors import is_sharded, joint_norm
from torch import Tensor, nn

from ..measures import notice, stacked


@HookRegistry.register
class MetisSplit(InterventionHook):
    """Split the weights of low-bit layers into trained low-rank factors and a residual, and refresh the split.

    Before a step, W ← U·diag(s)·V + R: U, s and V become the leading part of a randomised singular value decomposition
    of the merged weight, the parameter ``weight`` becomes the residual R, and from then on y = U(s·(V·x)) + R·x, with
    every matrix cast separately and all of them trained (arXiv 2509.00404). Without casts the function stays the same.
    The optimizer state of U, s and V is reset; R, which has the gradient of W, keeps its moments. The published code
    builds a new optimizer at each split instead.

    The recipe of the layers sets the schedule: first after ``forward_warmup_steps`` (100 by default), then every
    ``merge_steps`` (1000). Frozen weights are not split.

    Assumes low-bit layers of a recipe with ``metis`` and ``forward``, a single process, and an optimizer of all
    parameters of the model, including the factors. DistributedDataParallel would not average the gradients of the
    factors, which are frozen when it wraps the model; other parallel wrappers have only shards of the matrices.
    """

    name = "metis_split"
    hook_points = frozenset({HookPoint.PRE_STEP})
    step_schedule = StepSchedule(
        mode="stride", every_n_steps=MetisOptions().merge_steps, warmup=MetisOptions().forward_warmup_steps
    )
    mutates = False
    commits = frozenset({StatePart.PARAMETERS, StatePart.OPTIMIZER})
    metrics = """
        layers | number of layers that were split | 1, 2, 3, … | The recipe selects the layers.
        residual_share | Σ‖R‖²_F / Σ‖W‖²_F over the layers | [0, 1], NaN
            | The energy outside the low-rank part. Near 1 − rank / width: the spectrum is flat, and the split gains
            little. Small: a few directions dominate the weights and would use up the range of a direct cast.
        range_ratio | mean over layers of max|Rᵢ| / max|Wᵢ| | [0, ∞), NaN
            | The residual's range relative to the weight's: its quantisation steps are finer by this factor.
        reconstruction_error | (Σ‖U·diag(s)·V + R − W‖²_F / Σ‖W‖²_F)^½ | [0, ∞), NaN
            | Rounding error of the split, in the dtype of the weights: about 2e-8 in float32, 2e-4 in float16, 2e-3 in
            bfloat16. Much larger: the split is wrong.
    """

    def start(self, run: RunInfo) -> None:
        """Find the layers and take the schedule from their recipe."""
        layers = splittable_layers(run.model)
        if not layers:
            raise UnsuitableError(
                f"Hook {self.name!r} needs low-bit layers that can be split (recipe 'fp4_metis', or another with "
                "metis and its forward part; each an nn.Linear with its own weight, no Conv1D and no tied head); "
                "the model has no trained layer of this kind."
            )
        if sharded := [name for name, layer in layers.items() if is_sharded(layer.weight)]:
            raise UnsuitableError(
                f"Hook {self.name!r} needs whole matrices, but FSDP2 (fully_shard) or tensor parallelism shards "
                f"{listed(sharded, 3)}; train in one process."
            )
        if run.ranks.averages and run.ranks.data:
            raise UnsuitableError(
                f"Hook {self.name!r} trains factors that were frozen before. DistributedDataParallel would not average "
                "their gradients, since it only averages parameters that were trained when it was created; train in "
                "one process."
            )
        self._seed = run.seed
        self.step_schedule = schedule({options_of(layer) for layer in layers.values()}, run.steps)
        if self.step_schedule.warmup >= run.steps:
            notice(
                f"Hook {self.name!r} splits no weights: the run has {run.steps} steps, but forward_warmup_steps is "
                f"{self.step_schedule.warmup}."
            )

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Metrics:
        """Request the split of every layer and return its effect on the weights."""
        layers = splittable_layers(run_ctx.model)
        optimized = {name for group in run_ctx.optimizer_groups for name in group.names}
        if missing := [name for name in layers if f"{name}.factors.s".lstrip(".") not in optimized]:
            raise UsageError(
                f"Hook {self.name!r} needs an optimizer that trains the factors of {listed(missing, 3)}; create it "
                "with model.parameters() after quantize_model, including frozen parameters."
            )
        targets: dict[str, Tensor] = {}
        layer_norms = []
        for name, layer in layers.items():
            source = torch.Generator().manual_seed(derived_seed(self._seed, self.name, run_ctx.step, name))
            assert layer.factors is not None
            weight = layer.merged_weight()
            parts, residual = split_weight(weight, len(layer.factors.s), options_of(layer).niter, source)
            targets |= {f"{name}.factors.{part}".lstrip("."): value for part, value in parts._asdict().items()}
            targets[f"{name}.weight".lstrip(".")] = residual
            layer_norms.append(_norms(weight, parts, residual))
        model_ctx.blend_parameters(targets, 1.0)
        names = [f"{name}.factors.{part}".lstrip(".") for name in layers for part in Decomposition._fields]
        model_ctx.thaw_parameters(names)
        model_ctx.reset_optimizer_state(names)
        weights, residuals, lost, largest, largest_residual = stacked(layer_norms).unbind(1)
        energy = weights.square().sum()
        return {
            "layers": len(layers),
            "residual_share": residuals.square().sum() / energy,
            "range_ratio": (largest_residual / largest).mean(),
            "reconstruction_error": (lost.square().sum() / energy).sqrt(),
        }


def splittable_layers(model: nn.Module) -> dict[str, BitLinear]:
    """Return the layers with factors and a trained weight, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, BitLinear) and module.factors is not None and module.weight.requires_grad
    }


def options_of(layer: BitLinear) -> MetisOptions:
    """Return the options of a layer that has factors."""
    assert layer.recipe.metis is not None
    return layer.recipe.metis


def schedule(options: set[MetisOptions], steps: int) -> StepSchedule:
    """Return the schedule of the splits; raises :class:`UsageError` if the layers have different ones."""
    schedules = sorted({(option.forward_warmup_steps, option.merge_steps) for option in options})
    if len(schedules) > 1:
        pairs = " and ".join(f"({warmup}, {merge})" for warmup, merge in schedules)
        raise UsageError(
            f"Hook 'metis_split' splits all layers at once, but their recipes have (forward_warmup_steps, merge_steps) "
            f"{pairs}; use the same values in all recipes."
        )
    ((warmup, merge),) = schedules
    return StepSchedule(mode="stride", every_n_steps=merge or max(1, steps), warmup=warmup)


def _norms(weight: Tensor, parts: Decomposition, residual: Tensor) -> Tensor:
    """Return norms of weight, residual and reconstruction error, and the largest magnitudes of the first two."""
    # error = U·diag(s)·V + R − W, in float32 or wider
    wide = torch.promote_types(weight.dtype, torch.float32)
    lost = Decomposition(*(part.to(wide) for part in parts)).product() + residual.to(wide) - weight.to(wide)
    norms = [joint_norm([matrix]) for matrix in (weight, residual, lost)]
    return torch.stack([number.to(norms[0]) for number in (*norms, weight.abs().max(), residual.abs().max())])
