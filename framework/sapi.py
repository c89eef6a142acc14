"""The SAPI: the only door through which an intervention reaches the mutable training state."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from framework.borrowing import lent_buffers, lent_gradients, lent_modes
from framework.commits import CommitRecord, StatePart
from framework.data import Batch, Loader, rows
from framework.errors import LoopscopeError
from framework.guardian import Snapshot
from framework.param_vectors import Vector, axpy, copied, gradients, local_shards, norm, scaled, trainable
from framework.train_step import TrainingTask, forward_backward, update
from framework.training_state import TrainingState


class ReadOnlyError(LoopscopeError):
    """A hook with ``mutates = False`` called a verb that changes the training state."""


class ModelDataContext:
    """What an intervention may do, in one call; everything it did is rolled back when the call ends.

    Vectors are dicts from parameter names to tensors of the parameters' shapes (plain tensors or DTensors).
    """

    def __init__(
        self,
        task: TrainingTask,
        state: TrainingState,
        commits: CommitRecord,
        *,
        mutates: bool,
        device: torch.device | None,
    ) -> None:
        self._task = task
        self._state = state
        self._commits = commits
        self._mutates = mutates
        self._snapshot_device = device
        self._checkpoints: dict[int, Snapshot | LightSnapshot] = {}
        self._next_token = 0

    # Reading

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
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return {names[parameter]: dict(state) for parameter, state in self._task.optimizer.state.items()}

    # Checkpoints

    def save_checkpoint(self, *, full: bool = True) -> int:
        """Save the training state and return a token for it.

        ``full=False`` saves parameters, buffers and random streams only, on their device: enough for work that
        only runs forward and backward.
        """
        snapshot = Snapshot(self._snapshot_device) if full else LightSnapshot()
        self._next_token += 1
        self._checkpoints[self._next_token] = snapshot.save(self._state)
        return self._next_token

    def restore_checkpoint(self, token: int) -> None:
        """Put back what :meth:`save_checkpoint` saved under ``token``."""
        self._must_mutate("restore_checkpoint")
        self._checkpoint(token).restore(self._state)

    def discard_checkpoint(self, token: int) -> None:
        """Free the memory of a checkpoint."""
        self._checkpoint(token)
        del self._checkpoints[token]

    @contextmanager
    def branch(self, *, full: bool = True) -> Iterator[None]:
        """Run the body and put the training state back afterwards, whatever happened."""
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
                "There is no pre-epoch state here: set needs_pre_epoch_state = True on the hook's class."
            )
        with self._state.streams.isolated():
            self._state.loop.pre_epoch.restore(self._state)

    def _checkpoint(self, token: int) -> "Snapshot | LightSnapshot":
        if token not in self._checkpoints:
            raise LoopscopeError(f"There is no checkpoint {token}: tokens in use are {sorted(self._checkpoints)}.")
        return self._checkpoints[token]

    # Gradients and training

    @contextmanager
    def _borrowed(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self._state.streams.isolated())
            stack.enter_context(lent_buffers(self.model))
            stack.enter_context(lent_modes(self.model, train=None))
            stack.enter_context(lent_gradients(self.model))
            stack.enter_context(torch.enable_grad())
            yield

    def _batch(self, batch: Batch | None) -> Batch:
        if batch is not None:
            return batch
        if self._state.loop.batch is None:
            raise LoopscopeError("There is no current batch at this hook point; pass a batch.")
        return self._state.loop.batch

    def compute_batch_gradients(self, batch: Batch | None = None) -> dict[str, Tensor]:
        """Return the gradient of the mean loss on one batch (default: the current one), at the present parameters.

        Buffers, modes, gradients and streams are lent and put back: two calls see the same dropout mask.
        """
        chosen = self._batch(batch)
        with self._borrowed():
            forward_backward(self._task, chosen)
            return gradients(self.model)

    def compute_gradients(self) -> dict[str, Tensor]:
        """Return the gradient of the mean loss over the training set, batches weighted by their rows."""
        with self._borrowed():
            return self._mean_gradients(self._task.loader, step=False)

    def run_training_epoch(self, loader: Loader, *, step: bool = True) -> dict[str, Tensor]:
        """Train one epoch and return the mean of its gradients, batches weighted by their rows.

        With ``step=False`` the parameters stay as they are. Draws dropout masks from the hook's own stream.
        """
        if step:
            self._must_mutate("run_training_epoch(step=True)")
        with lent_gradients(self.model), torch.enable_grad():
            if step:
                return self._mean_gradients(loader, step=True)
            with lent_buffers(self.model):
                return self._mean_gradients(loader, step=False)

    def _mean_gradients(self, loader: Loader, *, step: bool) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        count = 0
        for batch in loader.batches(self._state.loop.epoch):
            forward_backward(self._task, batch)
            size = rows(batch)
            count += size
            with torch.no_grad():
                for name, gradient in gradients(self.model).items():
                    total[name] = total[name].add_(gradient, alpha=size) if name in total else gradient * size
            if step:
                update(self._task, step_scheduler=self._task.scheduler_interval == "step")
        with torch.no_grad():
            return scaled(1 / count, total)

    def get_shuffled_loader(self) -> Loader:
        """Return the training data in an order drawn from the hook's random stream."""
        return self._task.loader.shuffled(int(torch.randint(2**62, ())))

    # Curvature

    def apply_perturbation(self, direction: Vector, scale: float) -> None:
        """Add ``scale * direction`` to the parameters, in place."""
        self._must_mutate("apply_perturbation")
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            targets = local_shards([parameters[name] for name in direction])
            torch._foreach_add_(targets, local_shards(direction.values()), alpha=scale)

    def hessian_vector_product(
        self,
        vector: Vector,
        batch: Batch | None = None,
        *,
        method: Literal["exact", "finite_difference"] = "exact",
        epsilon: float = 1e-2,
    ) -> dict[str, Tensor]:
        """Return H v for the Hessian of the mean loss on one batch at the present parameters.

        ``exact`` differentiates the gradient (reverse over reverse, attention by its MATH kernel);
        ``finite_difference`` is (g(θ + hu) − g(θ − hu))·‖v‖/2h with u = v/‖v‖ and h = ``epsilon``. Both see one
        dropout mask; buffers, modes, gradients and streams are put back.
        """
        chosen = self._batch(batch)
        if method == "exact":
            with self._borrowed(), sdpa_kernel(SDPBackend.MATH):
                return self._exact_product(vector, chosen)
        if method != "finite_difference":
            raise LoopscopeError(f"Unknown method {method!r}. Known: exact, finite_difference.")
        self._must_mutate("hessian_vector_product(method='finite_difference')")
        return self._finite_difference(vector, chosen, epsilon)

    def _exact_product(self, vector: Vector, batch: Batch) -> dict[str, Tensor]:
        parameters = {name: value for name, value in trainable(self.model).items() if name in vector}
        loss = self._task.compute_loss(self.model, batch)
        found = torch.autograd.grad(loss, list(parameters.values()), create_graph=True, allow_unused=True)
        used = [
            (grad, vector[name])
            for name, grad in zip(parameters, found, strict=True)
            if grad is not None and grad.requires_grad
        ]
        products = torch.autograd.grad(
            [grad for grad, _ in used],
            list(parameters.values()),
            grad_outputs=[direction for _, direction in used],
            allow_unused=True,
            materialize_grads=True,
        )
        return dict(zip(parameters, products, strict=True))

    def _finite_difference(self, vector: Vector, batch: Batch, epsilon: float) -> dict[str, Tensor]:
        length = norm(vector)
        unit = scaled(1 / length, vector)
        before = copied({name: value for name, value in self.model.named_parameters() if name in vector})
        ends = []
        try:
            for side in (epsilon, -epsilon):
                self.apply_perturbation(unit, side)
                ends.append(self.compute_batch_gradients(batch))
                self._write_parameters(before)
        finally:
            self._write_parameters(before)
        return scaled(length / (2 * epsilon), axpy(-1.0, ends[1], ends[0]))

    def _write_parameters(self, values: Vector) -> None:
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            torch._foreach_copy_(local_shards([parameters[name] for name in values]), local_shards(values.values()))

    # Commits: recorded now, applied after the rollback

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Keep: multiply every gradient by ``factor``."""
        self._commits.record(StatePart.GRADIENTS, "scale_gradients", lambda: self._scale(factor))

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Keep: scale the gradients so that their joint norm is at most ``max_norm``; returns the norm before.

        The arithmetic is that of ``torch.nn.utils.clip_grad_norm_`` (factor max_norm / (norm + 1e-6), at most 1).
        """
        before = norm(gradients(self.model))
        self.scale_gradients(torch.clamp(max_norm / (before + 1e-6), max=1.0))
        return before

    def replace_gradients(self, values: Vector) -> None:
        """Keep: overwrite the gradients of the parameters named in ``values``; read when applied."""
        self._commits.record(StatePart.GRADIENTS, "replace_gradients", lambda: self._replace(values))

    def blend_parameters(self, target: Vector, weight: float) -> None:
        """Keep: θ ← (1 − weight)·θ + weight·target, for the parameters named in ``target``; read when applied."""
        self._commits.record(StatePart.PARAMETERS, "blend_parameters", lambda: self._blend(target, weight))

    @torch.no_grad()
    def _scale(self, factor: float | Tensor) -> None:
        shards = local_shards(gradients(self.model).values())
        if shards:
            torch._foreach_mul_(shards, factor)

    @torch.no_grad()
    def _replace(self, values: Vector) -> None:
        live = gradients(self.model)
        torch._foreach_copy_(local_shards([live[name] for name in values]), local_shards(values.values()))

    @torch.no_grad()
    def _blend(self, target: Vector, weight: float) -> None:
        parameters = dict(self.model.named_parameters())
        shards = local_shards([parameters[name] for name in target])
        torch._foreach_lerp_(shards, local_shards(target.values()), weight)

    def _must_mutate(self, verb: str) -> None:
        if not self._mutates:
            raise ReadOnlyError(f"{verb} changes the training state, but the hook declares mutates = False.")


class LightSnapshot:
    """Parameters, buffers and random streams, kept where they are."""

    def save(self, state: TrainingState) -> "LightSnapshot":
        """Copy them."""
        self._tensors = [*state.model.parameters(), *state.model.buffers()]
        self._copies = [tensor.detach().clone() for tensor in local_shards(self._tensors)]
        self._streams = state.streams.save()
        return self

    def restore(self, state: TrainingState) -> None:
        """Put them back."""
        with torch.no_grad():
            torch._foreach_copy_(local_shards(self._tensors), self._copies)
        self._streams.restore()
