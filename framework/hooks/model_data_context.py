"""Access of an intervention to the mutable training state: the methods that its second argument has."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor, device, nn

from ..errors import LoopscopeError
from .commits import Clipping

if TYPE_CHECKING:
    from ..data import Batch, Loader

Method = Literal["exact", "finite_difference"]
"""Methods of Hessian-vector products."""
Vector = Mapping[str, Tensor]
"""A vector over the parameters, by name."""


class ExpiredError(LoopscopeError):
    """A model context was used after its hook call had ended."""


class ReadOnlyError(LoopscopeError):
    """A hook with ``mutates = False`` called a method that changes the training state."""


class ModelDataContext(Protocol):
    """Measurements, reversible changes and commits for one call of an intervention.

    All changes are rolled back when the call ends. Then, if the hook returned without an error, its commits are
    applied: the changes that the methods documented with "Commit" have checked and recorded. After the call every
    method raises :class:`ExpiredError`.

    Vectors are dicts from parameter names to tensors of the parameters' shapes (plain tensors or DTensors); a missing
    name means zeros. Losses, gradients and curvature are those of the training loss in the model's current modes.
    Measurements restore buffers, modes, gradients and random streams, so two measurements in one call use the same
    dropout mask.
    """

    @property
    def model(self) -> nn.Module:
        """Trained model."""

    @property
    def device(self) -> device:
        """Device of the model's first parameter."""

    @property
    def loader(self) -> "Loader":
        """Training data, in the run's order; its batches may be modified."""

    @property
    def optimizer_state(self) -> Mapping[str, Mapping[str, Any]]:
        """Live state tensors of the optimizer, and of optimizers that it wraps, by parameter name."""

    def rows(self, batch: "Batch") -> int:
        """Return the number of rows in the batches of all data-parallel ranks together."""

    def compute_batch_loss(self, batch: "Batch | None" = None) -> Tensor:
        """Return the mean loss on one batch (default: the current one), at the current parameters."""

    def compute_batch_gradients(self, batch: "Batch | None" = None) -> dict[str, Tensor]:
        """Return the gradient of the mean loss on one batch (default: the current one), at the current parameters."""

    def measure_rows(self, batch: "Batch | None" = None) -> tuple[Tensor, Tensor]:
        """Return the loss of every single row of a batch (default: the current one), and the norm of its gradient.

        Both are float64 of shape (rows,), at the current parameters and modes, computed with one pass per row. All rows
        use the same dropout mask. Batch normalisation uses its tracked statistics, as in eval mode, because a single
        row has no batch statistics. Other terms of the loss, such as a penalty, are part of every row's loss.

        Raises:
            LoopscopeError: several processes train together.
        """

    def compute_gradients(self) -> dict[str, Tensor]:
        """Return the gradient of the mean loss over the training set, batches weighted by their rows."""

    def hessian_vector_product(
        self,
        vector: Vector,
        batch: "Batch | None" = None,
        *,
        loader: "Loader | None" = None,
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

    def hessian_operator(
        self, batch: "Batch | None" = None, *, method: Method = "exact", epsilon: float = 1e-2
    ) -> Callable[[Vector], dict[str, Tensor]]:
        """Return the function v ↦ H v on one batch, for several products at the same parameters.

        An exact operator keeps the gradient's graph, with all activations, as long as it exists: each product then
        costs one backward pass. If the parameters change, autograd raises an error.
        """

    def find_hessian_problem(self, batch: "Batch | None" = None, *, epsilon: float = 1e-2) -> str:
        """Return why exact Hessian-vector products fail or are wrong on a batch, as a clause, or an empty text.

        Exact products are checked for symmetry, and against finite differences with steps from ``epsilon`` on where
        these are accurate. The check takes five exact products and nine gradients.
        """

    def save_checkpoint(self, *, full: bool = True) -> int:
        """Save the training state and return a token for it.

        ``full=False`` saves only parameters, buffers and random streams, on their device: enough for code that only
        runs forward and backward passes.
        """

    def restore_checkpoint(self, token: int) -> None:
        """Restore the state that :meth:`save_checkpoint` saved under ``token``, including random streams."""

    def discard_checkpoint(self, token: int) -> None:
        """Free the memory of a checkpoint."""

    def branch(self, *, full: bool = True) -> AbstractContextManager[None]:
        """Run the body, and restore the training state afterwards, also after an exception."""

    def restore_pre_epoch(self) -> None:
        """Restore the state before the current epoch, or before the interval of the step loop.

        The hook's class must set ``needs_pre_epoch_state``.

        The hook's random streams continue, so it draws new numbers after each call.
        """

    def run_training_epoch(self, loader: "Loader", *, step: bool = True) -> dict[str, Tensor]:
        """Train one epoch and return the mean gradient of its steps, computed like ``accumulated_grads`` of the run.

        With ``step=False`` parameters, optimizer and scheduler do not change. Dropout masks come from the current
        random streams. A per-epoch scheduler is not stepped, and commits of other hooks are not applied.
        """

    def take_step(
        self,
        batch: "Batch | None" = None,
        *,
        learning_rates: Sequence[float] | None = None,
        rate_factor: float = 1.0,
        weight_decay: float | None = None,
        max_norm: float | None = None,
        passes: AbstractContextManager[object] = nullcontext(),  # noqa: B008 - it has no state
    ) -> Tensor:
        """Train one step on a batch (default: the current one) like the loop, and return the loss before the step.

        ``learning_rates`` has a value for each parameter group of the optimizer, for this step only; the scheduler is
        then not stepped. ``rate_factor`` multiplies the learning rates of all groups and ``weight_decay`` replaces
        their weight decay, both for this step only; the scheduler is stepped as usual. ``max_norm`` clips the gradients
        like ``clip_gradients``. The forward and backward passes run in the context manager ``passes``. Dropout masks
        come from the current random streams. A per-epoch scheduler is not stepped, and commits of other hooks are not
        applied.
        """

    def get_shuffled_loader(self) -> "Loader":
        """Return the training data in a fresh random order.

        The n-th loader of a call depends only on the hook's random stream, not on earlier draws or restored states.
        """

    def apply_perturbation(self, direction: Vector, scale: float) -> None:
        """Add ``scale * direction`` to the parameters, in place."""

    def scale_gradients(self, factor: float | Tensor | Mapping[str, float | Tensor]) -> None:
        """Commit: multiply every gradient by ``factor``, or the gradients of named parameters by their factors.

        Factors are numbers or zero-dimensional tensors.
        """

    def clamp_gradients(self, max_value: float) -> None:
        """Commit: clamp every element of the gradients to [−max_value, max_value].

        The arithmetic is that of ``torch.nn.utils.clip_grad_value_``.
        """

    def clip_gradients(self, max_norm: float) -> Clipping:
        """Commit: scale the gradients so that their joint norm is at most ``max_norm``; return current norm and factor.

        The arithmetic is that of ``torch.nn.utils.clip_grad_norm_``, except that float16 and bfloat16 are reduced in
        float32. If earlier commits of this call change the gradients, norm and factor are measured again.
        """

    def replace_gradients(self, values: Vector) -> None:
        """Commit: set the gradients of the parameters in ``values``, which the hook must not change afterwards."""

    def add_to_gradients(self, values: Vector, factor: Tensor) -> None:
        """Commit: g ← g + factor·values, with a zero-dimensional factor; ``values`` must not change afterwards."""

    def blend_parameters(self, target: Vector, weight: float) -> None:
        """Commit: θ ← (1 − weight)·θ + weight·target; the hook must not change ``target`` afterwards."""

    def thaw_parameters(self, names: str | Iterable[str]) -> None:
        """Commit: train the named parameters from now on.

        Raises:
            LoopscopeError: the model is trained by DistributedDataParallel, which cannot add parameters.
        """

    def reset_optimizer_state(self, names: str | Iterable[str]) -> None:
        """Commit: reset the optimizer's state of the named parameters."""
