"""The second door of the model context: what an intervention may change, since it is rolled back."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from ..data import Batch, Loader, derived_seed, with_copied_batches
from ..errors import LoopscopeError
from ..isolation import (
    LightSnapshot,
    Snapshot,
    borrowed_buffers,
    borrowed_extras,
    borrowed_gradients,
    borrowed_learning_rates,
)
from ..state import Vector, accumulate, local_shards
from ..training import Profiler, borrowed_scaler, evaluations, forward_backward, is_skipped, measure_gradients, update
from .commits import check_vector, clip
from .measuring import Measuring


class Experimenting(Measuring):
    """Checkpoints to go back to, and everything that moves the training state in between."""

    _profiler: Profiler
    _snapshot_device: torch.device | None
    _stream: tuple[str, str, int]
    _steps_scheduler: bool
    _checkpoints: dict[int, Snapshot | LightSnapshot]
    _next_token = 0
    _shuffles = 0

    def save_checkpoint(self, *, full: bool = True) -> int:
        """Save the training state and return a token for it.

        ``full=False`` saves parameters, buffers and random streams only, on their device: enough for work that
        only runs forward and backward.
        """
        self._next_token += 1
        self._checkpoints[self._next_token] = (
            Snapshot(self._snapshot_device, streams=True).save(self._state) if full else LightSnapshot(self._state)
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

    def run_training_epoch(self, loader: Loader, *, step: bool = True) -> dict[str, Tensor]:
        """Train one epoch and return the mean of its steps' gradients, as ``accumulated_grads`` holds the run's.

        With ``step=False`` parameters, optimizer and scheduler stay as they are. Dropout masks come from the present
        random streams. A per-epoch scheduler is not stepped, commits of other hooks are not made.
        """
        if step:
            self._must_mutate("run_training_epoch(step=True)")
        # A forward pass in train mode moves the statistics of batch norms, which only a step may keep.
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
        """Train one step on a batch (default: the current one), as the loop does, and return its loss before the step.

        ``learning_rates`` has one for each of the optimizer's parameter groups; they hold for this step only, and the
        scheduler then stays where it is. ``max_norm`` clips the gradients as ``clip_gradients`` does; ``passes`` is
        what the forward and backward passes run in. Dropout masks come from the present random streams. A per-epoch
        scheduler is not stepped, commits of other hooks are not made.
        """
        self._must_mutate("take_step")
        chosen = self._batch(batch)
        groups = self._task.optimizer.param_groups
        self._profiler.passed("forward_backward", chosen)
        rates = borrowed_learning_rates(groups, learning_rates)
        with borrowed_gradients(self.model), borrowed_scaler(self._task), rates, torch.enable_grad():
            with passes:
                loss = forward_backward(self._task, chosen)
            steps_scheduler = self._steps_scheduler and learning_rates is None
            skipped, closure = is_skipped(self._task), evaluations(self._task, chosen, loss)
            if max_norm is not None:
                clip(self.model.parameters(), max_norm)
            count = self._state.loop.step
            update(self._task, step_scheduler=steps_scheduler, skipped=skipped, closure=closure, count=count)
        return loss

    def get_shuffled_loader(self) -> Loader:
        """Return the training data in a fresh random order.

        The n-th loader of a call depends only on the hook's random stream: neither on what the hook drew before nor
        on what it restored.
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
            # One kernel for many tensors; of DTensors on their plain local shards, for which foreach has kernels.
            targets = local_shards([parameters[name] for name in direction])
            torch._foreach_add_(targets, local_shards(direction.values()), alpha=scale)

    def _checkpoint(self, token: int) -> Snapshot | LightSnapshot:
        if token not in self._checkpoints:
            raise LoopscopeError(f"There is no checkpoint {token}: tokens in use are {sorted(self._checkpoints)}.")
        return self._checkpoints[token]

    def _train(self, loader: Loader, *, step: bool) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        steps = skips = 0
        named = list(self.model.named_parameters())
        for batch in loader.batches(self._state.loop.epoch):
            self._profiler.passed("forward_backward", batch)
            compute_gradients = forward_backward if step else measure_gradients
            loss = compute_gradients(self._task, batch)
            skipped = step and is_skipped(self._task)
            if not skipped:
                live = {name: parameter.grad for name, parameter in named if parameter.grad is not None}
                total = accumulate(total, live)
            if step:
                count, closure = self._state.loop.step + steps, evaluations(self._task, batch, loss)
                update(self._task, step_scheduler=self._steps_scheduler, skipped=skipped, closure=closure, count=count)
            steps += not skipped
            skips += skipped
        if not steps:
            reason = "the gradients of all its batches left float16" if skips else "it has no batches"
            raise LoopscopeError(f"The loader has no epoch to run: {reason}.")
        with torch.no_grad():
            if not total:  # foreach refuses an empty list
                return {}
            # Divided once at the end, as the loop does it, so that the bits are those of accumulated_grads.
            torch._foreach_div_(local_shards(total.values()), steps)
        return total
