"""The model context of one intervention call: measurements, reversible changes and recorded commits."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from ..data import Batch, Loader, derived_seed, rows, with_copied_batches
from ..errors import LoopscopeError, unknown
from ..hooks import ENDLESS, Clipping, ExpiredError, ModelDataContext, ReadOnlyError, StatePart
from ..isolation import LightStateCopy, StateCopy, borrowed_gradients, borrowed_group_options, undone_pass
from ..state import TrainingState, optimizers_of
from ..state.settings import script_settings
from ..tensors import Vector, accumulate, copied, is_partial, live_gradients, local_shards
from ..training import (
    METHODS,
    LossProbe,
    Method,
    Profiler,
    TrainingTask,
    advance_scheduler,
    borrowed_scaler,
    forward_backward,
    is_skipped,
    make_closure,
    measure_gradients,
    update,
)
from . import commits
from .commits import CommitRecord, Values, check_vector, clip, clipping_of

GRADIENTS = StatePart.GRADIENTS


@dataclass
class Access:
    """The objects that the methods of a model context use during its call."""

    task: TrainingTask
    state: TrainingState
    commits: CommitRecord
    parameters: list[nn.Parameter]
    """Those of the model, in its order, which avoids a walk through it."""
    _: KW_ONLY
    mutates: bool
    device: torch.device | None
    """The device of full checkpoints; ``None`` for that of the state."""
    stream: tuple[str, str, int]
    """Name, point and step, which identify the random stream of the call."""
    loop: str
    profiler: Profiler = field(default_factory=Profiler)
    checkpoints: dict[int, StateCopy | LightStateCopy] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Create the probe of losses."""
        self.probe = LossProbe(self.task, self.state, self.profiler)
        self.steps_scheduler = self.loop == "step" or self.task.scheduler_interval == "step"


