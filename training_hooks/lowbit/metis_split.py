"""The split of low-bit weights into trained factors and a residual (Metis), as a declared change of the run."""

import torch
from loopscope import HookPoint, HookRegistry, InterventionHook, RunDataContext, StatePart, StepSchedule
from loopscope.data import derived_seed
from loopscope.errors import UnsuitableError, UsageError, listed
from loopscope.hooks import Metrics, ModelDataContext, RunInfo
from loopscope.lowbit import BitLinear, Decomposition, MetisOptions, split_weight
from loopscope.state import is_sharded, joint_norm
from torch import Tensor, nn

from ..measures import notice, stacked


@HookRegistry.register
class MetisSplit(InterventionHook):
    """Split the weights of low-bit layers into trained low-rank factors and a residual, and refresh the split.

    Before a step, W ← U·diag(s)·V + R: U, s and V become the leading part of a randomised singular value decomposition
    of the merged weight, the parameter ``weight`` becomes the residual R, and from then on y = U(s·(V·x)) + R·x, with
    every matrix cast by itself and all of them trained (arXiv 2509.00404). Without casts the function stays what it
    was. The optimizer begins anew with U, s and V, and with nothing else; R, whose gradient is that of W, keeps its
    moments. The published code builds a new optimizer at each split instead.

    When that happens the recipe of the layers says: ``forward_warmup_steps`` after the start (100 by default), then
    every ``merge_steps`` (1000). A frozen weight is left alone.

    Assumes low-bit layers of a recipe with ``metis`` and ``forward``, one process (DistributedDataParallel
    would leave out the factors, which were frozen when it was made; others have shards of the matrices), and an
    optimizer that was given all parameters of the model, the factors among them.
    """

    name = "metis_split"
    hook_points = frozenset({HookPoint.PRE_STEP})
    step_schedule = StepSchedule(
        mode="stride", every_n_steps=MetisOptions().merge_steps, warmup=MetisOptions().forward_warmup_steps
    )
    mutates = False
    commits = frozenset({StatePart.PARAMETERS, StatePart.OPTIMIZER})
    metrics = """
        layers | number of layers that were split | 1, 2, 3, … | Which they are, the recipe says.
        residual_share | Σ‖R‖²_F / Σ‖W‖²_F over the layers | [0, 1]
            | The energy outside the low-rank part. Near 1 − rank / width: the spectrum is flat, and the split gains
            little; small: a few directions carry the weights, on which a direct cast spends its range.
        range_ratio | mean over layers of max|Rᵢ| / max|Wᵢ| | [0, ∞)
            | How much narrower the residual's range is than the weight's: its steps are as much finer.
        reconstruction_error | (Σ‖U·diag(s)·V + R − W‖²_F / Σ‖W‖²_F)^½ | [0, ∞)
            | Rounding of the split itself: about 1e-8 in float32, 1e-3 in bfloat16. Much more is no split of W.
    """

    def start(self, run: RunInfo) -> None:
        """Find the layers and take the schedule from their recipe."""
        layers = splittable(run.model)
        if not layers:
            raise UnsuitableError(
                f"Hook {self.name!r} needs low-bit layers that can be split (recipe 'fp4_metis', or another with "
                "metis and its forward part; each an nn.Linear with a weight of its own, no Conv1D and no tied head); "
                "the model has none that is trained."
            )
        if sharded := [name for name, layer in layers.items() if is_sharded(layer.weight)]:
            raise UnsuitableError(
                f"Hook {self.name!r} needs whole matrices, and FSDP2 (fully_shard) or tensor parallelism has shards of "
                f"{listed(sharded, 3)}; train by one process."
            )
        if run.ranks.averages and run.ranks.data:
            raise UnsuitableError(
                f"Hook {self.name!r} trains factors that were frozen before, whose gradients DistributedDataParallel "
                "would not average: it knows the parameters that were trained when it was made; train by one process."
            )
        self._seed = run.seed
        self.step_schedule = schedule({options_of(layer) for layer in layers.values()}, run.steps)
        if self.step_schedule.warmup >= run.steps:
            notice(
                f"Hook {self.name!r} splits no weight: the run has {run.steps} steps, and forward_warmup_steps is "
                f"{self.step_schedule.warmup}."
            )

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Metrics:
        """Ask for the split of every layer and return what it does to the weights."""
        layers = splittable(run_ctx.model)
        known = {name for group in run_ctx.optimizer_groups for name in group.names}
        if missing := [name for name in layers if f"{name}.factors.s".lstrip(".") not in known]:
            raise UsageError(
                f"Hook {self.name!r} needs an optimizer that trains the factors of {listed(missing, 3)}; give it "
                "model.parameters() after quantize_model, the frozen ones included."
            )
        targets: dict[str, Tensor] = {}
        measured = []
        for name, layer in layers.items():
            source = torch.Generator().manual_seed(derived_seed(self._seed, self.name, run_ctx.step, name))
            assert layer.factors is not None
            weight = layer.merged_weight()
            parts, residual = split_weight(weight, len(layer.factors.s), options_of(layer).niter, source)
            targets |= {f"{name}.factors.{part}".lstrip("."): value for part, value in parts._asdict().items()}
            targets[f"{name}.weight".lstrip(".")] = residual
            measured.append(_measured(weight, parts, residual))
        model_ctx.blend_parameters(targets, 1.0)
        names = [f"{name}.factors.{part}".lstrip(".") for name in layers for part in Decomposition._fields]
        model_ctx.thaw_parameters(names)
        model_ctx.reset_optimizer_state(names)
        weights, residuals, lost, largest, largest_residual = stacked(measured).unbind(1)
        energy = weights.square().sum()
        return {
            "layers": len(layers),
            "residual_share": residuals.square().sum() / energy,
            "range_ratio": (largest_residual / largest).mean(),
            "reconstruction_error": (lost.square().sum() / energy).sqrt(),
        }


def splittable(model: nn.Module) -> dict[str, BitLinear]:
    """Return the layers with factors whose weight is trained, by name."""
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
    """Return when weights are split; raises :class:`UsageError` if the layers differ in that."""
    found = sorted({(each.forward_warmup_steps, each.merge_steps) for each in options})
    if len(found) > 1:
        said = " and ".join(f"({warmup}, {merge})" for warmup, merge in found)
        raise UsageError(
            f"Hook 'metis_split' splits all layers at once, but their recipes have (forward_warmup_steps, merge_steps) "
            f"{said}; give them the same."
        )
    ((warmup, merge),) = found
    return StepSchedule(mode="stride", every_n_steps=merge or max(1, steps), warmup=warmup)


def _measured(weight: Tensor, parts: Decomposition, residual: Tensor) -> Tensor:
    """Return norms of weight, residual and what the split loses, and the largest magnitudes of the first two."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    lost = Decomposition(*(part.to(wide) for part in parts)).product() + residual.to(wide) - weight.to(wide)
    norms = [joint_norm([matrix]) for matrix in (weight, residual, lost)]
    return torch.stack([number.to(wide) for number in (*norms, weight.abs().max(), residual.abs().max())])
