"""Loss, gradient and curvature of a task at the current parameters; every measurement restores the state it changes.

Hessian-vector products are exact (reverse over reverse) or central differences of the gradient.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import chain, islice
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _NormBase

from ..data import Batch, MicroBatches, micro_batches, part_of, rows
from ..errors import LoopscopeError, shortened
from ..isolation import suspended_accumulation_hooks, undone_pass
from ..state import TrainingState, tensors_of
from ..tensors import Vector, accumulate, axpy, copied, gradients, minus, norm, overwrite, scaled, trainable, widened
from .compilation import eagerly
from .hessian_check import find_problem
from .profiler import Profiler
from .train_step import TrainingTask, borrowed_scaler, measure_gradients
from .user_functions import check_number, loss_with_graph, without_graph

Method = Literal["exact", "finite_difference"]
METHODS: tuple[str, ...] = get_args(Method)
FEW = 2
"""Rows by which a pass shows the structure of a model; batch normalisation rejects a single one."""


class ExactHessian:
    """The Hessian of a loss at the current parameters: reverse over reverse through the retained gradient graph.

    Attention uses its MATH kernel, the only one with a second derivative.

    Args:
        compute_loss: returns the zero-dimensional loss.
        parameters: the parameters to differentiate with respect to, by name.
    """

    def __init__(self, compute_loss: Callable[[], Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        with sdpa_kernel(SDPBackend.MATH):
            self._gradients = torch.autograd.grad(
                compute_loss(), list(parameters.values()), create_graph=True, allow_unused=True
            )

    def times(self, vector: Vector, *, keep: bool = True) -> dict[str, Tensor]:
        """Return H v by differentiating ⟨∇L, v⟩; missing names of ``vector`` count as zeros.

        The product is zero for parameters on which the loss depends linearly or not at all. Without ``keep`` the graph
        is freed, so that no further product is possible.
        """
        # H v = ∇⟨∇L, v⟩ for constant v; all tensors have the shapes of their parameters.
        pairs = [
            (gradient, vector[name].to(gradient.dtype))
            for name, gradient in zip(self._parameters, self._gradients, strict=True)
            if gradient is not None and gradient.requires_grad and name in vector
        ]
        if not pairs:
            return {name: torch.zeros_like(leaf) for name, leaf in self._parameters.items()}
        # Activation checkpointing computes attention again during this backward pass, which needs the same kernel.
        with sdpa_kernel(SDPBackend.MATH):
            products = torch.autograd.grad(
                [gradient for gradient, _ in pairs],
                list(self._parameters.values()),
                grad_outputs=[direction for _, direction in pairs],
                retain_graph=keep,
                allow_unused=True,
                materialize_grads=True,
            )
        return dict(zip(self._parameters, products, strict=True))


def central_difference(
    gradient: Callable[[], Vector], parameters: Mapping[str, nn.Parameter], vector: Vector, epsilon: float
) -> dict[str, Tensor]:
    """Return (g(θ + hu) − g(θ − hu))·‖v‖/2h with u = v/‖v‖ and h = ``epsilon``: H v up to O(h²), zeros for v = 0.

    The parameters are moved in place and restored from a copy, so that their bytes are the same afterwards.
    """
    vector = _dense(vector)
    length = norm(vector)
    start = copied({name: parameters[name] for name in vector})
    gradients_at_sides = []
    try:
        # In float32, central differences with h from 3e-3 to 1e-2 are 4e-5 to 5e-3 off, forward ones with 1e-4 7-17 %.
        for offset in (epsilon, -epsilon):
            step = torch.where(length > 0, offset / length, 0.0)
            overwrite(parameters, axpy(step, vector, start))
            gradients_at_sides.append(_dense(gradient()))
    finally:
        overwrite(parameters, start)
    product = scaled(length / (2 * epsilon), minus(gradients_at_sides[0], gradients_at_sides[1]))
    return {name: product.get(name, torch.zeros_like(leaf)) for name, leaf in parameters.items()}


def _dense(vector: Vector) -> Vector:
    """Return a vector with sparse tensors, such as the gradients of ``nn.Embedding(sparse=True)``, as dense ones."""
    return {name: value.to_dense() if value.is_sparse else value for name, value in vector.items()}


class LossProbe:
    """Measures the mean loss of batches in the current modes of the model.

    Every measurement is undone (:func:`.undone_pass`). Two measurements therefore see the same dropout mask and have no
    side effects. A batch is split into the task's micro-batches, as in training.
    """

    def __init__(self, task: TrainingTask, state: TrainingState, profiler: Profiler) -> None:
        self._task = task
        self._model = task.model
        self._state = state
        self._profiler = profiler

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean loss of a batch as a zero-dimensional tensor."""
        self._profiler.count_samples("forward", batch)
        self._task.ranks.join()

        def mean_loss() -> Tensor:
            parts = self._task.micro_batches(batch)
            losses = [self._part_loss(part) * weight for part, weight in parts]
            return self._task.ranks.mean(torch.stack(losses).sum())

        return without_graph("loss", mean_loss, self._borrowed_state, self._task.differentiating)

    def gradient(self, batch: Batch) -> dict[str, Tensor]:
        """Return the gradient of the mean loss of a batch by parameter name, without parameters that have none."""
        with self._borrowed_state():
            return self._gradient(batch)

    def measure_rows(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss of each single row, and the norm of its gradient; float64 of shape (rows,) each.

        All rows see the same dropout mask. Batch normalisation with tracked statistics uses these statistics, as in
        eval mode, since a single row has no batch statistics. Raises :class:`LoopscopeError` in several processes.
        """
        if self._task.ranks.are_many:
            raise LoopscopeError(
                f"{self._task.ranks.rank_and_count[1]} processes train together, but single rows can only be measured "
                "in one process; train in one process, or measure whole batches."
            )
        losses: list[Tensor] = []
        norms: list[Tensor] = []

        def append_loss(task: TrainingTask, row: Batch) -> None:
            losses.append(measure_gradients(task, row))

        parts = micro_batches(batch, 1) if isinstance(batch, MicroBatches) else [batch]
        for row in chain.from_iterable(micro_batches(part, rows(part)) for part in parts):
            with self._borrowed_state():
                for module in self._state.modules.modules():
                    # Private: torch has no public base class of all normalisations with running statistics.
                    if isinstance(module, _NormBase) and module.running_mean is not None:
                        module.training = False
                gradient = self._gradient(row, append_loss)
                norms.append(norm(gradient) if gradient else losses[-1].new_zeros(()))
        return torch.stack(losses).double(), torch.stack(norms).double()

    def _part_loss(self, part: Batch) -> Tensor:
        compute_loss = self._task.compute_loss
        if not torch.is_grad_enabled():
            loss = compute_loss(self._model, part)
            check_number(loss)
            return loss
        return loss_with_graph(compute_loss, self._model, part).detach()  # frees its graph before the next part

    def loss_with_graph(self, batch: Batch) -> Tensor:
        """Return the loss of the first micro-batch with its graph, from which hooks read the structure of the model.

        On the CPU it is the loss of the first rows, which is faster, unless that fails or has no graph.
        """
        part = self._task.micro_batches(batch)[0][0]
        if self._may_cut(part):
            # Eagerly, since functions compiled for other shapes first would compute other bits in the training.
            with suppress(Exception), eagerly():
                loss = self._loss_of(part_of(part, slice(FEW)))
                if loss.requires_grad:
                    return loss
        return self._loss_of(part)

    def _loss_of(self, part: Batch) -> Tensor:
        self._profiler.count_samples("forward", part)
        with self._borrowed_state():
            return self._task.compute_loss(self._model, part)

    def _may_cut(self, part: Batch) -> bool:
        """Return whether a loss of the first rows of a batch can harm nothing and saves time.

        On an accelerator, row numbers in a batch that point beyond its first rows would end the process.
        """
        tensors = tensors_of(part)
        if self._task.compiled or self._task.ranks.are_many:
            return False
        if any(tensor.device.type != "cpu" for tensor in (*tensors, *self._model.parameters())):
            return False
        lengths = {len(tensor) for tensor in tensors if tensor.ndim}
        return len(lengths) == 1 and lengths.pop() > FEW

    def mean_gradient(self, batches: Iterable[Batch]) -> dict[str, Tensor]:
        """Return the gradient of the mean loss over all rows of the batches."""
        with self._borrowed_state():
            return self._mean_over_rows(self._gradient, batches)

    def hessian_product(
        self, vector: Vector, batches: Callable[[], Iterable[Batch]], method: Method, epsilon: float
    ) -> dict[str, Tensor]:
        """Return H v for the mean loss over all rows of the batches; each call of ``batches`` starts a new iteration.

        Finite differences move the parameters and restore them.
        """
        parameters = trainable(self._model)
        direction = {name: value for name, value in vector.items() if name in parameters}
        if method == "finite_difference":
            return central_difference(lambda: self.mean_gradient(batches()), parameters, direction, epsilon)

        self._refuse_sharded()

        def product(part: Batch) -> Vector:
            self._profiler.count_samples("hessian_product", part)
            exact = ExactHessian(partial(loss_with_graph, self._task.compute_loss, self._model, part), parameters)
            return exact.times(direction, keep=False)

        def batch_product(batch: Batch) -> Vector:
            return _weighted_sum((product(part), weight) for part, weight in self._task.micro_batches(batch))

        with self._borrowed_state():
            return self._mean_over_ranks(self._mean_over_rows(batch_product, batches()))

    def hessian(self, batch: Batch) -> Callable[[Vector], dict[str, Tensor]]:
        """Return v ↦ H v for the mean loss of a batch; the function retains the graph of the gradient."""
        self._refuse_sharded()
        parameters = trainable(self._model)
        hessians = []
        with self._borrowed_state():
            for part, weight in self._task.micro_batches(batch):
                self._profiler.count_samples("forward_backward", part)
                exact = ExactHessian(partial(loss_with_graph, self._task.compute_loss, self._model, part), parameters)
                hessians.append((part, exact, weight))

        def product(vector: Vector) -> dict[str, Tensor]:
            for part, _, _ in hessians:
                self._profiler.count_samples("second_backward", part)
            with self._borrowed_state():  # activation checkpointing calls modules again
                products = [(exact.times(vector), weight) for _, exact, weight in hessians]
            return self._mean_over_ranks(_weighted_sum(products))

        return product

    def find_hessian_problem(self, batch: Batch, epsilon: float) -> str:
        """Return why exact Hessian-vector products fail or are wrong on a batch, as a clause, or an empty text.

        A loss that hooks cannot differentiate at all raises :class:`LoopscopeError`.
        """
        if self._task.ranks.shards:
            return "torch cannot differentiate twice through shards (FSDP2, tensor parallelism)"
        parameters = trainable(self._model)

        def difference(vector: Vector, step: float) -> Vector:
            return central_difference(partial(self.gradient, batch), parameters, vector, step)

        try:
            times = self.hessian(batch)
            return find_problem(times, partial(self.gradient, batch), difference, parameters, epsilon)
        except LoopscopeError:
            raise
        except Exception as error:
            return f"exact products raise {type(error).__name__} ({shortened(str(error).partition(chr(10))[0], 160)})"

    def _mean_over_ranks(self, product: dict[str, Tensor]) -> dict[str, Tensor]:
        ranks = self._task.ranks
        ranks.join()
        return dict(zip(product, ranks.means([*product.values()]), strict=True)) if ranks.averages else product

    def _refuse_sharded(self) -> None:
        if self._task.ranks.shards:
            raise LoopscopeError(
                "An exact Hessian-vector product differentiates twice, which FSDP2 does not support and tensor "
                "parallelism computes incorrectly; use method='finite_difference'."
            )

    def _mean_over_rows(self, measure: Callable[[Batch], Vector], batches: Iterable[Batch]) -> dict[str, Tensor]:
        """Return the mean of a vector over batches, weighted by their rows on all ranks, in float32 or wider."""
        remaining = iter(batches)
        first_two = list(islice(remaining, 2))
        if not first_two:
            raise LoopscopeError("The loader has no batches, so no mean over batches can be computed.")
        if len(first_two) == 1:
            return widened(measure(first_two[0]))
        # Mean = Σ n_b·v_b / Σ n_b over the batches b with n_b rows each.
        total: dict[str, Tensor] = {}
        count = 0
        for batch in chain(first_two, remaining):
            batch_rows = self._task.ranks.rows(rows(batch))
            total = accumulate(total, measure(batch), batch_rows)
            count += batch_rows
        return scaled(1 / count, total)

    @contextmanager
    def _borrowed_state(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(undone_pass(self._state, clears_gradients=True))
            stack.enter_context(suspended_accumulation_hooks(self._state.modules))
            stack.enter_context(borrowed_scaler(self._task))
            stack.enter_context(torch.enable_grad())
            yield

    def _gradient(
        self, batch: Batch, compute: Callable[[TrainingTask, Batch], object] = measure_gradients
    ) -> dict[str, Tensor]:
        for parameter in self._model.parameters():
            parameter.grad = None  # not zeros, so that parameters without influence on the loss have no gradient
        self._profiler.count_samples("forward_backward", batch)
        compute(self._task, batch)
        return gradients(self._model)


def _weighted_sum(pairs: Iterable[tuple[Vector, float]]) -> dict[str, Tensor]:
    """Return Σ weight·vector in float32 or wider; a single vector with weight 1 is returned without arithmetic."""
    remaining = iter(pairs)
    first_two = list(islice(remaining, 2))
    if len(first_two) == 1 and first_two[0][1] == 1:
        return widened(first_two[0][0])
    total: dict[str, Tensor] = {}
    for vector, weight in chain(first_two, remaining):
        total = accumulate(total, vector, weight)
    return total
