"""The first door of the model context: what an intervention may look at and measure, without changing it."""

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
    """A hook with ``mutates = False`` called a verb that changes the training state."""


class Measuring:
    """What is trained, and its loss, gradients and curvature; the other two doors stand on this one."""

    _task: TrainingTask
    _state: TrainingState
    _probe: LossProbe
    _mutates: bool

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
        """The training data, in the run's order; batches that may be written to."""
        return with_copied_batches(self._task.loader)

    @property
    def optimizer_state(self) -> Mapping[str, Mapping[str, Any]]:
        """The state of the optimizer, and of those that it stands before, by parameter name: the live tensors."""
        held = {key: value for each in optimizers_of(self._state) for key, value in each.state.items()}
        named = self.model.named_parameters()
        return {name: MappingProxyType(held[parameter]) for name, parameter in named if parameter in held}

    def rows(self, batch: Batch) -> int:
        """Return how many rows the ranks have in their batches together."""
        self._task.ranks.join()
        return self._task.ranks.rows(rows(batch))

    def compute_batch_loss(self, batch: Batch | None = None) -> Tensor:
        """Return the mean loss on one batch (default: the current one), at the present parameters."""
        return self._probe.loss(self._batch(batch))

    def compute_batch_gradients(self, batch: Batch | None = None) -> dict[str, Tensor]:
        """Return the gradient of the mean loss on one batch (default: the current one), at the present parameters."""
        return self._probe.gradient(self._batch(batch))

    def measure_rows(self, batch: Batch | None = None) -> tuple[Tensor, Tensor]:
        """Return the loss, and the Euclidean norm of its gradient, of every row of a batch alone, by a pass for each.

        At the present parameters and modes, on the current batch by default; float64 of shape (rows,). All rows see one
        dropout mask. Batch normalisation that tracks statistics uses these, as in eval mode: one row has none. What a
        loss holds beside that of the data, a penalty say, is part of each row's. Raises :class:`LoopscopeError` in
        several processes.
        """
        return self._probe.of_rows(self._batch(batch))

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
        # One graph for all products; differences need the parameters to move, so they make a new one each time.
        product = self._probe.hessian(chosen)

        def times(vector: Vector) -> dict[str, Tensor]:
            check_vector(self.model, vector)
            return product(vector)

        return times

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

    def _batch(self, batch: Batch | None) -> Batch:
        if batch is not None:
            return batch
        if self._state.loop.batch is None:
            raise LoopscopeError("There is no current batch at this hook point; pass a batch.")
        return self._state.loop.batch
