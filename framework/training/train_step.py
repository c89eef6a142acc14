"""One optimizer step: zero_grad, forward and backward over the micro-batches, then the update; mixed precision."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, wraps
from inspect import Parameter, signature
from itertools import chain
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..data import Batch, Loader, MicroBatches, SeparateBatches, micro_batches, rows
from ..errors import LoopscopeError, UsageError, listed, require
from .ranks import Ranks
from .step_clock import BACKWARD, FORWARD, StepClock
from .user_functions import loss_with_graph

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Precision:
    """The precision of forward passes: the dtype of autocast, or ``None`` for the precision of the parameters."""

    dtype: torch.dtype | None
    device_type: str

    @classmethod
    def of(cls, amp: Literal["none", "bf16", "fp16"], device: torch.device) -> "Precision":
        """Return the precision for a value of the option ``amp``."""
        return cls({"bf16": torch.bfloat16, "fp16": torch.float16}.get(amp), device.type)

    def autocast(self, function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        """Return the function wrapped in autocast, or the function itself without mixed precision."""
        if self.dtype is None:
            return function

        @wraps(function)
        def cast(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            with torch.autocast(self.device_type, self.dtype):
                return function(*args, **kwargs)

        return cast

    def scaler(self) -> GradScaler | None:
        """Return a new gradient scaler for float16, in which small gradients underflow; otherwise ``None``."""
        return GradScaler(self.device_type) if self.dtype is torch.float16 else None


def no_evaluation(model: nn.Module) -> dict[str, float]:
    """Return no numbers: the default of a task without evaluation."""
    return {}


def never_stop(evaluation: dict[str, float]) -> bool:
    """Return that training continues: the default of a task."""
    return False


@dataclass
class TrainingTask:
    """Model, optimizer, data and functions of an experiment: the input of a training loop.

    ``compute_loss(model, batch)`` returns the mean loss of the batch; ``evaluate(model)`` returns named numbers and
    is called in eval mode without gradients; ``should_stop(evaluation)`` ends the run early.
    """

    model: nn.Module
    optimizer: Optimizer
    loader: Loader
    compute_loss: Callable[[nn.Module, Batch], Tensor]
    evaluate: Callable[[nn.Module], dict[str, float]] = no_evaluation
    should_stop: Callable[[dict[str, float]], bool] = never_stop
    scheduler: LRScheduler | None = None
    scaler: GradScaler | None = None
    """Scaler of the loss, for float16."""
    scheduler_interval: str = "epoch"
    """When the scheduler steps in the epoch loop: every ``epoch`` or every ``step``. In the step loop it steps every
    step. A scheduler that takes a metric, such as ``ReduceLROnPlateau``, steps after every evaluation in both loops."""
    scheduler_metric: str = "val_loss"
    """The number of the evaluation that a scheduler such as ``ReduceLROnPlateau`` takes."""
    length: int = 1
    """The number of epochs of the epoch loop, or of steps of the step loop."""
    eval_every: int = 1
    snapshot_every: int = 10
    log_every: int = 100
    accumulation_steps: int = 1
    config: Any = None
    compiled: bool = False
    """Whether the model is trained through a wrapper of ``torch.compile``."""
    replica: DistributedDataParallel | None = None
    """The DistributedDataParallel wrapper, if the given model is one; it runs the training steps. Hooks get the wrapped
    model and average over ranks themselves, since the reducer counts backward passes and sums in another order."""
    differentiating: set[str] = field(default_factory=set, repr=False)
    """``"loss"`` and ``"evaluation"`` if that function has been found to differentiate within itself."""
    ranks: Ranks = None  # type: ignore[assignment]
    """The ranks that train the model; by default derived from the model."""

    def __post_init__(self) -> None:
        """Raise :class:`UsageError` for a combination of parts that cannot be trained."""
        if isinstance(self.model, DistributedDataParallel):
            self.replica, self.model = self.model, self.model.module
        if self.ranks is None:
            self.ranks = Ranks() if self.model is None else Ranks.of(self.model, self.replica)
        named = chain(self.model.named_parameters(), self.model.named_buffers()) if self.model is not None else ()
        if lazy := [name for name, tensor in named if is_lazy(tensor)]:  # type: ignore[no-untyped-call]
            raise UsageError(
                "The model has lazy tensors, whose shapes are unknown before the first forward pass: "
                f"{listed(lazy, 3)}. Pass the sizes to their modules, or call the model on a batch before creating the "
                "optimizer."
            )
        modules = self.model.named_modules() if self.model is not None else ()
        if scripted := [name for name, module in modules if isinstance(module, torch.jit.ScriptModule)]:
            raise UsageError(
                f"The model has TorchScript modules, whose state TorchScript keeps internally: {listed(scripted, 3)}. "
                "Use the original modules, with torch.compile if they should be fast."
            )
        if self.optimizer is not None and not hasattr(self.optimizer, "param_groups"):
            raise UsageError(
                f"{type(self.optimizer).__name__} has no param_groups, which hooks and checkpoints need for parameters "
                "and learning rates; a wrapper around other optimizers must return their groups as a list."
            )
        if self.scaler is not None and self.scaler.is_enabled() and takes_closure(self.optimizer):
            raise UsageError(
                f"{type(self.optimizer).__name__} evaluates the loss several times a step, which a GradScaler (float16)"
                " does not support; train in bfloat16 or float32, or with another optimizer."
            )
        required_arguments = [] if self.scheduler is None else _required_arguments(type(self.scheduler))
        kind = type(self.scheduler).__name__
        if required_arguments not in ([], METRIC_ARGUMENT, COUNT_ARGUMENT):
            raise UsageError(
                f"{kind}.step() requires {listed(required_arguments, 3)}; supported are no argument, a number of the "
                "evaluation (metrics), or the number of finished epochs or steps (epoch)."
            )
        if required_arguments == METRIC_ARGUMENT and not self.eval_every:
            raise UsageError(f"{kind} steps after evaluations, but eval_every is 0; set it to 1 or more.")

    def micro_batches(self, batch: Batch) -> Sequence[tuple[Batch, float]]:
        """Return the micro-batches of a batch, each with the weight of its loss in the loss of the step."""
        if isinstance(batch, MicroBatches):
            separate = isinstance(batch, SeparateBatches)
            return [(part, rows(part) / rows(batch) if separate else 1.0) for part in batch]
        weight = self.ranks.weight(rows(batch)) if self.ranks.uneven else 1.0
        if self.accumulation_steps == 1:
            return ((batch, weight),)
        require(
            weight == 1,
            f"The rows of a batch cannot be divided evenly among {self.ranks.size} ranks, so it cannot be split into "
            "micro-batches, of which some ranks would have more; choose another batch_size, or accumulation_steps=1.",
        )
        total = rows(batch)
        return [(part, rows(part) / total) for part in micro_batches(batch, self.accumulation_steps)]

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Accumulate the gradients of the loss of a micro-batch, scaled if there is a scaler.

        ``options`` are arguments of ``torch.Tensor.backward``, such as ``retain_graph``.
        """
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        scaled.backward(**options)  # type: ignore[no-untyped-call]


