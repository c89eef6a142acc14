"""Builds the frozen view that hooks get of one fire."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..hooks import EPOCH_END, STEP_POINTS, ForwardResult, HookPoint, ObserverServices, RunDataContext
from ..isolation import borrowed_for_evaluation, borrowed_weights
from ..state import TrainingState
from ..training import LossProbe, Profiler, TrainingTask
from .observation import forward_pass, optimizer_groups

Vector = dict[str, Tensor]


class ContextBuilder:
    """Fills a :class:`RunDataContext` from the loop's state; what nobody asked for stays ``None``."""

    def __init__(
        self,
        task: TrainingTask,
        state: TrainingState,
        profiler: Profiler,
        last_metrics: Callable[[HookPoint | None], Mapping[str, Any]],
        reference_weights: Mapping[str, Tensor] | None,
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

    def build(self, point: HookPoint, target_grad: Vector | None) -> RunDataContext:
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

    def _evaluate(self, weights: Mapping[str, Tensor]) -> dict[str, float]:
        model = self._task.model
        with (
            torch.no_grad(),
            self._state.streams.isolated(),
            borrowed_for_evaluation(model),
            borrowed_weights(model, weights),
        ):
            self._state.streams.derive("evaluation", "the loop", self._state.loop.step)
            return self._task.evaluate(model)


def _frozen(vector: Mapping[str, Tensor] | None) -> Mapping[str, Tensor] | None:
    return None if vector is None else MappingProxyType(vector)
