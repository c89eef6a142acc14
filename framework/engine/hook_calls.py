"""Calls of the hooks that are due at a hook point, with one shared context; their metrics go to the delivery."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from ..combined_optimizers import separate_optimizers
from ..data import RowNumbers, rows_if_any, with_copied_batches
from ..errors import StateMutationError, unknown
from ..hooks import (
    EPOCH_END,
    STEP_POINTS,
    ForwardResult,
    HookPoint,
    InterventionHook,
    Metrics,
    ObserverServices,
    OptimizerGroup,
    RunDataContext,
)
from ..isolation import borrowed_gradients, borrowed_modes, borrowed_weights, undone_pass
from ..state import TrainingState, optimizers_of
from ..state.generators import StreamState
from ..state.parameter_groups import betas_of, learning_rate_of, number_or, rounds_stochastically
from ..tensors import Vector
from ..training import LossProbe, TrainingTask, without_graph
from .budget import Budget
from .commits import CommitRecord
from .hook_set import HookSet, call_of
from .listeners import Listener
from .metric_delivery import MetricDelivery
from .model_context import Access, ModelContext

PRE_EPOCH = HookPoint.PRE_EPOCH
BETWEEN_STEPS = "between two steps"
REPORTS_EVALUATIONS = attrgetter("hook.reports_evaluations")

Result = TypeVar("Result")


@dataclass(eq=False, repr=False)
class HookCalls:
    """Calls the hooks of one run: observers first, then interventions, then committing hooks."""

    hooks: HookSet
    task: TrainingTask
    state: TrainingState
    delivery: MetricDelivery
    guardian_device: torch.device | None
    reference_weights: Vector | None
    _step_streams: StreamState | None = None

    def __post_init__(self) -> None:
        """Create the services of observers."""
        task = self.task
        self._isolation = self.hooks.isolation
        self._loader = with_copied_batches(task.loader)
        if self.reference_weights is not None:
            self.reference_weights = MappingProxyType(self.reference_weights)
        self._services = ObserverServices(
            forward=self._forward,
            batch_gradients=LossProbe(task, self.state, self.hooks.profiler).gradient,
            evaluate=self._evaluate,
            optimizer_groups=partial(optimizer_groups, task.model, task.optimizer),
            last_metrics=self.delivery.last,
            ranks=task.ranks,
            row_indices=self._rows_of_batch,
            replayed=self._replayed,
        )
        self._row_numbers = RowNumbers(task.loader)

    def save_step_streams(self) -> None:
        """Save the random streams with which the pass of the step begins, for hooks that repeat it."""
        self._step_streams = self.state.streams.save()

    @contextmanager
    def _replayed(self) -> Iterator[None]:
        with self.state.streams.preserved():
            if self._step_streams is not None:
                self._step_streams.restore()
            yield

    def report_evaluation(self) -> None:
        """Call the hooks that report evaluations, as at SNAPSHOT, for an evaluation that no hook has reported yet.

        They report it under the step after which it was measured.
        """
        if listeners := self.hooks.listeners.of_evaluations:
            self.call(HookPoint.SNAPSHOT, listeners)
        else:
            self.state.loop.has_unreported_evaluation = False

    def call(self, point: HookPoint, listeners: Sequence[Listener]) -> None:
        """Call the hooks of the ``listeners`` that are due, with one shared context, and deliver their metrics.

        Without due hooks, return before any setup.
        """
        loop, recorded = self.state.loop, self.hooks.listeners.recorded
        if recorded is not None and recorded in listeners:
            self._report_loop_values(recorded)
            if len(listeners) == 1:
                return
        epoch, step = loop.epoch, loop.step
        due_listeners = [
            item
            for item in listeners
            if item is not recorded and (item.is_always_due or (step not in item.idle and item.is_due(epoch, step)))
        ]
        if not due_listeners:
            return
        if point not in STEP_POINTS and any(map(REPORTS_EVALUATIONS, due_listeners)):
            loop.has_unreported_evaluation = False
        if self.hooks.taps.is_idle:
            self._visit(point, due_listeners)
        else:
            self.hooks.call_each(partial(self._visit, point, due_listeners))

    def _visit(self, point: HookPoint, due_listeners: Sequence[Listener]) -> None:
        loop, isolation = self.state.loop, self._isolation
        try:
            isolation.start_visit()
            context = self._create_context(point)
            for listener in due_listeners:
                if listener.intervention is None:
                    observe = partial(self._observe, listener, context)
                    self.hooks.call(listener.hook, listener.where, loop.step, observe)
                else:
                    self._intervene(listener, listener.intervention, context)
            try:
                isolation.finish_checks()
            except StateMutationError as error:
                self.hooks.handle_mutation(error, call_of(due_listeners[0].hook, point.name, loop.step))
            if point not in STEP_POINTS or self.delivery.urgent.are_waiting:
                self._deliver(point)
            if self.task.ranks.shards or point not in STEP_POINTS:  # on shards, nearly every hook runs collectives
                self.hooks.synchronise_failures()
        finally:
            isolation.end_visit()

    def _deliver(self, point: HookPoint) -> None:
        """Deliver the metrics of an epoch-level point, or those of steps if a hook has asked for it."""
        loop, delivery, is_delivered = self.state.loop, self.delivery, True
        if point in STEP_POINTS:
            is_delivered = delivery.deliver_urgent(loop.epoch)
        else:
            delivery.deliver(point, loop.epoch, loop.step)
        if is_delivered:
            self._isolation.finish_checks()

    def call_within(self, budget: Budget, point: HookPoint, listeners: Sequence[Listener]) -> None:
        """Call the due hooks and time them; a step without any costs only the record of its loss."""
        if point not in STEP_POINTS:
            self.call(point, listeners)
            return
        step, epoch, first_due = self.state.loop.step, self.state.loop.epoch, self.hooks.listeners.first_due
        recorded = self.hooks.listeners.recorded
        reporter = recorded or budget.reporter
        due_listeners: Sequence[Listener] = ()
        if step >= first_due[point]:
            due_listeners = [item for item in listeners if item is not recorded and item.is_due(epoch, step)]
        if reporter is not None and reporter.point is point and reporter not in due_listeners:
            self._report_loop_values(reporter)
        if due_listeners:
            budget.time_visit(point, partial(self.call, point, due_listeners))
        if step >= first_due[point]:
            self.hooks.listeners.find_first_due(point, step + 1)

    def _report_loop_values(self, reporter: Listener) -> None:
        """Record the loss of a step at which the hook that reports it is not called."""
        loop, values = self.state.loop, reporter.hook.loop_values
        metrics: dict[str, Any] = {}
        for name, key in values.items():
            value = vars(loop)[key]
            if value is not None and not (type(value) is float and math.isnan(value)):  # a group without a rate
                metrics[name] = value
        self.delivery.add(reporter.hook, reporter.point, loop.step, metrics)

    def _observe(self, listener: Listener, context: RunDataContext) -> None:
        # Metrics are added within the call, so that a tensor of a wrong shape is an error of the hook.
        hook = listener.hook
        metrics = hook.compute(context)
        self.delivery.add(hook, listener.point, self.state.loop.step, metrics)
        if metrics and listener.has_urgent_metrics:
            self.delivery.urgent.add(hook.is_urgent(metrics))

    def _intervene(self, listener: Listener, hook: InterventionHook, context: RunDataContext) -> None:
        point, step = listener.point, self.state.loop.step
        record = CommitRecord(hook.name, frozenset(hook.commits))
        model_context = self._create_model_context(hook, listener.where, record)

        def intervene() -> bool:
            # add() copies the tensors here, before the rollback.
            metrics = hook.intervene(context, model_context)
            self.delivery.add(hook, point, step, metrics)
            if metrics and listener.has_urgent_metrics:
                self.delivery.urgent.add(hook.is_urgent(metrics))
            return True

        with model_context:
            returned = self.hooks.call(hook, listener.where, step, intervene, intervention=hook)
        if returned and record.changes:
            record.apply()
            self._isolation.note_commit()

    def _create_model_context(self, hook: InterventionHook, where: str, record: CommitRecord) -> ModelContext:
        access = Access(
            self.task,
            self.state,
            record,
            self._isolation.parameters,
            mutates=hook.mutates,
            device=self.guardian_device,
            stream=(hook.name, where, self.state.loop.step),
            loop=self.hooks.loop_type,
            profiler=self.hooks.profiler,
        )
        return ModelContext(access)

    def call_between_steps(self, hook: InterventionHook) -> Metrics:
        """Call an intervention that is not one of the run's hooks between two steps, and return its metrics.

        The metrics must not contain tensors of the training state, which is rolled back. Errors are raised.
        """
        with self._isolation.visit():
            context = self._create_context(HookPoint.POST_STEP)
            with self._create_model_context(hook, BETWEEN_STEPS, CommitRecord(hook.name, frozenset())) as model_context:
                intervene = partial(hook.intervene, context, model_context)
                return self.hooks.run_in_gate(call_of(hook, BETWEEN_STEPS, self.state.loop.step), intervene, hook)

    def _create_context(self, point: HookPoint) -> RunDataContext:
        """Return the context for the hooks at ``point``; fields that no hook requested are ``None``."""
        loop, task = self.state.loop, self.task
        at_step = point in STEP_POINTS
        evaluation = loop.evaluation if loop.evaluated_at == loop.step else {}
        series = loop.step_series if point in EPOCH_END else None
        newest_norm = None
        norms = loop.step_series if at_step and loop.loss is not None and self.hooks.has_current_norm else None
        if norms is not None and loop.series_steps:
            newest_norm = norms[1, loop.series_steps - 1]
        previous, accumulated = loop.prev_step_grads, loop.accumulated_grads
        losses, grad_norms = (None, None) if series is None else series[:, : loop.series_steps].unbind()
        mean_loss = None if point is PRE_EPOCH else loop.epoch_loss
        learning_rate = task.optimizer.param_groups[0].get("lr")
        if type(learning_rate) is not float:
            learning_rate = learning_rate_of(task.optimizer.param_groups[0])
        # The generated __init__ of a frozen dataclass sets one attribute after the other: 15 µs instead of 2.
        context = object.__new__(RunDataContext)
        vars(context).update(
            hook_point=point,
            epoch=loop.epoch,
            step=loop.step,
            model=task.model,
            config=task.config,
            loader=self._loader,
            services=self._services,
            profiler=self.hooks.profiler,
            batch_idx=loop.batch_idx if at_step else None,
            batch_data=loop.batch if at_step else None,
            loss=loop.loss if at_step else mean_loss,
            train_acc=evaluation.get("train_acc"),
            val_acc=evaluation.get("val_acc"),
            evaluation=MappingProxyType(evaluation),
            lr=learning_rate,
            step_lr=learning_rate if loop.step_lr is None else loop.step_lr,
            loss_scale=None if loop.loss is None else loop.loss_scale,
            skipped_steps=loop.skipped_steps,
            accumulated_grads=None if at_step or accumulated is None else MappingProxyType(accumulated),
            step_losses=losses,
            step_grad_norms=grad_norms,
            grad_norm=newest_norm,
            prev_step_grads=None if previous is None or not at_step else MappingProxyType(previous),
            reference_weights=self.reference_weights,
        )
        return context

    def _rows_of_batch(self, epoch: int, index: int) -> Tensor | None:
        row_numbers = self._row_numbers.of(epoch, index)
        is_complete = row_numbers is not None and len(row_numbers) == rows_if_any(self.state.loop.batch)
        return row_numbers if is_complete else None

    def _forward(self, inputs: Any, capture: Sequence[str], train: bool) -> ForwardResult:
        self.hooks.profiler.count_samples("forward", inputs)
        if self.task.ranks.shards:
            self.task.ranks.join()
        return forward_pass(self.state, inputs, capture, train=train)

    def _evaluate(self, weights: Vector) -> dict[str, float]:
        model = self.task.model

        @contextmanager
        def restored() -> Iterator[None]:
            with (
                torch.no_grad(),
                undone_pass(self.state, optimizers_of(self.state)),
                borrowed_modes(model, train=False),
                borrowed_weights(model, weights),
            ):
                # The same stream as the run's evaluation after this step, so that both draw the same numbers.
                self.state.streams.derive("evaluation", "the loop", self.state.loop.step)
                yield

        compute = partial(with_gradients_borrowed, self.state, partial(self.task.evaluate, model))
        results = without_graph("evaluation", compute, restored, self.task.differentiating)
        self.task.ranks.join()
        return self.task.ranks.evaluation(results)


def with_gradients_borrowed(state: TrainingState, function: Callable[[], Result]) -> Result:
    """Call a function; if gradients are enabled, restore those of the modules after it."""
    with borrowed_gradients(state.modules) if torch.is_grad_enabled() else nullcontext():
        return function()


def forward_pass(state: TrainingState, inputs: Any, capture: Sequence[str], *, train: bool) -> ForwardResult:
    """Run the model without gradients; the pass is undone.

    Captured outputs are copies, made before a later module can overwrite them. If a module is called several times, its
    last output is returned.
    """
    model = state.model
    # With duplicates, so that shared modules are available under all of their names.
    modules = dict(model.named_modules(remove_duplicate=False))
    captured: dict[str, Any] = {}
    for name in capture:
        if name not in modules:
            raise unknown("module", name, modules)

    def capture_output(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        captured[name] = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), output)

    @contextmanager
    def restored() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(undone_pass(state))
            stack.enter_context(borrowed_modes(model, train=train))
            for name in capture:
                stack.callback(modules[name].register_forward_hook(partial(capture_output, name)).remove)
            yield

    def output() -> Any:
        return model(*inputs) if isinstance(inputs, tuple) else model(inputs)

    result = without_graph("forward", partial(with_gradients_borrowed, state, output), restored, set())
    return ForwardResult(result, captured)


def optimizer_groups(model: nn.Module, optimizer: Optimizer) -> tuple[OptimizerGroup, ...]:
    """Copy the optimizer's parameter groups into frozen views."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups, optimizers = [], separate_optimizers(optimizer)
    pairs = [(index, group) for index, item in enumerate(optimizers) for group in item.param_groups]
    for index, group in pairs:
        options = {key: tree_map_only(Tensor, Tensor.clone, value) for key, value in group.items() if key != "params"}
        if rounds_stochastically(optimizers[index], group):
            options["stochastic_rounding"] = True
        view = OptimizerGroup(
            names=tuple(names[parameter] for parameter in group["params"] if parameter in names),
            lr=float(learning_rate_of(group)),
            weight_decay=number_or(group.get("weight_decay"), 0.0),
            betas=betas_of(group),
            options=MappingProxyType(options),
            optimizer=index,
            optimizer_class=type(optimizers[index]),
        )
        groups.append(view)
    return tuple(groups)