METRIC_ARGUMENT, COUNT_ARGUMENT = ["metrics"], ["epoch"]
"""Required arguments of ``scheduler.step``: a number of the evaluation (torch) or a count (timm)."""


@cache
def _find_required_arguments(kind: type[Any]) -> list[str]:
    """Return the names of the required arguments of the ``step`` method of a class."""
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    parameters = [*signature(kind.step).parameters.values()][1:]
    return [item.name for item in parameters if item.kind in kinds and item.default is Parameter.empty]


_required_arguments: Callable[[Any], list[str]] = _find_required_arguments  # mypy considers classes of torch unhashable


def advance_scheduler(task: TrainingTask, count: int) -> None:
    """Step the scheduler after ``count`` epochs or steps, unless it needs an evaluation."""
    if task.scheduler is not None and (arguments := _required_arguments(type(task.scheduler))) != METRIC_ARGUMENT:
        task.scheduler.step(*[count] * len(arguments))


def step_by_metric(task: TrainingTask, evaluation: Mapping[str, float]) -> None:
    """Step a scheduler that needs an evaluation; raises :class:`UsageError` if its number is missing."""
    if task.scheduler is not None and _required_arguments(type(task.scheduler)) == METRIC_ARGUMENT:
        _require_metric(task, evaluation)
        task.scheduler.step(evaluation[task.scheduler_metric])  # type: ignore[arg-type]  # the stub declares an epoch number