class ModelContext(ModelDataContext):
    """The :class:`.ModelDataContext` of one call; every method raises :class:`.ExpiredError` after the call."""

    _next_token = 0
    _shuffles = 0

    def __init__(self, access: Access) -> None:
        """Prepare for one call."""
        self._stream, self._access = access.stream, cast(Access | None, access)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Expire the context: changes after the call would be neither rolled back nor committed."""
        self._access = None

    @property
    def _open(self) -> Access:
        """The objects of the call."""
        if self._access is None:
            name, point, step = self._stream
            raise ExpiredError(
                f"The model context of hook {name!r} at {point} of step {step} was used after that call, when changes "
                "are no longer rolled back; use it only within intervene(), which receives a new one in every call."
            )
        return self._access

    @property
    def _task(self) -> TrainingTask:
        return self._open.task

    @property
    def _state(self) -> TrainingState:
        return self._open.state

    @property
    @override
    def model(self) -> nn.Module:
        return self._task.model

    @property
    @override
    def device(self) -> torch.device:
        return next(self._task.model.parameters()).device

    @property
    @override
    def loader(self) -> Loader:
        return with_copied_batches(self._task.loader)

    @property
    @override
    def optimizer_state(self) -> Mapping[str, Mapping[str, Any]]:
        states = {key: value for optimizer in optimizers_of(self._state) for key, value in optimizer.state.items()}
        named = self.model.named_parameters()
        return {name: MappingProxyType(states[parameter]) for name, parameter in named if parameter in states}

    @override
    def rows(self, batch: Batch) -> int:
        self._task.ranks.join()
        return self._task.ranks.rows(rows(batch))

    @override
    def compute_batch_loss(self, batch: Batch | None = None) -> Tensor:
        return self._open.probe.loss(self._batch_or_current(batch))

    @override
    def compute_batch_gradients(self, batch: Batch | None = None) -> dict[str, Tensor]:
        return self._open.probe.gradient(self._batch_or_current(batch))

    @override
    def measure_rows(self, batch: Batch | None = None) -> tuple[Tensor, Tensor]:
        return self._open.probe.measure_rows(self._batch_or_current(batch))

    @override
    def compute_gradients(self) -> dict[str, Tensor]:
        return self._open.probe.mean_gradient(_epoch_of(self._task.loader, self._state.loop.epoch))

    @override
    def hessian_vector_product(
        self,
        vector: Vector,
        batch: Batch | None = None,
        *,
        loader: Loader | None = None,
        method: Method = "exact",
        epsilon: float = 1e-2,
    ) -> dict[str, Tensor]:
        self._check_product(vector, method, epsilon)
        if loader is None:
            product_batch = self._batch_or_current(batch)
            return self._open.probe.hessian_product(vector, lambda: [product_batch], method, epsilon)
        if batch is not None:
            raise LoopscopeError("Pass a batch or a loader, not both: the loss is the mean over one of them.")
        epoch = self._state.loop.epoch
        return self._open.probe.hessian_product(vector, partial(_epoch_of, loader, epoch), method, epsilon)

    @override
    def hessian_operator(
        self, batch: Batch | None = None, *, method: Method = "exact", epsilon: float = 1e-2
    ) -> Callable[[Vector], dict[str, Tensor]]:
        self._check_product({}, method, epsilon)
        product_batch = self._batch_or_current(batch)
        if method == "finite_difference":
            return partial(self.hessian_vector_product, batch=product_batch, method=method, epsilon=epsilon)
        # One graph serves all products; finite differences move the parameters, so they need a new graph each time.
        product = self._open.probe.hessian(product_batch)

        def times(vector: Vector) -> dict[str, Tensor]:
            check_vector(self.model, vector)
            return product(vector)

        return times

    @override
    def find_hessian_problem(self, batch: Batch | None = None, *, epsilon: float = 1e-2) -> str:
        self._check_product({}, "finite_difference", epsilon)
        return self._open.probe.find_hessian_problem(self._batch_or_current(batch), epsilon)

    def _check_product(self, vector: Vector, method: Method, epsilon: float) -> None:
        if method not in METHODS:
            raise unknown("method", method, METHODS)
        if not epsilon > 0:
            raise LoopscopeError(f"epsilon is {epsilon}; it must be positive.")
        check_vector(self.model, vector)
        if method == "finite_difference":
            self._must_mutate("hessian_vector_product(method='finite_difference')")

    def _must_mutate(self, verb: str) -> None:
        if not self._open.mutates:
            raise ReadOnlyError(
                f"{verb} changes the training state, but the hook declares mutates = False; remove that declaration."
            )

    def _batch_or_current(self, batch: Batch | None) -> Batch:
        if batch is not None:
            return batch
        if self._state.loop.batch is None:
            raise LoopscopeError("No batch is current at this hook point; pass a batch.")
        return self._state.loop.batch

    @override
    def save_checkpoint(self, *, full: bool = True) -> int:
        self._next_token += 1
        self._open.checkpoints[self._next_token] = (
            StateCopy(self._open.device, streams=True).save(self._state) if full else LightStateCopy(self._state)
        )
        return self._next_token

    @override
    def restore_checkpoint(self, token: int) -> None:
        self._must_mutate("restore_checkpoint")
        self._checkpoint(token).restore(self._state)

    @override
    def discard_checkpoint(self, token: int) -> None:
        self._checkpoint(token)
        del self._open.checkpoints[token]

    @override
    @contextmanager
    def branch(self, *, full: bool = True) -> Iterator[None]:
        self._must_mutate("branch")
        token = self.save_checkpoint(full=full)
        try:
            yield
        finally:
            self.restore_checkpoint(token)
            self.discard_checkpoint(token)

    @override
    def restore_pre_epoch(self) -> None:
        self._must_mutate("restore_pre_epoch")
        if self._state.loop.pre_epoch is None:
            raise LoopscopeError(
                "No pre-epoch state is saved here; it exists at POST_EPOCH and SNAPSHOT, for a hook whose class sets "
                "needs_pre_epoch_state = True."
            )
        with self._state.streams.preserved():
            self._state.loop.pre_epoch.restore(self._state)

    @override
    def run_training_epoch(self, loader: Loader, *, step: bool = True) -> dict[str, Tensor]:
        if step:
            self._must_mutate("run_training_epoch(step=True)")
        # A forward pass in train mode updates batch-norm statistics; without steps, these updates are undone.
        settings = script_settings() if step else undone_pass(self._state, clears_gradients=True)
        with settings, borrowed_gradients(self._state.modules), borrowed_scaler(self._task), torch.enable_grad():
            return self._train(loader, step=step)

    @override
    def take_step(
        self,
        batch: Batch | None = None,
        *,
        learning_rates: Sequence[float] | None = None,
        rate_factor: float = 1.0,
        weight_decay: float | None = None,
        max_norm: float | None = None,
        passes: AbstractContextManager[object] = nullcontext(),  # noqa: B008 - it has no state
    ) -> Tensor:
        self._must_mutate("take_step")
        step_batch = self._batch_or_current(batch)
        groups = self._task.optimizer.param_groups
        self._open.profiler.count_samples("forward_backward", step_batch)
        options = borrowed_group_options(groups, learning_rates, rate_factor, weight_decay)
        gradients, scaler = borrowed_gradients(self._state.modules), borrowed_scaler(self._task)
        with script_settings(), gradients, scaler, torch.enable_grad():
            with options:
                with passes:
                    loss = forward_backward(self._task, step_batch)
                skipped, closure = is_skipped(self._task), make_closure(self._task, step_batch, loss)
                if max_norm is not None:
                    clip(self.model.parameters(), max_norm)
                update(self._task, step_scheduler=False, skipped=skipped, closure=closure)
            # After the changed options are restored, since a scheduler may derive the next learning rate from them.
            if self._open.steps_scheduler and learning_rates is None and not skipped:
                advance_scheduler(self._task, self._state.loop.step)
        return loss

    @override
    def get_shuffled_loader(self) -> Loader:
        self._shuffles += 1
        return with_copied_batches(self._task.loader).shuffled(
            derived_seed(self._state.streams.seed, *self._open.stream, self._shuffles)
        )

    @override
    def apply_perturbation(self, direction: Vector, scale: float) -> None:
        self._must_mutate("apply_perturbation")
        check_vector(self.model, direction)
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            # θ ← θ + scale·d with one foreach kernel for all tensors; foreach supports local shards, but no DTensors.
            targets = local_shards([parameters[name] for name in direction])
            torch._foreach_add_(targets, local_shards(direction.values()), alpha=scale)

    def _checkpoint(self, token: int) -> StateCopy | LightStateCopy:
        if token not in self._open.checkpoints:
            raise LoopscopeError(
                f"Checkpoint {token} does not exist; existing tokens: {sorted(self._open.checkpoints)}."
            )
        return self._open.checkpoints[token]

    def _train(self, loader: Loader, *, step: bool) -> dict[str, Tensor]:
        access = self._open
        total: dict[str, Tensor] = {}
        steps = skips = 0
        named = list(self.model.named_parameters())
        for batch in loader.batches(access.state.loop.epoch):
            access.profiler.count_samples("forward_backward", batch)
            compute_gradients = forward_backward if step else measure_gradients
            loss = compute_gradients(access.task, batch)
            skipped = step and is_skipped(access.task)
            if not skipped:
                live = {name: parameter.grad for name, parameter in named if parameter.grad is not None}
                total = accumulate(total, live)
            if step:
                count, closure = access.state.loop.step + steps, make_closure(access.task, batch, loss)
                update(
                    access.task, step_scheduler=access.steps_scheduler, skipped=skipped, closure=closure, count=count
                )
            steps += not skipped
            skips += skipped
        if not steps:
            reason = "the gradients of all batches overflowed in float16" if skips else "it has no batches"
            raise LoopscopeError(f"No step of the loader's epoch could be taken: {reason}.")
        with torch.no_grad():
            if not total:  # torch._foreach_* functions raise for an empty list
                return {}
            # One division at the end, like the loop, so that the result equals accumulated_grads bit by bit.
            torch._foreach_div_(local_shards(total.values()), steps)
        return total

    @override
    def scale_gradients(self, factor: float | Tensor | Mapping[str, float | Tensor]) -> None:
        if isinstance(factor, Mapping):
            commits.check_factors(self.model, factor)
            factors = {name: _copied_factor(value) for name, value in factor.items()}
            self._commit(GRADIENTS, "scale_gradients", commits.scale_each, self.model, factors)
        else:
            factor, parameters = _copied_factor(factor), self._open.parameters
            self._commit(GRADIENTS, "scale_gradients", commits.scale_gradients, parameters, factor)

    @override
    def clamp_gradients(self, max_value: float) -> None:
        if not max_value > 0:
            raise LoopscopeError(f"max_value is {max_value}; it must be positive.")
        if any(map(is_partial, live_gradients(self._open.parameters))):
            raise LoopscopeError(
                "clamp_gradients needs complete or sharded gradients, but a DTensor's gradient is a partial sum over "
                "ranks: the sum of clamped parts is not the clamped sum."
            )
        self._commit(GRADIENTS, "clamp_gradients", commits.clamp, self._open.parameters, max_value)

    @override
    def clip_gradients(self, max_norm: float) -> Clipping:
        live = live_gradients(self._open.parameters)
        clipping = clipping_of(live, max_norm)
        # A rollback or an earlier commit may replace the gradients before this change is applied.
        if self._open.mutates or self._open.commits.changes:
            self._commit(GRADIENTS, "clip_gradients", commits.clip, self._open.parameters, max_norm)
        else:
            self._commit(GRADIENTS, "clip_gradients", commits.scale, live, clipping.factor)
        return clipping

    @override
    def replace_gradients(self, values: Vector) -> None:
        copies = self._protected(values)
        self._commit(GRADIENTS, "replace_gradients", commits.replace_gradients, self.model, copies)

    @override
    def add_to_gradients(self, values: Vector, factor: Tensor) -> None:
        copies, scale = self._protected(values), factor.clone()
        self._commit(GRADIENTS, "add_to_gradients", commits.add_scaled, self.model, copies, scale)

    @override
    def blend_parameters(self, target: Vector, weight: float) -> None:
        copies = self._protected(target)
        self._commit(StatePart.PARAMETERS, "blend_parameters", commits.blend, self.model, copies, weight)

    @override
    def thaw_parameters(self, names: str | Iterable[str]) -> None:
        if self._task.ranks.averages and self._task.ranks.data:
            raise LoopscopeError(
                "DistributedDataParallel averages only gradients of parameters that were trainable when it was "
                "created, so no others can be thawed; train with one process."
            )
        parameters = commits.parameters_named(self.model, names)
        self._commit(StatePart.PARAMETERS, "thaw_parameters", commits.thaw, parameters)

    @override
    def reset_optimizer_state(self, names: str | Iterable[str]) -> None:
        parameters = commits.parameters_named(self.model, names)
        self._commit(StatePart.OPTIMIZER, "reset_optimizer_state", commits.forget, self._state, parameters)

    def _commit(self, part: StatePart, verb: str, change: Callable[[*Values], None], *arguments: *Values) -> None:
        self._open.commits.record(part, verb, change, *arguments)

    def _protected(self, vector: Vector) -> Vector:
        """Check a vector, and copy tensors that the rollback or the commits may change before they are used."""
        check_vector(self.model, vector)
        if self._open.mutates:
            return copied(vector)
        memory = commits.ParameterMemory(self._open.parameters)
        return {name: value.detach().clone() if memory.overlaps(value) else value for name, value in vector.items()}


def _copied_factor(factor: float | Tensor) -> float | Tensor:
    return factor.clone() if isinstance(factor, Tensor) else factor


def _epoch_of(loader: Loader, epoch: int) -> Iterator[Batch]:
    """Return the batches of an epoch, over which a mean is taken."""
    if len(loader) >= ENDLESS:
        raise LoopscopeError("The training data have no length, so a mean over all of them cannot be computed.")
    return loader.batches(epoch)
