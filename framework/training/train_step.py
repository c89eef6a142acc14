"""One optimizer step: zero_grad, forward and backward over the micro-batches, then the update; mixed precision."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
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

from ..data import Batch, Loader, MicroBatches, micro_batches, rows
from ..errors import LoopscopeError, UsageError, listed, require
from .ranks import Ranks

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Precision:
    """What forward passes compute in: the parameters' own precision (``None``), or a lower one where that is safe."""

    dtype: torch.dtype | None
    device_type: str

    @classmethod
    def of(cls, amp: Literal["none", "bf16", "fp16"], device: torch.device) -> "Precision":
        """Return the precision that the option ``amp`` asks for."""
        return cls({"bf16": torch.bfloat16, "fp16": torch.float16}.get(amp), device.type)

    def autocast(self, function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        """Return the function under autocast, or itself where there is none."""
        if self.dtype is None:
            return function

        @wraps(function)
        def cast(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            with torch.autocast(self.device_type, self.dtype):
                return function(*args, **kwargs)

        return cast

    def scaler(self) -> GradScaler | None:
        """Return a new scaler for float16, whose small gradients are zero otherwise; no other precision needs one."""
        return GradScaler(self.device_type) if self.dtype is torch.float16 else None


@dataclass
class TrainingTask:
    """What is trained, on what, by what: everything a training loop needs to know of an experiment.

    ``compute_loss(model, batch)`` returns the mean loss of the batch; ``evaluate(model)`` returns named numbers and
    is called in eval mode without gradients; ``should_stop(evaluation)`` ends the run early.
    """

    model: nn.Module
    optimizer: Optimizer
    loader: Loader
    compute_loss: Callable[[nn.Module, Batch], Tensor]
    evaluate: Callable[[nn.Module], dict[str, float]] = lambda model: {}
    should_stop: Callable[[dict[str, float]], bool] = lambda evaluation: False
    target_grad: Callable[[nn.Module], dict[str, Tensor] | None] = lambda model: None
    scheduler: LRScheduler | None = None
    scaler: GradScaler | None = None
    """Scales the loss, for float16."""
    scheduler_interval: str = "epoch"
    """When the scheduler steps in the epoch loop: every ``epoch`` or every ``step``; in the step loop, every step. One
    that takes a metric, such as ``ReduceLROnPlateau``, steps in both after every evaluation."""
    scheduler_metric: str = "val_loss"
    """The number of the evaluation that such a scheduler takes."""
    length: int = 1
    """Epochs of the epoch loop, steps of the step loop."""
    eval_every: int = 1
    snapshot_every: int = 10
    log_every: int = 100
    accumulation_steps: int = 1
    config: Any = None
    compiled: bool = False
    """The model stands within one that torch.compile made, by which it is trained."""
    replica: DistributedDataParallel | None = None
    """What was given as the model, if it was one of these: steps are trained by it. Hooks get the model within, and
    average over the ranks themselves, since its reducer counts backward passes and would sum in another order."""
    ranks: Ranks = None  # type: ignore[assignment]
    """Who trains the model; found out from the model, unless it is given."""

    def __post_init__(self) -> None:
        """Raise :class:`UsageError` for what cannot be trained together, before anything is."""
        if isinstance(self.model, DistributedDataParallel):
            self.replica, self.model = self.model, self.model.module
        if self.ranks is None:
            self.ranks = Ranks() if self.model is None else Ranks.of(self.model, self.replica)
        named = chain(self.model.named_parameters(), self.model.named_buffers()) if self.model is not None else ()
        if lazy := [name for name, tensor in named if is_lazy(tensor)]:  # type: ignore[no-untyped-call]
            raise UsageError(
                f"The model has tensors that get their shape only in its first forward pass: {listed(lazy, 3)}. Give "
                "their modules the sizes, or call the model on a batch before the optimizer is built."
            )
        modules = self.model.named_modules() if self.model is not None else ()
        if scripted := [name for name, module in modules if isinstance(module, torch.jit.ScriptModule)]:
            raise UsageError(
                f"The model has scripted modules, whose state TorchScript keeps for itself: {listed(scripted, 3)}. "
                "Give the modules that were scripted, compiled by torch.compile if they are to be fast."
            )
        if self.optimizer is not None and not hasattr(self.optimizer, "param_groups"):
            raise UsageError(
                f"{type(self.optimizer).__name__} has no param_groups, by which hooks and checkpoints know what it "
                "trains at which rate; one that stands before other optimizers gives theirs, in a list."
            )
        if self.scaler is not None and self.scaler.is_enabled() and takes_closure(self.optimizer):
            raise UsageError(
                f"{type(self.optimizer).__name__} evaluates the loss several times a step, which a GradScaler (float16)"
                " does not support; train in bfloat16 or float32, or with another optimizer."
            )
        required = [] if self.scheduler is None else _required(type(self.scheduler))
        kind = type(self.scheduler).__name__
        if required not in ([], METRIC, COUNT):
            raise UsageError(
                f"{kind}.step() must be given {listed(required, 3)}; what a scheduler can be given is nothing, a number"
                " of the evaluation (metrics), or how many epochs or steps are done (epoch)."
            )
        if required == METRIC and not self.eval_every:
            raise UsageError(f"{kind} steps after evaluations, but eval_every is 0; set it to 1 or more.")

    def micro_batches(self, batch: Batch) -> Sequence[tuple[Batch, float]]:
        """Return the parts of which a step's batch is made up, each with the weight of its loss in the step's."""
        if isinstance(batch, MicroBatches):
            return [(part, 1.0) for part in batch]
        weight = self.ranks.weight(rows(batch)) if self.ranks.uneven else 1.0
        if self.accumulation_steps == 1:
            return ((batch, weight),)
        require(
            weight == 1,
            f"A batch whose rows {self.ranks.size} ranks cannot share evenly cannot be split into micro-batches, since "
            "some ranks might have more of them than others; choose another batch_size, or accumulation_steps=1.",
        )
        total = rows(batch)
        return [(part, rows(part) / total) for part in micro_batches(batch, self.accumulation_steps)]

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Add the gradients of a micro-batch's loss, scaled where there is a scaler, to those that are there."""
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]


METRIC, COUNT = ["metrics"], ["epoch"]
"""What ``step`` of a scheduler must be given: a number of the evaluation (as in torch), or a count (as in timm)."""


@cache
def _required_of(kind: type[Any]) -> list[str]:
    """Return the names of the parameters that the method ``step`` of a class must be given."""
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    found = [*signature(kind.step).parameters.values()][1:]
    return [item.name for item in found if item.kind in kinds and item.default is Parameter.empty]


_required: Callable[[Any], list[str]] = _required_of  # mypy takes a class of torch's for one that cannot be a key


def advance_scheduler(task: TrainingTask, count: int) -> None:
    """Let the scheduler step after ``count`` epochs or steps, unless it waits for an evaluation."""
    if task.scheduler is not None and (required := _required(type(task.scheduler))) != METRIC:
        task.scheduler.step(*[count] * len(required))


def step_by_metric(task: TrainingTask, evaluation: Mapping[str, float]) -> None:
    """Let a scheduler step that waits for an evaluation; raises :class:`UsageError` if its number is not there."""
    if task.scheduler is not None and _required(type(task.scheduler)) == METRIC:
        check_metric(task, lambda: evaluation)
        task.scheduler.step(evaluation[task.scheduler_metric])  # type: ignore[arg-type]  # not the number of an epoch


def check_metric(task: TrainingTask, evaluate: Callable[[], Mapping[str, float]]) -> None:
    """Raise :class:`UsageError` if a scheduler takes a number that the evaluation lacks; others need none."""
    if task.scheduler is None or _required(type(task.scheduler)) != METRIC:
        return
    if task.scheduler_metric not in (evaluation := evaluate()):
        raise UsageError(
            f"{type(task.scheduler).__name__} takes {task.scheduler_metric!r} of the evaluation, which returns "
            f"{listed(list(evaluation), 9) or 'nothing'}; return it, or name another number as best_metric of the "
            "experiment (scheduler_metric of the task)."
        )


def forward_backward(task: TrainingTask, batch: Batch, *, trains: bool = False) -> Tensor:
    """Compute the gradients of the batch's mean loss, unscaled, and return that loss, detached.

    With ``accumulation_steps`` the batch is split into micro-batches, each weighted by its share of the rows.
    Gradients and loss are means over the ranks; a pass that ``trains`` is the replica's own, and the loss that of this
    rank.
    """
    if task.replica is not None and task.replica.static_graph and not trains:
        raise LoopscopeError(
            "Under DistributedDataParallel with static_graph=True every backward pass counts, also those of hooks, and "
            "changes the training; leave static_graph out, or the hooks that compute gradients."
        )
    if not trains:
        task.ranks.join()
    task.optimizer.zero_grad()
    losses = []
    model = task.replica if trains and task.replica is not None else task.model
    for part, weight in task.micro_batches(batch):
        loss = task.compute_loss(model, part)
        if weight != 1:
            loss = loss * weight
        task.backward(loss)
        losses.append(loss.detach())
        del loss  # or its graph would live on during the next forward pass
    total = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
    if not trains:
        if task.ranks.averages:
            task.ranks.average_gradients(task.model.parameters())
        total = task.ranks.mean(total)
    if task.scaler is not None:
        task.scaler.unscale_(task.optimizer)
    return total


def is_skipped(task: TrainingTask) -> bool:
    """Return whether this step's update has to be skipped: scaled too far, its gradients left float16."""
    if task.scaler is None:
        return False
    # what the scaler itself asks before a step; its public methods only say afterwards that the scale has shrunk
    found = task.scaler._found_inf_per_device(task.optimizer)
    skipped = any(map(bool, found.values()))
    if task.ranks.shards:  # torch asks the ranks of the first gradient's mesh alone, and there may be others
        skipped = task.ranks.agree(skipped)
        for flag in found.values():  # by which the scaler steps, and lowers its scale
            flag.fill_(float(skipped))
    return skipped


def measure_gradients(task: TrainingTask, batch: Batch) -> Tensor:
    """Compute the gradients for nobody's step: where they leave float16, again with the loss scaled less."""
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
    """Let the optimizer use the gradients; a ``skipped`` step only lowers the scale of the loss.

    ``closure`` is what :func:`evaluations` returns; ``count`` is how many steps are done with this one.
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
            asks = "closure" in str(error) or str(error) == "'NoneType' object is not callable"
            if asks and not isinstance(error, Warning):
                kind = type(task.optimizer).__name__
                raise UsageError(
                    f"{kind}.step() failed without a closure ({type(error).__name__}: {error}). If it needs one, give "
                    f"its parameter closure no default, say in a subclass of {kind}, and it is called with one."
                ) from error
            raise
    if step_scheduler and not skipped:
        advance_scheduler(task, count)


def takes_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer evaluates the loss itself, several times a step, as LBFGS does."""
    return "closure" in _required(type(optimizer))


def make_closure(
    task: TrainingTask,
    batch: Batch,
    loss: Tensor,
    again: Callable[[], AbstractContextManager[object]] = nullcontext,
    *,
    trains: bool = False,
) -> Callable[[], Tensor] | None:
    """Return what an optimizer calls that evaluates the loss several times a step, as LBFGS does; else ``None``.

    Its first evaluation are the ``loss`` and the gradients that are there, unless it has moved something by then. Each
    further one is made of ``batch``, within ``again()``, and leaves its gradients; ``trains`` as in
    :func:`forward_backward`.
    """
    if "closure" not in _required(type(task.optimizer)):
        return None

    def where() -> list[tuple[int, int, int | None]]:
        leaves = [parameter for group in task.optimizer.param_groups for parameter in group["params"]]
        return [(leaf.data_ptr(), leaf._version, None if leaf.grad is None else leaf.grad._version) for leaf in leaves]

    found = [where()]

    def evaluate() -> Tensor:
        if found and found.pop() == where():
            return loss
        with again():
            return forward_backward(task, batch, trains=trains)

    return evaluate


@contextmanager
def borrowed_scaler(task: TrainingTask) -> Iterator[None]:
    """Let the body scale its losses by a twin of the task's scaler, which may itself be in the middle of a step."""
    scaler = task.scaler
    try:
        if scaler is not None and scaler.is_enabled():
            task.scaler = GradScaler(scaler._device)  # no public name tells its device
            task.scaler.load_state_dict(scaler.state_dict())
        yield
    finally:
        task.scaler = scaler