def check_metric(task: TrainingTask, evaluate: Callable[[], Mapping[str, float]]) -> None:
    """Raise :class:`UsageError` if the scheduler needs a number that the evaluation does not return."""
    if task.scheduler is not None and _required_arguments(type(task.scheduler)) == METRIC_ARGUMENT:
        _require_metric(task, evaluate())


def _require_metric(task: TrainingTask, evaluation: Mapping[str, float]) -> None:
    if task.scheduler_metric not in evaluation:
        raise UsageError(
            f"{type(task.scheduler).__name__} needs {task.scheduler_metric!r} of the evaluation, which returns "
            f"{listed(list(evaluation), 9) or 'no numbers'}; return it, or set best_metric of the experiment "
            "(scheduler_metric of the task) to another number."
        )


def forward_backward(
    task: TrainingTask,
    batch: Batch,
    *,
    trains: bool = False,
    before_backward: Callable[[Tensor], None] | None = None,
    clock: StepClock | None = None,
) -> Tensor:
    """Compute the unscaled gradients of the batch's mean loss, and return the loss, detached.

    With ``accumulation_steps`` the batch is split into micro-batches, each weighted by its share of the rows.
    Gradients and loss are means over the ranks. A pass that ``trains`` runs through the replica, which averages the
    gradients, and returns the loss of this rank. ``before_backward`` gets the loss of each micro-batch with its graph.
    The ``clock`` of a training step tells the passes apart.
    """
    if task.replica is not None and task.replica.static_graph and not trains:
        raise LoopscopeError(
            "Under DistributedDataParallel with static_graph=True, backward passes of hooks would change the training; "
            "remove static_graph, or the hooks that compute gradients."
        )
    if not trains:
        task.ranks.join()
    task.optimizer.zero_grad()
    losses = []
    enter = (clock or StepClock()).enter
    model = task.replica if trains and task.replica is not None else task.model
    # L = Σ w_k·L_k over the micro-batches k; each backward pass adds w_k·∇L_k to the gradients.
    for part, weight in task.micro_batches(batch):
        enter(FORWARD)
        loss = task.compute_loss(model, part) if trains else loss_with_graph(task.compute_loss, model, part)
        if weight != 1:
            loss = loss * weight
        if before_backward is not None:
            before_backward(loss)
        enter(BACKWARD)
        task.backward(loss)
        losses.append(loss.detach())
        del loss  # frees its graph before the next forward pass
    total = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
    if not trains:
        if task.ranks.averages:
            task.ranks.average_gradients(task.model.parameters())
        total = task.ranks.mean(total)
    if task.scaler is not None:
        task.scaler.unscale_(task.optimizer)
    return total


def is_skipped(task: TrainingTask) -> bool:
    """Return whether the update of this step must be skipped because gradients overflowed in float16.

    With sharded parameters this is a collective operation: every rank must call it.
    """
    if task.scaler is None:
        return False
    # Private: these are the flags that the scaler reads in step(). Its public methods only show afterwards that the
    # scale has decreased.
    overflow_flags = task.scaler._found_inf_per_device(task.optimizer)
    skipped = any(map(bool, overflow_flags.values()))
    if task.ranks.shards:  # torch reduces the flag only over the mesh of the first gradient, but there may be others
        skipped = task.ranks.agree(skipped)
        for flag in overflow_flags.values():  # the scaler reads these to skip the step and lower its scale
            flag.fill_(float(skipped))
    return skipped


