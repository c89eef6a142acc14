"""Loss, gradient and curvature of a task at its present parameters; what a measurement borrows is put back.

Hessian-vector products are exact by reverse over reverse, or central differences of the gradient.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, islice
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _NormBase

from ..data import Batch, MicroBatches, micro_batches, rows
from ..errors import LoopscopeError
from ..isolation import borrowed_buffers, borrowed_extras, borrowed_gradients, borrowed_modes
from ..state import (
    TrainingState,
    Vector,
    accumulate,
    axpy,
    copied,
    gradients,
    minus,
    norm,
    overwrite,
    resharded_afterwards,
    scaled,
    trainable,
    widened,
)
from .profiler import Profiler
from .train_step import TrainingTask, borrowed_scaler, forward_backward, measure_gradients

Method = Literal["exact", "finite_difference"]
METHODS: tuple[str, ...] = get_args(Method)


class ExactHessian:
    """The Hessian of a loss at the present parameters: reverse over reverse through the kept graph of the gradient.

    Attention runs by its MATH kernel, the only one with a second derivative.

    Args:
        compute_loss: returns the loss, zero-dimensional.
        parameters: what to differentiate for.
    """

    def __init__(self, compute_loss: Callable[[], Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        with sdpa_kernel(SDPBackend.MATH):
            self._gradients = torch.autograd.grad(
                compute_loss(), list(parameters.values()), create_graph=True, allow_unused=True
            )

    def times(self, vector: Vector, *, keep: bool = True) -> dict[str, Tensor]:
        """Return H v by differentiating ⟨∇L, v⟩; names that ``vector`` lacks are zeros.

        Parameters on which the loss does not depend, or only linearly, have zeros. Without ``keep`` the graph is
        freed, and this was the last product.
        """
        pairs = [
            (gradient, vector[name].to(gradient.dtype))
            for name, gradient in zip(self._parameters, self._gradients, strict=True)
            if gradient is not None and gradient.requires_grad and name in vector
        ]
        if not pairs:
            return {name: torch.zeros_like(leaf) for name, leaf in self._parameters.items()}
        second = torch.autograd.grad(
            [gradient for gradient, _ in pairs],
            list(self._parameters.values()),
            grad_outputs=[direction for _, direction in pairs],
            retain_graph=keep,
            allow_unused=True,
            materialize_grads=True,
        )
        return dict(zip(self._parameters, second, strict=True))


def central_difference(
    gradient: Callable[[], Vector], parameters: Mapping[str, nn.Parameter], vector: Vector, epsilon: float
) -> dict[str, Tensor]:
    """Return (g(θ + hu) − g(θ − hu))·‖v‖/2h with u = v/‖v‖ and h = ``epsilon``: H v up to O(h²), zeros for v = 0.

    The parameters are moved in place and put back by copying, so they end with the bytes they began with.
    """
    length = norm(vector)
    before = copied({name: parameters[name] for name in vector})
    sides = []
    try:
        for side in (epsilon, -epsilon):
            step = torch.where(length > 0, side / length, 0.0)
            overwrite(parameters, axpy(step, vector, before))
            sides.append(gradient())
    finally:
        overwrite(parameters, before)
    found = scaled(length / (2 * epsilon), minus(sides[0], sides[1]))
    return {name: found.get(name, torch.zeros_like(leaf)) for name, leaf in parameters.items()}


class LossProbe:
    """Measures the mean loss of batches in the model's present modes.

    Buffers, modes, gradients, random streams and what modules, hooks on them and the experiment keep beside are
    borrowed, so that two measurements see one dropout mask and leave nothing behind. A batch is split into the task's
    micro-batches, as in training.
    """

    def __init__(self, task: TrainingTask, state: TrainingState, profiler: Profiler) -> None:
        self._task = task
        self._model = task.model
        self._state = state
        self._profiler = profiler

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean loss, zero-dimensional."""
        self._profiler.count_samples("forward", batch)
        self._task.ranks.join()
        with self._borrowed(), torch.no_grad():
            parts = self._task.micro_batches(batch)
            losses = [self._task.compute_loss(self._model, part) * weight for part, weight in parts]
            return self._task.ranks.mean(torch.stack(losses).sum())

    def gradient(self, batch: Batch) -> dict[str, Tensor]:
        """Return the gradient of the mean loss, without the parameters that have none."""
        with self._borrowed():
            return self._gradient(batch)

    def of_rows(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss of every row alone, and the norm of its gradient; float64, shape (rows,) each.

        All rows see one dropout mask. Batch normalisation with tracked statistics uses these, as in eval mode, since
        one row has none of its own. Raises :class:`LoopscopeError` in several processes.
        """
        if self._task.ranks.are_many:
            raise LoopscopeError(
                f"{self._task.ranks.place[1]} processes train together, and rows are measured by one process alone; "
                "train again in one, or look at whole batches."
            )
        losses: list[Tensor] = []
        norms: list[Tensor] = []
        wholes = batch if isinstance(batch, MicroBatches) else [batch]
        for row in chain.from_iterable(micro_batches(whole, rows(whole)) for whole in wholes):
            with self._borrowed():
                for module in self._model.modules():
                    if isinstance(module, _NormBase) and module.running_mean is not None:
                        module.training = False
                gradient = self._gradient(row, lambda task, part: losses.append(measure_gradients(task, part)))
                norms.append(norm(gradient) if gradient else losses[-1].new_zeros(()))
        return torch.stack(losses).double(), torch.stack(norms).double()

    def run_once(self, batch: Batch) -> None:
        """Run forward and backward for taps to listen; the loss has the run's scale, the gradients may be infinite."""
        with self._borrowed():
            self._gradient(batch, forward_backward)

    def loss_with_graph(self, batch: Batch) -> Tensor:
        """Return the loss of the first micro-batch, whose graph shows what it is made of."""
        self._profiler.count_samples("forward", batch)
        with self._borrowed():
            return self._task.compute_loss(self._model, self._task.micro_batches(batch)[0][0])

    def mean_gradient(self, batches: Iterable[Batch]) -> dict[str, Tensor]:
        """Return the gradient of the mean loss over all rows of the batches."""
        with self._borrowed():
            return self._mean_over_rows(self._gradient, batches)

    def hessian_product(
        self, vector: Vector, batches: Callable[[], Iterable[Batch]], method: Method, epsilon: float
    ) -> dict[str, Tensor]:
        """Return H v for the mean loss over all rows of the batches; ``batches`` starts on them anew.

        Finite differences move the parameters and put them back.
        """
        parameters = trainable(self._model)
        direction = {name: value for name, value in vector.items() if name in parameters}
        if method == "finite_difference":
            return central_difference(lambda: self.mean_gradient(batches()), parameters, direction, epsilon)

        self._refuse_sharded()

        def product(part: Batch) -> Vector:
            self._profiler.count_samples("hessian_product", part)
            return ExactHessian(partial(self._task.compute_loss, self._model, part), parameters).times(
                direction, keep=False
            )

        def of_batch(batch: Batch) -> Vector:
            return _weighted((product(part), weight) for part, weight in self._task.micro_batches(batch))

        with self._borrowed():
            return self._over_ranks(self._mean_over_rows(of_batch, batches()))

    def hessian(self, batch: Batch) -> Callable[[Vector], dict[str, Tensor]]:
        """Return v ↦ H v for the mean loss of a batch; the graph of the gradient lives as long as the function."""
        self._refuse_sharded()
        parameters = trainable(self._model)
        hessians = []
        with self._borrowed():
            for part, weight in self._task.micro_batches(batch):
                self._profiler.count_samples("forward_backward", part)
                exact = ExactHessian(partial(self._task.compute_loss, self._model, part), parameters)
                hessians.append((part, exact, weight))

        def product(vector: Vector) -> dict[str, Tensor]:
            for part, _, _ in hessians:
                self._profiler.count_samples("second_backward", part)
            return self._over_ranks(_weighted((exact.times(vector), weight) for _, exact, weight in hessians))

        return product

    def _over_ranks(self, product: dict[str, Tensor]) -> dict[str, Tensor]:
        ranks = self._task.ranks
        ranks.join()
        return dict(zip(product, ranks.means([*product.values()]), strict=True)) if ranks.averages else product

    def _refuse_sharded(self) -> None:
        if self._task.ranks.shards:
            raise LoopscopeError(
                "An exact Hessian-vector product differentiates twice, which FSDP2 does not support and tensor "
                "parallelism does wrongly; use method='finite_difference'."
            )

    def _mean_over_rows(self, measure: Callable[[Batch], Vector], batches: Iterable[Batch]) -> dict[str, Tensor]:
        """Return the mean of a vector over batches, weighted by their rows on all ranks, in float32 or wider."""
        remaining = iter(batches)
        ahead = list(islice(remaining, 2))
        if not ahead:
            raise LoopscopeError("The loader has no batches, so there is nothing to take the mean of.")
        if len(ahead) == 1:
            return widened(measure(ahead[0]))
        total: dict[str, Tensor] = {}
        count = 0
        for batch in chain(ahead, remaining):
            together = self._task.ranks.rows(rows(batch))
            total = accumulate(total, measure(batch), together)
            count += together
        return scaled(1 / count, total)

    @contextmanager
    def _borrowed(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self._state.streams.isolated())
            stack.enter_context(borrowed_extras(self._state))
            stack.enter_context(borrowed_buffers(self._model))
            stack.enter_context(borrowed_modes(self._model, train=None))
            groups = self._task.optimizer.param_groups  # whose parameters need not be the model's
            stack.enter_context(borrowed_gradients(self._model, [each for group in groups for each in group["params"]]))
            stack.enter_context(borrowed_scaler(self._task))
            stack.enter_context(resharded_afterwards(self._model))
            stack.enter_context(torch.enable_grad())
            yield

    def _gradient(
        self, batch: Batch, compute: Callable[[TrainingTask, Batch], object] = measure_gradients
    ) -> dict[str, Tensor]:
        for parameter in self._model.parameters():
            parameter.grad = None  # not zeros: a parameter that the loss does not depend on shall have no gradient
        self._profiler.count_samples("forward_backward", batch)
        compute(self._task, batch)
        return gradients(self._model)


def _weighted(found: Iterable[tuple[Vector, float]]) -> dict[str, Tensor]:
    """Return the sum of vectors by their weights, in float32 or wider; of a single one, whose weight is 1, itself."""
    remaining = iter(found)
    ahead = list(islice(remaining, 2))
    if len(ahead) == 1 and ahead[0][1] == 1:
        return widened(ahead[0][0])
    total: dict[str, Tensor] = {}
    for vector, weight in chain(ahead, remaining):
        total = accumulate(total, vector, weight)
    return total
