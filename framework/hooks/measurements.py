"""Read-only measurements of the model context."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ..data import Batch, Loader, rows, with_copied_batches
from ..errors import LoopscopeError, unknown
from ..state import TrainingState, Vector, optimizers_of
from ..training import METHODS, LossProbe, Method, TrainingTask
from .commits import check_vector


class ReadOnlyError(LoopscopeError):
    """A hook with ``mutates = False`` called a method that changes the training state."""


class Measurements:
    """The model, its loss, gradients and curvature; base class of the rest of the model context."""

    _task: TrainingTask
    _state: TrainingState
    _probe: LossProbe
    _mutates: bool

    @property
    def model(self) -> nn.Module:
        """Trained model."""
        return self._task.model

    @property
    def device(self) -> torch.device:
        """Device of the model's first parameter."""
        return next(self._task.model.parameters()).device

    @property
    def loader(self) -> Loader:
        """Training data, in the run's order; its batches may be modified."""
        return with_copied_batches(self._task.loader)

    @property
    def optimizer_state(self) -> Mapping[str, Mapping[str, Any]]:
        """Live state tensors of the optimizer, and of optimizers that it wraps, by parameter name."""
        states = {key: value for optimizer in optimizers_of(self._state) for key, value in optimizer.state.items()}
        named = self.model.named_parameters()
        return {name: MappingProxyType(states[parameter]) for name, parameter in named if parameter in states}

    def rows(self, batch: Batch) -> int:
        """Return the number of rows in the batches of all data-parallel ranks together."""
        self._task.ranks.join()
        return self._task.ranks.rows(rows(batch))

    def compute_batch_loss(self, batch: Batch | None = None) -> Tensor:
        """Return the mean loss on one batch (default: the current one), at the current parameters."""
        return self._probe.loss(self._batch_or_current(batch))

    def compute_batch_gradients(self, batch: Batch | None = None) -> dict[str, Tensor]:
        """Return the gradient of the mean loss on one batch (default: the current one), at the current parameters."""
        return self._probe.gradient(self._batch_or_current(batch))

    def measure_rows(self, batch: Batch | None = None) -> tuple[Tensor, Tensor]:
        """Return the loss of every single row of a batch (default: the current one), and the norm of its gradient.

        Both are float64 of shape (rows,), at the current parameters and modes, computed with one pass per row. All rows
        use the same dropout mask. Batch normalisation uses its tracked statistics, as in eval mode, because a single
        row has no batch statistics. Other terms of the loss, such as a penalty, are part of every row's loss.

        Raises:
            LoopscopeError: several processes train together.
        """
        return self._probe.measure_rows(self._batch_or_current(batch))

    def compute_gradients(self) -> dict[str, Tensor]:
        """Return the gradient of the mean loss over the training set, batches weighted by their rows."""
        return self._probe.mean_gradient(self._task.loader.batches(self._state.loop.epoch))

    def hessian_vector_product(
        self,
        vector: Vector,
        batch: Batch | None = None,
        *,
        loader: Loader | None = None,
        method: Method = "exact",
        epsilon: float = 1e-2,
    ) -> dict[str, Tensor]:
        """Return H v over all trainable parameters; H is the Hessian of the mean loss at the current parameters.

        Args:
            vector: v; entries of frozen parameters are ignored.
            batch: the batch of the loss (default: the current one).
            loader: take the mean loss over one epoch of this loader instead, batches weighted by their rows.
            method: ``"exact"`` (reverse over reverse, attention with the MATH kernel) or ``"finite_difference"``
                (central, see :func:`.central_difference`), which moves the parameters and so requires ``mutates``.
            epsilon: absolute step of ``finite_difference`` along v/‖v‖.
        """
        self._check_product(vector, method, epsilon)
        if loader is None:
            product_batch = self._batch_or_current(batch)
            return self._probe.hessian_product(vector, lambda: [product_batch], method, epsilon)
        if batch is not None:
            raise LoopscopeError("Pass a batch or a loader, not both: the loss is the mean over one of them.")
        epoch = self._state.loop.epoch
        return self._probe.hessian_product(vector, lambda: loader.batches(epoch), method, epsilon)

    def hessian_operator(
        self, batch: Batch | None = None, *, method: Method = "exact", epsilon: float = 1e-2
    ) -> Callable[[Vector], dict[str, Tensor]]:
        """Return the function v ↦ H v on one batch, for several products at the same parameters.

        An exact operator keeps the gradient's graph, with all activations, as long as it exists: each product then
        costs one backward pass. If the parameters change, autograd raises an error.
        """
        self._check_product({}, method, epsilon)
        product_batch = self._batch_or_current(batch)
        if method == "finite_difference":
            return partial(self.hessian_vector_product, batch=product_batch, method=method, epsilon=epsilon)
        # One graph serves all products; finite differences move the parameters, so they need a new graph each time.
        product = self._probe.hessian(product_batch)

        def times(vector: Vector) -> dict[str, Tensor]:
            check_vector(self.model, vector)
            return product(vector)

        return times

    def _check_product(self, vector: Vector, method: Method, epsilon: float) -> None:
        if method not in METHODS:
            raise unknown("method", method, METHODS)
        if not epsilon > 0:
            raise LoopscopeError(f"epsilon is {epsilon}; it must be positive.")
        check_vector(self.model, vector)
        if method == "finite_difference":
            self._must_mutate("hessian_vector_product(method='finite_difference')")

    def _must_mutate(self, verb: str) -> None:
        if not self._mutates:
            raise ReadOnlyError(
                f"{verb} changes the training state, but the hook declares mutates = False; remove that declaration."
            )

    def _batch_or_current(self, batch: Batch | None) -> Batch:
        if batch is not None:
            return batch
        if self._state.loop.batch is None:
            raise LoopscopeError("No batch is current at this hook point; pass a batch.")
        return self._state.loop.batch