def measure_gradients(task: TrainingTask, batch: Batch) -> Tensor:
    """Compute gradients for a measurement; after an overflow in float16, again with a smaller loss scale."""
    while True:
        loss = forward_backward(task, batch)
        if task.scaler is None:
            return loss
        skipped = is_skipped(task)
        task.scaler.update()
        if not skipped or task.scaler.get_scale() < 1:
            return loss


def update(
    task: TrainingTask,
    *,
    step_scheduler: bool,
    skipped: bool = False,
    closure: Callable[[], Tensor] | None = None,
    count: int = 0,
) -> None:
    """Step optimizer, scaler and scheduler; a ``skipped`` step only lowers the loss scale.

    ``closure`` is the result of :func:`make_closure`; ``count`` is the number of steps including this one.

    Raises:
        UsageError: the optimizer calls a closure, although its signature does not require one.
    """
    if task.scaler is not None:
        if not skipped:
            task.scaler.step(task.optimizer)
        task.scaler.update()
    elif closure is not None:
        task.optimizer.step(closure)  # type: ignore[arg-type]
    else:
        try:
            task.optimizer.step()
        except Exception as error:
            needs_closure = "closure" in str(error) or str(error) == "'NoneType' object is not callable"
            if needs_closure and not isinstance(error, Warning):
                kind = type(task.optimizer).__name__
                raise UsageError(
                    f"{kind}.step() failed without a closure ({type(error).__name__}: {error}). If it needs one, "
                    f"remove the default of its parameter closure, for example in a subclass of {kind}."
                ) from error
            raise
    if step_scheduler and not skipped and task.scheduler is not None:
        advance_scheduler(task, count)


def takes_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer requires a closure, such as LBFGS, which evaluates the loss several times a step."""
    return "closure" in _required_arguments(type(optimizer))


def make_closure(
    task: TrainingTask,
    batch: Batch,
    loss: Tensor,
    extra_evaluation: Callable[[], AbstractContextManager[object]] = nullcontext,
    *,
    trains: bool = False,
) -> Callable[[], Tensor] | None:
    """Return the closure for an optimizer such as LBFGS that evaluates the loss several times a step, else ``None``.

    The first call returns the given ``loss`` with the existing gradients, unless the optimizer has changed parameters
    or gradients before. Every other call evaluates ``batch`` within ``extra_evaluation()`` and sets the gradients;
    ``trains`` as in :func:`forward_backward`.
    """
    if "closure" not in _required_arguments(type(task.optimizer)):
        return None

    def versions() -> list[tuple[int, int, int | None]]:
        # Private: torch increments _version at every change in place, which costs no copy and no comparison.
        leaves = [parameter for group in task.optimizer.param_groups for parameter in group["params"]]
        return [(leaf.data_ptr(), leaf._version, None if leaf.grad is None else leaf.grad._version) for leaf in leaves]

    initial_versions = [versions()]

    def evaluate() -> Tensor:
        if initial_versions and initial_versions.pop() == versions():
            return loss
        with extra_evaluation():
            return forward_backward(task, batch, trains=trains)

    return evaluate


@contextmanager
def borrowed_scaler(task: TrainingTask) -> Iterator[None]:
    """Replace the task's scaler by a copy for the body, since the original may be within a step."""
    scaler = task.scaler
    try:
        if scaler is not None and scaler.is_enabled():
            task.scaler = GradScaler(scaler._device)  # private: the device has no public name
            task.scaler.load_state_dict(scaler.state_dict())
        yield
    finally:
        task.scaler = scaler
