"""The SAPI: the only door through which an intervention reaches the mutable training state."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ..data import Batch, Loader, derived_seed
from ..errors import LoopscopeError, unknown
from ..isolation import LightSnapshot, Snapshot, borrowed_buffers, borrowed_gradients, borrowed_learning_rates
from ..state import TrainingState, Vector, accumulate, copied, live_gradients, local_shards
from ..training import (
    METHODS,
    LossProbe,
    Method,
    Profiler,
    TrainingTask,
    borrowed_scaler,
    forward_backward,
    is_skipped,
    measure_gradients,
    update,
)
from .commits import (
    Clipping,
    CommitRecord,
    StatePart,
    add_scaled,
    blend,
    check_clamping,
    check_factors,
    check_vector,
    clamp,
    clip,
    forgetting,
    replace_gradients,
    scale,
    scale_each,
    thawing,
)


class ReadOnlyError(LoopscopeError):
    """A hook with ``mutates = False`` called a verb that changes the training state."""


class ModelDataContext:
    """What an intervention may do, in one call; everything it did is rolled back when the call ends.

    Vectors are dicts from parameter names to tensors of the parameters' shapes (plain tensors or DTensors); a name
    that is missing stands for zeros. Losses, gradients and curvature are those of the training loss in the model's
    present modes. What measuring them needs (buffers, modes, gradients, random streams) is borrowed and put back, so
    that two measurements in one call see the same dropout mask.
    """

    def __init__(
        self,
        task: TrainingTask,
        state: TrainingState,
        commits: CommitRecord,
        parameters: list[nn.Parameter],
        *,
        mutates: bool,
        device: torch.device | None,
        stream: tuple[str, str, int],
        loop: str,
        profiler: Profiler | None = None,
    ) -> None:
        """Serve one call.

        Args:
            task: what is trained.
            state: the training state.
            commits: takes what the hook asks to keep.
            parameters: those of the model, in its order, which nobody then needs to walk through again.
            mutates: whether the hook declares that it changes the state.
            device: where full checkpoints live; ``None``: where the state does.
            stream: the (name, point, step) of the call's random stream.
            loop: the loop's type.
            profiler: counts the passes through the model.
        """
        self._task = task
        self._state = state
        self._commits = commits
        self._parameters = parameters
        self._profiler = profiler or Profiler()
        self._probe = LossProbe(task, state, self._profiler)
        self._mutates = mutates
        self._snapshot_device = device
        self._stream = stream
        self._steps_scheduler = loop == "step" or task.scheduler_interval == "step"
        self._shuffles = 0
        self._checkpoints: dict[int, Snapshot | LightSnapshot] = {}
        self._next_token = 0

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self._task.model

    @property
    def device(self) -> torch.device:
        """The device of the model's first parameter."""
        return next(self._task.model.parameters()).device

    @property
    def loader(self) -> Loader:
        """The training data, in the run's order."""
        return self._task.loader

    @property
    def optimizer_state(self) -> Mapping[str, Mapping[str, Any]]:
        """The optimizer's state by parameter name: the live tensors, for reading."""
        state = self._task.optimizer.state
        named = self.model.named_parameters()
        return {name: MappingProxyType(state[parameter]) for name, parameter in named if parameter in state}

    def save_checkpoint(self, *, full: bool = True) -> int:
        """Save the training state and return a token for it.

        ``full=False`` saves parameters, buffers and random streams only, on their device: enough for work that
        only runs forward and backward.
        """
        self._next_token += 1
        self._checkpoints[self._next_token] = (
            Snapshot(self._snapshot_device, streams=True).save(self._state) if full else LightSnapshot.of(self._state)
        )
        return self._next_token

    def restore_checkpoint(self, token: int) -> None:
        """Put back what :meth:`save_checkpoint` saved under ``token``, random streams included."""
        self._must_mutate("restore_checkpoint")
        self._checkpoint(token).restore(self._state)

    def discard_checkpoint(self, token: int) -> None:
        """Free the memory of a checkpoint."""
        self._checkpoint(token)
        del self._checkpoints[token]

    @contextmanager
    def branch(self, *, full: bool = True) -> Iterator[None]:
        """Run the body and put the training state back afterwards, whatever happened."""
        self._must_mutate("branch")
        token = self.save_checkpoint(full=full)
        try:
            yield
        finally:
            self.restore_checkpoint(token)
            self.discard_checkpoint(token)

    def restore_pre_epoch(self) -> None:
        """Go back to the state before the current epoch; the hook's class sets ``needs_pre_epoch_state``.

        The hook's own random streams go on, so that what it draws after each return is new.
        """
        self._must_mutate("restore_pre_epoch")
        if self._state.loop.pre_epoch is None:
            raise LoopscopeError(
                "There is no pre-epoch state here: it exists at POST_EPOCH and SNAPSHOT of the epoch loop, for a hook "
                "whose class sets needs_pre_epoch_state = True."
            )
        with self._state.streams.isolated():
            self._state.loop.pre_epoch.restore(self._state)

    def compute_batch_loss(self, batch: Batch | None = None) -> Tensor:
        """Return the mean loss on one batch (default: the current one), at the present parameters."""
        return self._probe.loss(self._batch(batch))

    def compute_batch_gradients(self, batch: Batch | None = None) -> dict[str, Tensor]:
        """Return the gradient of the mean loss on one batch (default: the current one), at the present parameters."""
        return self._probe.gradient(self._batch(batch))

    def compute_gradients(self) -> dict[str, Tensor]:
        """Return the gradient of the mean loss over the training set, batches weighted by their rows."""
        return self._probe.mean_gradient(self._task.loader.batches(self._state.loop.epoch))

    def run_training_epoch(self, loader: Loader, *, step: bool = True) -> dict[str, Tensor]:
        """Train one epoch and return the mean of its steps' gradients, as ``accumulated_grads`` holds the run's.

        With ``step=False`` parameters, optimizer and scheduler stay as they are. Dropout masks come from the present
        random streams. A per-epoch scheduler is not stepped, commits of other hooks are not made.
        """
        with ExitStack() as stack:
            stack.enter_context(borrowed_gradients(self.model))
            stack.enter_context(borrowed_scaler(self._task))
            stack.enter_context(torch.enable_grad())
            if step:
                self._must_mutate("run_training_epoch(step=True)")
            else:
                stack.enter_context(borrowed_buffers(self.model))
            return self._train(loader, step=step)

    def take_step(self, batch: Batch | None = None, *, learning_rates: Sequence[float] | None = None) -> Tensor:
        """Train one step on a batch (default: the current one), as the loop does, and return its loss before the step.

        ``learning_rates`` has one for each of the optimizer's parameter groups; they hold for this step only, and the
        scheduler then stays where it is. Dropout masks come from the present random streams. A per-epoch scheduler is
        not stepped, commits of other hooks are not made.
        """
        self._must_mutate("take_step")
        chosen = self._batch(batch)
        groups = self._task.optimizer.param_groups
        self._profiler.passed("forward_backward", chosen)
        with (
            borrowed_gradients(self.model),
            borrowed_scaler(self._task),
            borrowed_learning_rates(groups, learning_rates),
            torch.enable_grad(),
        ):
            loss = forward_backward(self._task, chosen)
            steps_scheduler = self._steps_scheduler and learning_rates is None
            update(self._task, step_scheduler=steps_scheduler, skipped=is_skipped(self._task))
        return loss

    def get_shuffled_loader(self) -> Loader:
        """Return the training data in a fresh random order.

        The n-th loader of a call depends only on the hook's random stream: neither on what the hook drew before nor
        on what it restored.
        """
        self._shuffles += 1
        return self._task.loader.shuffled(derived_seed(self._state.streams.seed, *self._stream, self._shuffles))

    def apply_perturbation(self, direction: Vector, scale: float) -> None:
        """Add ``scale * direction`` to the parameters, in place."""
        self._must_mutate("apply_perturbation")
        check_vector(self.model, direction)
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            targets = local_shards([parameters[name] for name in direction])
            torch._foreach_add_(targets, local_shards(direction.values()), alpha=scale)

    def hessian_vector_product(
        self,
        vector: Vector,
        batch: Batch | None = None,
        *,
        loader: Loader | None = None,
        method: Method = "exact",
        epsilon: float = 1e-2,
    ) -> dict[str, Tensor]:
        """Return H v over all trainable parameters, H the Hessian of the mean loss at the present parameters.

        Args:
            vector: v; entries of parameters that are not trained are left out.
            batch: the batch of the loss (default: the current one).
            loader: take the mean loss over one epoch of this loader instead, batches weighted by their rows.
            method: ``"exact"`` (reverse over reverse, attention by its MATH kernel) or ``"finite_difference"``
                (central, see :func:`.central_difference`), which moves the parameters and so needs
                ``mutates``.
            epsilon: absolute step of ``finite_difference`` along v/‖v‖.
        """
        self._check_product(vector, method, epsilon)
        if loader is None:
            chosen = self._batch(batch)
            return self._probe.hessian_product(vector, lambda: [chosen], method, epsilon)
        if batch is not None:
            raise LoopscopeError("Pass a batch or a loader, not both: the loss is the mean over one of them.")
        epoch = self._state.loop.epoch
        return self._probe.hessian_product(vector, lambda: loader.batches(epoch), method, epsilon)

    def hessian_operator(
        self, batch: Batch | None = None, *, method: Method = "exact", epsilon: float = 1e-2
    ) -> Callable[[Vector], dict[str, Tensor]]:
        """Return v ↦ H v as :meth:`hessian_vector_product` on one batch, for several products at the same parameters.

        An exact operator keeps the graph of the gradient, with all activations, for as long as it lives: each product
        then costs one backward pass through it. The parameters must stay where they are, or autograd refuses.
        """
        self._check_product({}, method, epsilon)
        chosen = self._batch(batch)
        if method == "finite_difference":
            return partial(self.hessian_vector_product, batch=chosen, method=method, epsilon=epsilon)
        product = self._probe.hessian(chosen)

        def times(vector: Vector) -> dict[str, Tensor]:
            check_vector(self.model, vector)
            return product(vector)

        return times

    def scale_gradients(self, factor: float | Tensor | Mapping[str, float | Tensor]) -> None:
        """Keep: multiply every gradient by ``factor``, or those of the named parameters each by its own.

        Factors are numbers or zero-dimensional tensors, which the hook then leaves alone.
        """
        if isinstance(factor, Mapping):
            check_factors(self.model, factor)
            each = {name: self._lasting_factor(value) for name, value in factor.items()}
            change: Callable[[], None] = partial(scale_each, self.model, each)
        else:
            kept = self._lasting_factor(factor)
            change = lambda: scale(live_gradients(self._parameters), kept)
        self._commits.record(StatePart.GRADIENTS, "scale_gradients", change)

    def clamp_gradients(self, max_value: float) -> None:
        """Keep: bring every element of the gradients into [−max_value, max_value].

        The arithmetic is that of ``torch.nn.utils.clip_grad_value_``.
        """
        check_clamping(self._parameters, max_value)
        self._commits.record(StatePart.GRADIENTS, "clamp_gradients", partial(clamp, self._parameters, max_value))

    def clip_gradients(self, max_norm: float) -> Clipping:
        """Keep: scale the gradients so that their joint norm is at most ``max_norm``; returns norm and factor now.

        The arithmetic is that of ``torch.nn.utils.clip_grad_norm_``, but that float16 and bfloat16 are reduced in
        float32. After earlier commits of this call, norm and factor are measured again.
        """
        live = live_gradients(self._parameters)
        clipping = Clipping.of(live, max_norm)
        if self._mutates or self._commits.changes:
            change = partial(clip, self._parameters, max_norm)
        else:
            change = partial(scale, live, clipping.factor)
        self._commits.record(StatePart.GRADIENTS, "clip_gradients", change)
        return clipping

    def replace_gradients(self, values: Vector) -> None:
        """Keep: give the parameters named in ``values`` these gradients, tensors that the hook then leaves alone."""
        check_vector(self.model, values)
        kept = self._lasting(values)
        self._commits.record(StatePart.GRADIENTS, "replace_gradients", lambda: replace_gradients(self.model, kept))

    def add_to_gradients(self, values: Vector, factor: Tensor) -> None:
        """Keep: add ``factor`` (zero-dimensional) times ``values``, tensors that the hook then leaves alone."""
        check_vector(self.model, values)
        kept = self._lasting(values)
        lasting = factor.clone() if self._mutates else factor
        self._commits.record(StatePart.GRADIENTS, "add_to_gradients", partial(add_scaled, self.model, kept, lasting))

    def blend_parameters(self, target: Vector, weight: float) -> None:
        """Keep: θ ← (1 − weight)·θ + weight·target of the parameters in ``target``, then left alone by the hook."""
        check_vector(self.model, target)
        kept = self._lasting(target)
        self._commits.record(StatePart.PARAMETERS, "blend_parameters", lambda: blend(self.model, kept, weight))

    def thaw_parameters(self, names: Iterable[str]) -> None:
        """Keep: train the named parameters from now on."""
        self._commits.record(StatePart.PARAMETERS, "thaw_parameters", thawing(self.model, names))

    def reset_optimizer_state(self, names: Iterable[str]) -> None:
        """Keep: let the optimizer forget what it remembers of the named parameters."""
        change = forgetting(self.model, self._task.optimizer, names)
        self._commits.record(StatePart.OPTIMIZER, "reset_optimizer_state", change)

    def _check_product(self, vector: Vector, method: Method, epsilon: float) -> None:
        if method not in METHODS:
            raise unknown("method", method, METHODS)
        if not epsilon > 0:
            raise LoopscopeError(f"epsilon is {epsilon}; the step of a finite difference must be positive.")
        check_vector(self.model, vector)
        if method == "finite_difference":
            self._must_mutate("hessian_vector_product(method='finite_difference')")

    def _must_mutate(self, verb: str) -> None:
        if not self._mutates:
            raise ReadOnlyError(f"{verb} changes the training state, but the hook declares mutates = False.")

    def _checkpoint(self, token: int) -> Snapshot | LightSnapshot:
        if token not in self._checkpoints:
            raise LoopscopeError(f"There is no checkpoint {token}: tokens in use are {sorted(self._checkpoints)}.")
        return self._checkpoints[token]

    def _lasting(self, vector: Vector) -> Vector:
        """Copy a vector that the coming rollback might change."""
        return copied(vector) if self._mutates else vector

    def _lasting_factor(self, factor: float | Tensor) -> float | Tensor:
        return factor.clone() if self._mutates and isinstance(factor, Tensor) else factor

    def _batch(self, batch: Batch | None) -> Batch:
        if batch is not None:
            return batch
        if self._state.loop.batch is None:
            raise LoopscopeError("There is no current batch at this hook point; pass a batch.")
        return self._state.loop.batch

    def _train(self, loader: Loader, *, step: bool) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        steps = skips = 0
        named = list(self.model.named_parameters())
        for batch in loader.batches(self._state.loop.epoch):
            self._profiler.passed("forward_backward", batch)
            compute_gradients = forward_backward if step else measure_gradients
            compute_gradients(self._task, batch)
            skipped = step and is_skipped(self._task)
            if not skipped:
                live = {name: parameter.grad for name, parameter in named if parameter.grad is not None}
                total = accumulate(total, live)
            if step:
                update(self._task, step_scheduler=self._steps_scheduler, skipped=skipped)
            steps += not skipped
            skips += skipped
        if not steps:
            reason = "the gradients of all its batches left float16" if skips else "it has no batches"
            raise LoopscopeError(f"The loader has no epoch to run: {reason}.")
        with torch.no_grad():
            torch._foreach_div_(local_shards(total.values()), steps)
        return total
