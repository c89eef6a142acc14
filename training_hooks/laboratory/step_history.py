"""Sizes of the quantities that each step computes, layer by layer, to find the first unusual one."""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from loopscope import DebugInterventionHook, HookPoint, HookRegistry, Remembered, RunDataContext
from loopscope.data import Batch
from loopscope.errors import UnsuitableError
from loopscope.hooks import Metrics, ModelDataContext, RunInfo
from loopscope.tensors import copied, max_abs, norm, norm_of_each, trainable
from loopscope.training import eagerly
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from ..curvature import coming_batches, parts_in
from .rows import copies


@contextmanager
def record_outputs(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Record max |output| of each layer, in the order of the forward pass, and of the model itself as ``logits``.

    For a layer that is called several times in a pass, the largest output counts.
    """
    sizes: dict[str, Tensor] = {}

    def record(name: str, _module: nn.Module, _inputs: object, output: Any) -> None:
        tensors = [leaf for leaf in tree_iter(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if tensors:
            size = max_abs({name: tensors[0].detach()})
            sizes[name] = torch.maximum(sizes[name], size) if name in sizes else size

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if not name or next(module.children(), None) is None:
                stack.callback(module.register_forward_hook(partial(record, name or "logits")).remove)
        yield sizes


@HookRegistry.register
class StepHistory(DebugInterventionHook):
    """Record the sizes of all quantities of every step, for ``loopscope rewind --explain``.

    Loss, learning rate and gradients are those of the step itself. The outputs of layers come from an extra forward
    pass on the step's batch, before the step, with other dropout masks. Changes of the weights and of the optimizer's
    state are reported at the following step, when they are final.

    Assumes a run of one process whose next batch is available, and a model whose losses do not depend on the number of
    its calls.

    Costs two forward passes a step, a copy of the parameters, and loading each batch twice.
    """

    name = "step_history"
    hook_points = frozenset({HookPoint.PRE_STEP, HookPoint.POST_BACKWARD})
    intervention_points = frozenset({HookPoint.PRE_STEP})
    mutates = False
    needs_loss = True
    needs_loader = True
    needs_next_batch = True
    metrics = """
        copies | number of copies of the most frequent row in the batch | 1, 2, …
            | More than 1: repeated rows.
        loss | the loss of the step | (−∞, ∞) | Far above its history: a spike.
        lr | the largest learning rate of a parameter group in the step | [0, ∞) | The effect of the schedule.
        output | by layer: max |output| on the step's batch, `logits`: of the model | [0, ∞), NaN
            | The first layer with an unusual value is the origin of a fault in the forward pass.
        gradient | ‖g_p‖₂ at POST_BACKWARD | [0, ∞) | The norm before clipping.
        loss_before | the loss at the parameters before the step, on the batch of the next step | (−∞, ∞)
            | The next loss without this step; its difference from the actual next loss is the step's effect.
        update | of the previous step: max |θ_p − θ_p before it| | [0, ∞)
            | All changes of the weights since then, not only the optimizer's.
        state | after the previous step: √ mean of squares of each entry of the optimizer's state that has the
            shape of the parameter, by entry and parameter | [0, ∞)
            | If a second moment falls suddenly, the next steps are too long.
    """
    _weights = Remembered(dict[str, Tensor])

    def start(self, run: RunInfo) -> None:
        """Raise :class:`UnsuitableError` for several processes, which may shard tensors."""
        if run.ranks.are_many:
            raise UnsuitableError("Hook 'step_history' measures whole tensors, so it needs a run of one process.")
        self._coming: Iterator[Batch] = iter(())
        self._after = -1

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return loss and gradients."""
        live = {name: leaf.grad for name, leaf in trainable(ctx.model).items() if leaf.grad is not None}
        losses = {"loss": ctx.loss} if ctx.loss is not None else {}
        return {**losses, "gradient": norm_of_each(live)}

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Metrics:
        """Return the quantities that are available before the step."""
        with eagerly(), record_outputs(model_ctx.model) as outputs:
            model_ctx.compute_batch_loss()
        rates = [group.lr for group in run_ctx.optimizer_groups]
        metrics: dict[str, Any] = {
            "lr": max((rate for rate in rates if not math.isnan(rate)), default=math.nan),
            "output": outputs,
            "copies": copies(run_ctx.batch_data),
            "loss_before": model_ctx.compute_batch_loss(self._next_batch(run_ctx, model_ctx)),
            "state": _sizes(model_ctx.optimizer_state, trainable(model_ctx.model)),
        }
        weights = copied(trainable(model_ctx.model))
        if self._weights.keys() == weights.keys():
            metrics["update"] = {name: max_abs({name: leaf - self._weights[name]}) for name, leaf in weights.items()}
        self._weights = weights
        return metrics

    def _next_batch(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Batch:
        """Return the batch of the next step, from an iterator that continues from step to step."""
        if self._after != run_ctx.step - 1:
            self._coming = coming_batches(model_ctx.loader, run_ctx.step, parts_in(run_ctx.batch_data))
        self._after = run_ctx.step
        return next(self._coming)


def _sizes(state: Mapping[str, Mapping[str, Any]], parameters: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the root mean square of each entry that has the shape of its parameter, by entry and parameter."""
    sizes: dict[str, dict[str, Tensor]] = {}
    for name, parameter in parameters.items():
        for entry, value in state.get(name, {}).items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point():
                # √(mean x²) = ‖x‖/√n
                sizes.setdefault(entry, {})[name] = norm({name: value}) / max(1, value.numel()) ** 0.5
    return sizes
