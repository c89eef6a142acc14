"""Reversible changes of the training state, for interventions."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from ..data import Batch, Loader, derived_seed, with_copied_batches
from ..errors import LoopscopeError
from ..isolation import (
    LightStateCopy,
    StateCopy,
    borrowed_buffers,
    borrowed_extras,
    borrowed_gradients,
    borrowed_learning_rates,
)
from ..state import Vector, accumulate, local_shards
from ..training import Profiler, borrowed_scaler, forward_backward, is_skipped, make_closure, measure_gradients, update
from .commits import check_vector, clip
from .measurements import Measurements


class Interventions(Measurements):
    """Checkpoints in memory, and the methods of the model context whose changes are rolled back."""

    _profiler: Profiler
    _state_copy_device: torch.device | None
    _stream: tuple[str, str, int]
    _steps_scheduler: bool
    _checkpoints: dict[int, StateCopy | LightStateCopy]
    _next_token = 0
    _shuffles = 0

    def save_checkpoint(self, *, full: bool = True) -> int:
        """Save the training state and return a token for it.

        ``full=False`` saves only parameters, buffers and random streams, on their device: enough for code that only
        runs forward and backward passes.
        """
        self._next_token += 1
        self._checkpoints[self._next_token] = (
            StateCopy(self._state_copy_device, streams=True).save(self._state) if full else LightStateCopy(self._state)
        )
        return self._next_token

    def restore_checkpoint(self, token: int) -> None:
        """Restore the state that :meth:`save_checkpoint` saved under ``token``, including random streams."""
        self._must_mutate("restore_checkpoint")
        self._checkpoint(token).restore(self._state)

    def discard_checkpoint(self, token: int) -> None:
        """Free the memory of a checkpoint."""
        self._checkpoint(token)
        del self._checkpoints[token]

    @contextmanager
    def branch(self, *, full: bool = True) -> Iterator[None]:
        """Run the body, and restore the training state afterwards, also after an exception."""
        self._must_mutate("branch")
        token = self.save_checkpoint(full=full)
        try:
            yield
        finally:
            self.restore_checkpoint(token)
            self.discard_checkpoint(token)

    def restore_pre_epoch(self) -> None:
        """Restore the state before the current epoch; the hook's class must set ``needs_pre_epoch_state``.

        The hook's random streams continue, so it draws new numbers after each call.
        """
        self._must_mutate("restore_pre_epoch")
        if self._state.loop.pre_epoch is None:
            raise LoopscopeError(
                "No pre-epoch state is saved here; it exists at POST_EPOCH and SNAPSHOT of the epoch loop, for a hook "
                "whose class sets needs_pre_epoch_state = True."
            )
        with self._state.streams.preserved():
            self._state.loop.pre_epoch.restore(self._state)

    def run_training_epoch(self, loader: Loader, *, step: bool = True) -> dict[str, Tensor]:
        """Train one epoch and return the mean gradient of its steps, computed like ``accumulated_grads`` of the run.

        With ``step=False`` parameters, optimizer and scheduler do not change. Dropout masks come from the current
        random streams. A per-epoch scheduler is not stepped, and commits of other hooks are not applied.
        """
        if step:
            self._must_mutate("run_training_epoch(step=True)")
        # A forward pass in train mode updates batch-norm statistics; without steps, these updates are undone.
        buffers, extras = (
            (nullcontext(), nullcontext()) if step else (borrowed_buffers(self.model), borrowed_extras(self._state))
        )
        with borrowed_gradients(self.model), borrowed_scaler(self._task), extras, buffers, torch.enable_grad():
            return self._train(loader, step=step)

    def take_step(
        self,
        batch: Batch | None = None,
        *,
        learning_rates: Sequence[float] | None = None,
        max_norm: float | None = None,
        passes: AbstractContextManager[object] = nullcontext(),  # noqa: B008 - it has no state
    ) -> Tensor:
        """Train one step on a batch (default: the current one) like the loop, and return the loss before the step.

        ``learning_rates`` has a value for each parameter group of the optimizer, for this step only; the scheduler is
        then not stepped. ``max_norm`` clips the gradients like ``clip_gradients``. The forward and backward passes run
        in the context manager ``passes``. Dropout masks come from the current random streams. A per-epoch scheduler is
        not stepped, and commits of other hooks are not applied.
        """
        self._must_mutate("take_step")
        step_batch = self._batch_or_current(batch)
        groups = self._task.optimizer.param_groups
        self._profiler.count_samples("forward_backward", step_batch)
        rates = borrowed_learning_rates(groups, learning_rates)
        with borrowed_gradients(self.model), borrowed_scaler(self._task), rates, torch.enable_grad():
            with passes:
                loss = forward_backward(self._task, step_batch)
            steps_scheduler = self._steps_scheduler and learning_rates is None
            skipped, closure = is_skipped(self._task), make_closure(self._task, step_batch, loss)
            if max_norm is not None:
                clip(self.model.parameters(), max_norm)
            count = self._state.loop.step
            update(self._task, step_scheduler=steps_scheduler, skipped=skipped, closure=closure, count=count)
        return loss

    def get_shuffled_loader(self) -> Loader:
        """Return the training data in a fresh random order.

        The n-th loader of a call depends only on the hook's random stream, not on earlier draws or restored states.
        """
        self._shuffles += 1
        return with_copied_batches(self._task.loader).shuffled(
            derived_seed(self._state.streams.seed, *self._stream, self._shuffles)
        )

    def apply_perturbation(self, direction: Vector, scale: float) -> None:
        """Add ``scale * direction`` to the parameters, in place."""
        self._must_mutate("apply_perturbation")
        check_vector(self.model, direction)
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            # θ ← θ + scale·d with one foreach kernel for all tensors; foreach supports local shards, but no DTensors.
            targets = local_shards([parameters[name] for name in direction])
            torch._foreach_add_(targets, local_shards(direction.values()), alpha=scale)

    def _checkpoint(self, token: int) -> StateCopy | LightStateCopy:
        if token not in self._checkpoints:
            raise LoopscopeError(f"Checkpoint {token} does not exist; existing tokens: {sorted(self._checkpoints)}.")
        return self._checkpoints[token]

    def _train(self, loader: Loader, *, step: bool) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        steps = skips = 0
        named = list(self.model.named_parameters())
        for batch in loader.batches(self._state.loop.epoch):
            self._profiler.count_samples("forward_backward", batch)
            compute_gradients = forward_backward if step else measure_gradients
            loss = compute_gradients(self._task, batch)
            skipped = step and is_skipped(self._task)
            if not skipped:
                live = {name: parameter.grad for name, parameter in named if parameter.grad is not None}
                total = accumulate(total, live)
            if step:
                count, closure = self._state.loop.step + steps, make_closure(self._task, batch, loss)
                update(self._task, step_scheduler=self._steps_scheduler, skipped=skipped, closure=closure, count=count)
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
