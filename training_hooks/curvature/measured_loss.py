"""The training loss on a few of the run's batches, and its derivatives: what curvature is measured of."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import islice

from loopscope.data import Batch, Loader, rows
from loopscope.errors import UnsuitableError
from loopscope.hooks import ModelDataContext
from loopscope.state import Vector, axpy, copied, fully_sharded_modules, overwrite, trainable
from loopscope.training import Method
from torch import Tensor, nn

from ..measures import FlatSpace
from .lanczos import Product
from .stability import Rise


def spread_batches(loader: Loader, count: int) -> list[Batch]:
    """Return ``count`` batches, all if there are fewer, spread evenly over the order of epoch 0, the first included."""
    total = len(loader)
    chosen = [index * total // count for index in range(count)] if count < total else list(range(total))
    batches = islice(loader.batches(0), chosen[-1] + 1)
    return [batch for index, batch in enumerate(batches) if index in chosen]


def refuse_exact_under_fsdp(hook: str, model: nn.Module) -> None:
    """Raise :class:`UnsuitableError` if the model has modules under FSDP2, which cannot be differentiated twice."""
    if fully_sharded_modules(model):
        raise UnsuitableError(
            f"Hook {hook!r} needs exact Hessian-vector products, which FSDP2 does not support, and the model has "
            f"modules under fully_shard; set {hook}.method=finite_difference."
        )


@dataclass(frozen=True)
class MeasuredLoss:
    """The mean training loss over the rows of ``batches``, in the model's present modes.

    Each batch is passed through the model by itself, with its own BatchNorm statistics, and each from the present state
    of the random streams: as long as nothing is drawn from torch's, a batch has one dropout mask for all that is
    measured.
    """

    model_ctx: ModelDataContext
    batches: list[Batch]

    @cached_property
    def space(self) -> FlatSpace:
        """The space of flat vectors over the trained parameters."""
        return FlatSpace(trainable(self.model_ctx.model))

    def value(self) -> Tensor:
        """Return the loss, zero-dimensional."""
        return self._mean(self.model_ctx.compute_batch_loss)

    def gradient(self) -> Tensor:
        """Return the gradient, flat."""
        return self._mean(lambda batch: self.space.flat(self.model_ctx.compute_batch_gradients(batch)))

    def hessian(self, method: Method = "exact", epsilon: float = 1e-2) -> Product:
        """Return the product of the Hessian with flat vectors; an exact one keeps the graphs of all batches."""
        operators = [
            (rows(batch), self.model_ctx.hessian_operator(batch, method=method, epsilon=epsilon))
            for batch in self.batches
        ]
        everything = sum(count for count, _ in operators)

        def product(flat: Tensor) -> Tensor:
            vector = self.space.vector(flat)
            parts = (self.space.flat(times(vector)).mul_(count / everything) for count, times in operators)
            return reduce(Tensor.add_, parts)

        return product

    @contextmanager
    def along(self, direction: Vector) -> Iterator[Rise]:
        """Give the body c ↦ L(θ + c·direction) − L(θ), which moves the parameters; they are put back in the end."""
        live = trainable(self.model_ctx.model)
        start = copied(live)
        before = self.value()

        def rise(step: Tensor) -> Tensor:
            overwrite(live, axpy(step, direction, start))
            return self.value() - before

        try:
            yield rise
        finally:
            overwrite(live, start)

    def _mean(self, measure: Callable[[Batch], Tensor]) -> Tensor:
        weights = [rows(batch) / sum(map(rows, self.batches)) for batch in self.batches]
        parts = (measure(batch).mul_(weight) for batch, weight in zip(self.batches, weights, strict=True))
        return reduce(Tensor.add_, parts)
