"""What hooks see of a fire: the frozen view of its moment, and what observers may ask for beyond reading it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from ..errors import unknown
from ..hooks import EPOCH_END, STEP_POINTS, ForwardResult, HookPoint, ObserverServices, OptimizerGroup, RunDataContext
from ..isolation import borrowed_buffers, borrowed_for_evaluation, borrowed_modes, borrowed_weights
from ..state import TrainingState, Vector, gathered_for_a_while
from ..training import LossProbe, Profiler, TrainingTask


class Views:
    """Makes a :class:`RunDataContext` of the loop's state; what nobody asked for stays ``None``."""

    def __init__(
        self,
        task: TrainingTask,
        state: TrainingState,
        profiler: Profiler,
        last_metrics: Callable[[HookPoint | None], Mapping[str, Any]],
        reference_weights: Vector | None,
    ) -> None:
        self._task = task
        self._state = state
        self._profiler = profiler
        self._reference_weights = _frozen(reference_weights)
        self._services = ObserverServices(
            forward=self._forward,
            batch_gradients=LossProbe(task, state, profiler).gradient,
            evaluate=self._evaluate,
            optimizer_groups=lambda: optimizer_groups(task.model, task.optimizer),
            last_metrics=last_metrics,
        )

    def at(self, point: HookPoint, target_grad: Vector | None) -> RunDataContext:
        """Return the view of this moment."""
        loop, task = self._state.loop, self._task
        at_step = point in STEP_POINTS
        evaluation = loop.evaluation if loop.evaluated_at == loop.step else {}
        shown = loop.step_series if point in EPOCH_END else None
        series = (None, None) if shown is None else shown[:, : loop.series_steps].unbind()
        mean_loss = None if point is HookPoint.PRE_EPOCH else loop.epoch_loss
        return RunDataContext(
            hook_point=point,
            epoch=loop.epoch,
            step=loop.step,
            model=task.model,
            config=task.config,
            loader=task.loader,
            services=self._services,
            profiler=self._profiler,
            batch_idx=loop.batch_idx if at_step else None,
            batch_data=loop.batch if at_step else None,
            loss=loop.loss if at_step else mean_loss,
            train_acc=evaluation.get("train_acc"),
            val_acc=evaluation.get("val_acc"),
            evaluation=MappingProxyType(evaluation),
            lr=task.optimizer.param_groups[0]["lr"],
            loss_scale=None if loop.loss is None else loop.loss_scale,
            skipped_steps=loop.skipped_steps,
            accumulated_grads=None if at_step else _frozen(loop.accumulated_grads),
            step_losses=series[0],
            step_grad_norms=series[1],
            prev_step_grads=_frozen(loop.prev_step_grads) if at_step else None,
            target_grad=_frozen(target_grad),
            reference_weights=self._reference_weights,
        )

    def _forward(self, inputs: Any, capture: Sequence[str], train: bool) -> ForwardResult:
        self._profiler.passed("forward", inputs)
        return forward_pass(self._state, inputs, capture, train)

    def _evaluate(self, weights: Vector) -> dict[str, float]:
        model = self._task.model
        with (
            torch.no_grad(),
            self._state.streams.isolated(),
            borrowed_for_evaluation(model),
            borrowed_weights(model, weights),
        ):
            # The stream of the run's own evaluation after this step, so that both see the same draws.
            self._state.streams.derive("evaluation", "the loop", self._state.loop.step)
            return self._task.evaluate(model)


def _frozen(vector: Vector | None) -> Vector | None:
    return None if vector is None else MappingProxyType(vector)


def forward_pass(state: TrainingState, inputs: Any, capture: Sequence[str], train: bool) -> ForwardResult:
    """Run the model without gradients, leaving modes, buffers, module hooks and streams as they were.

    Captured outputs are copies, made before a later module can write to them; a module called more than once gives
    its last output.
    """
    model = state.model
    modules = dict(model.named_modules(remove_duplicate=False))
    captured: dict[str, Any] = {}
    for name in capture:
        if name not in modules:
            raise unknown("module", name, modules)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(state.streams.isolated())
        stack.enter_context(borrowed_buffers(model))
        stack.enter_context(borrowed_modes(model, train=train))
        stack.enter_context(gathered_for_a_while(model))
        for name in capture:
            handle = modules[name].register_forward_hook(_keeper(captured, name))
            stack.callback(handle.remove)
        output = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    return ForwardResult(output, captured)


def _keeper(captured: dict[str, Any], name: str) -> Any:
    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        captured[name] = tree_map_only(Tensor, Tensor.clone, output)

    return keep


def optimizer_groups(model: nn.Module, optimizer: Optimizer) -> tuple[OptimizerGroup, ...]:
    """Copy the optimizer's parameter groups into frozen views."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = []
    for group in optimizer.param_groups:
        options = {key: tree_map_only(Tensor, Tensor.clone, value) for key, value in group.items() if key != "params"}
        copy = OptimizerGroup(
            names=tuple(names[parameter] for parameter in group["params"] if parameter in names),
            lr=float(group["lr"]),
            weight_decay=float(group.get("weight_decay", 0.0)),
            betas=tuple(group["betas"]) if "betas" in group else None,  # type: ignore[arg-type]
            options=MappingProxyType(options),
        )
        found.append(copy)
    return tuple(found)
