"""Read-only arguments of hooks: the view of one hook point, and the description of a run."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from textwrap import dedent
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import UsageError
from ..names import as_names
from .hook_points import ENDLESS, EPOCH_END, STEP_POINTS, HookPoint

if TYPE_CHECKING:
    from ..data import Loader
    from ..training import ObservedPass, Profiler, Ranks, TrainingTask


@dataclass(frozen=True)
class MetricInfo:
    """The description of a metric: name (``norm/<parameter>`` for one per parameter), formula, range and reading."""

    name: str
    formula: str
    range: str
    reading: str

    @property
    def column(self) -> str:
        """Name without its per-parameter part: one column of a table."""
        return self.name.removesuffix("/<parameter>")

    def describes(self, metric: str) -> bool:
        """Return whether this description covers a value that a hook returns under the name ``metric``."""
        return metric == self.name or (self.column != self.name and metric.startswith(self.column + "/"))


def metric_table(text: str) -> list[MetricInfo]:
    """Return the metrics that a table describes, one row each: ``name | formula | range | reading``.

    A line indented deeper than the first row continues the row above it, so a row may be broken at any space. Empty
    lines are ignored.

    >>> table = metric_table('''
    ...     loss | mean of the step losses | [0, ∞) | Should fall.
    ...     norm/<parameter> | ‖g_p‖₂ | [0, ∞)
    ...         | Far above the others: the layer that makes
    ...         training unstable.
    ... ''')
    >>> table[1].reading
    'Far above the others: the layer that makes training unstable.'

    Raises:
        UsageError: a row does not have four cells.
    """
    rows: list[str] = []
    for line in filter(str.strip, dedent(text).splitlines()):
        if rows and line.startswith(" "):
            rows[-1] += " " + line.strip()
        else:
            rows.append(line.strip())
    table = [[cell.strip() for cell in row.split(" | ")] for row in rows]
    for row, cells in zip(rows, table, strict=True):
        if len(cells) != 4:
            raise UsageError(f"The metric row {row!r} is invalid; write 'name | formula | range | reading'.")
    return [MetricInfo(*cells) for cells in table]


@dataclass(frozen=True)
class TaskView:
    """The task in a :class:`RunInfo`: no optimizer, which only the loop steps; its loader copies views of the data."""

    model: nn.Module
    loader: "Loader"
    length: int
    config: Any
    ranks: "Ranks"


@dataclass(frozen=True, kw_only=True)
class MetricPanel:
    """Metrics of a hook that share one panel of a picture; other hooks may add panels to the same picture."""

    picture: str
    """Name of the picture: the option of ``loopscope plot`` that draws it."""
    place: int
    """Position of the panel: panels of a picture are sorted by it."""
    title: str
    y_label: str
    curves: Mapping[str, str]
    """Legend text by metric name; equal texts have the same style in all panels, an empty text has no legend entry."""
    log_y: bool | None = False
    """Logarithmic vertical axis: yes, no, or (``None``) if the values span many decades."""
    baseline: float | None = None
    """Value that a thin line marks."""
    shares: Mapping[str, str] = field(default_factory=dict)
    """Metrics whose mean the subtitle states in percent, each with its label."""


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The description of one strategy's run, passed to hooks (``start``) and sinks (``set_run_context``)."""

    experiment: str
    strategy: str
    output_dir: Path
    task: "TaskView | TrainingTask" = field(repr=False)
    loop: str
    seed: int
    optimizer_class: type[Optimizer]
    """Class of the optimizer; of several optimizers with different classes, ``torch.optim.Optimizer``."""
    optimizer_classes: tuple[type[Optimizer], ...] = ()
    """Classes of all optimizers, without duplicates; by default ``(optimizer_class,)``."""
    optimizer_groups: "tuple[OptimizerGroup, ...]" = ()
    """Parameter groups at the start of the run."""
    reference_weights: Mapping[str, Tensor] | None = None
    """Weights of the reference solution by parameter name, if one was loaded."""
    metric_infos: Mapping[str, MetricInfo] = field(default_factory=dict)
    """Descriptions of the hooks' metrics, by full name ``hook/metric``."""
    treatments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Parts of the training state that each committing hook changes, by the hook's name."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    """Requirements that the loop does not fulfil, such as ``"needs_loss"``, each with advice for the user."""
    first_pass: Callable[[], Tensor] | None = field(default=None, repr=False)
    """Computes the loss of the first batch with its autograd graph, without side effects, for hooks that inspect the
    model's operations; set by the hook manager."""
    observed_first_pass: "Callable[[], ObservedPass] | None" = field(default=None, repr=False)
    """Returns which modules and matrices the loss of the first batch uses, from one pass that all hooks share; set like
    ``first_pass``."""

    def __post_init__(self) -> None:
        """Replace the task by its read-only view, and fill in the classes of a single optimizer."""
        object.__setattr__(self, "optimizer_classes", self.optimizer_classes or (self.optimizer_class,))
        from ..data import with_copied_batches  # imported here, so that defining a hook imports no data loaders

        task = self.task
        object.__setattr__(
            self, "task", TaskView(task.model, with_copied_batches(task.loader), task.length, task.config, task.ranks)
        )

    @property
    def model(self) -> nn.Module:
        """Trained model."""
        return self.task.model

    @property
    def ranks(self) -> "Ranks":
        """Processes that train the model together."""
        return self.task.ranks

    @property
    def config(self) -> Any:
        """Options of the experiment."""
        return self.task.config

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in the current pass over the data."""
        return len(self.task.loader)

    @property
    def is_endless(self) -> bool:
        """Whether the length of the run is unknown."""
        return self.task.length >= ENDLESS

    @property
    def steps(self) -> int:
        """Planned steps of the run, which may stop earlier; the plan changes with the length of the epochs."""
        if self.is_endless:
            return ENDLESS
        return self.task.loader.steps_until(self.task.length) if self.loop == "epoch" else self.task.length


@dataclass(frozen=True)
class OptimizerGroup:
    """A read-only copy of one parameter group: the names of its parameters, its hyper-parameters, its optimizer."""

    names: tuple[str, ...]
    lr: float
    """NaN for a group without a numeric learning rate, such as those of Adafactor with ``lr=None``."""
    weight_decay: float
    """0 for a group without weight decay."""
    betas: tuple[float, ...] | None
    """``None`` for a group without these numbers."""
    options: Mapping[str, Any]
    optimizer: int = 0
    """Position of the group's optimizer among those of a training with several."""
    optimizer_class: type[Optimizer] = Optimizer


@dataclass(frozen=True)
class ForwardResult:
    """The result of :meth:`RunDataContext.forward`: the model's output and the captured modules' outputs."""

    output: Any
    captured: Mapping[str, Any]


def _unknown_rows(epoch: int, batch: int) -> None:
    """Return that the row numbers of a batch are unknown: the default of the services."""


@dataclass(frozen=True, kw_only=True)
class BackwardContext:
    """The argument of :meth:`TrainingHook.before_backward`: the backward pass of a micro-batch that starts next."""

    epoch: int
    step: int
    index: int
    """Number of backward passes of the step before this one. A pass that fails, or does not reach the parameters, does
    not count: the next one has the same index."""
    loss: Tensor = field(repr=False)
    """The tensor of which the gradients are computed, with its graph: zero-dimensional."""
    divisor: float
    """Number by which the trainer still divides the loss."""
    is_scaled: bool
    """Whether a loss scaler has multiplied the loss."""
    is_due: bool = True
    """Whether the step is in the ``step_schedule`` of the hook. If not, this loss is the first one that is NaN or
    infinite, perhaps on this rank alone, so that the hook must not use collective operations."""
    parameters: Mapping[str, nn.Parameter] = field(repr=False)
    """The parameters of the model by name, as between two steps: under FSDP2 the model itself has gathered copies
    without gradients now. Empty if no hook is due."""
    ranks: "Ranks" = field(repr=False)
    """The ranks that train together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverServices:
    """Functions behind the methods of :class:`RunDataContext`; created once per run."""

    forward: Callable[[Any, list[str], bool], ForwardResult]
    batch_gradients: Callable[[Any], dict[str, Tensor]]
    evaluate: Callable[[Mapping[str, Tensor]], dict[str, float]]
    optimizer_groups: Callable[[], tuple[OptimizerGroup, ...]]
    last_metrics: Callable[[HookPoint | None], Mapping[str, Any]]
    ranks: "Ranks"
    row_indices: Callable[[int, int], Tensor | None] = _unknown_rows
    replayed: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True, kw_only=True)
class RunDataContext:
    """A frozen view of the run at one hook point. Fields that do not apply are ``None``; docs/loop.md has a table."""

    hook_point: HookPoint
    epoch: int
    step: int
    """Number of the step in progress, from 1; between steps, the number of completed steps."""
    model: nn.Module
    config: Any
    loader: Any
    services: ObserverServices
    profiler: "Profiler"
    batch_idx: int | None = None
    batch_data: Any = None
    loss: float | Tensor | None = None
    """The step's loss, a zero-dimensional tensor, from POST_BACKWARD on. After an epoch (step loop: at SNAPSHOT) the
    mean over the steps of the epoch (since the last SNAPSHOT), a float."""
    train_acc: float | None = None
    val_acc: float | None = None
    evaluation: Mapping[str, float] = field(default_factory=partial(MappingProxyType[str, float], {}))
    """Results of the last evaluation, including both accuracies; empty after the next step."""
    lr: float | Tensor | None = None
    """Current learning rate of the first parameter group: from POST_STEP on, that of the next step.
    NaN, here and in ``step_lr``, if the group has no numeric learning rate."""
    step_lr: float | Tensor | None = None
    """Learning rate of the first parameter group in the last step; before the first step, the current one."""
    loss_scale: float | None = None
    """Factor of the step's loss in the backward pass (float16 only): taps read scaled gradients, ``parameter.grad`` is
    unscaled."""
    skipped_steps: int = 0
    """Number of steps without an update, because gradients overflowed in float16; they have no POST_STEP."""
    accumulated_grads: Mapping[str, Tensor] | None = None
    """Mean gradient at POST_BACKWARD over the finished epoch (step loop: since the last SNAPSHOT), by parameter name
    (``needs_grads``)."""
    step_losses: Tensor | None = None
    """Losses of the steps of the finished epoch (step loop: since the last SNAPSHOT), oldest first: shape (steps,),
    float64 (``needs_step_series``)."""
    step_grad_norms: Tensor | None = None
    """Joint Euclidean norms of the gradients of the same steps at POST_BACKWARD (``needs_step_series``)."""
    grad_norm: Tensor | None = None
    """Joint Euclidean norm of the step's gradients at POST_BACKWARD, before clipping: a zero-dimensional tensor,
    float64 (``needs_step_series``)."""
    prev_step_grads: Mapping[str, Tensor] | None = None
    """Gradient of the previous step at POST_BACKWARD, by parameter name (``needs_prev_step_grads``)."""
    reference_weights: Mapping[str, Tensor] | None = None
    """Weights of the reference solution by parameter name (``needs_`` or ``uses_reference_weights``)."""

    @property
    def optimizer_groups(self) -> tuple[OptimizerGroup, ...]:
        """Copies of the optimizer's parameter groups: parameter names and hyper-parameters."""
        return self.services.optimizer_groups()

    @property
    def ranks(self) -> "Ranks":
        """Processes that train the model together; call ``ranks.join()`` before a sum or mean over them."""
        return self.services.ranks

    @property
    def row_indices(self) -> Tensor | None:
        """Row numbers, within the data set, of this rank's part of the batch: an int64 copy of shape (rows,).

        ``None`` between steps, and if the loader does not provide them (:meth:`.Loader.row_indices`).
        """
        return None if self.batch_idx is None else self.services.row_indices(self.epoch, self.batch_idx)

    def forward(self, inputs: Any, *, capture: str | Sequence[str] = (), train: bool = False) -> ForwardResult:
        """Run the model on ``inputs`` without gradients; modes, buffers and random streams are restored.

        Args:
            inputs: the model's input, or a tuple of its positional inputs.
            capture: the name of a submodule whose output is returned as well, or several names.
            train: run in train mode (with dropout) instead of eval mode.
        """
        return self.services.forward(inputs, as_names(capture), train)

    def compute_batch_gradients(self, batch: Any) -> dict[str, Tensor]:
        """Return the gradient of the mean training loss on ``batch`` by parameter name, in the model's current modes.

        Gradients, buffers, modes and random streams are restored afterwards.
        """
        return self.services.batch_gradients(batch)

    def replayed(self) -> AbstractContextManager[None]:
        """Draw in the body the random numbers of the step's own pass, such as its dropout masks.

        The streams are those at the end of PRE_STEP, so draws of a custom loop between PRE_STEP and its pass shift
        them. Requires ``needs_step_replay``.
        """
        return self.services.replayed()

    def evaluate(self, weights: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the results of the experiment's evaluation with other weights; the model's weights do not change.

        The model is in eval mode, and the random stream is that of the run's evaluation after this step, so both draw
        the same numbers.

        Args:
            weights: tensors that replace parameters and buffers, by name, with the same shapes, and any floating-point
                dtype and device; DTensors for DTensors. Missing names keep the model's tensors.

        Raises:
            LoopscopeError: the model is sharded by FSDP2, which does not allow other weights.
        """
        return self.services.evaluate(weights)

    def get_last_metrics(self, point: HookPoint | None = None) -> Mapping[str, Any]:
        """Return the latest metrics by full name, of ``point`` or all points, including earlier hooks of this call."""
        return self.services.last_metrics(point)


_STEPS = tuple(sorted(STEP_POINTS))
_EVALUATED = (HookPoint.PRE_EPOCH, *EPOCH_END), "", "after an evaluation that reports it, until the next step"
SET_AT: Mapping[str, tuple[tuple[HookPoint, ...], str, str]] = {
    "batch_idx": (_STEPS, "", ""),
    "batch_data": (_STEPS, "", ""),
    "row_indices": (_STEPS, "", "if the loader provides row numbers"),
    "loss": ((*_STEPS[1:], *EPOCH_END), "", ""),
    "loss_scale": (_STEPS[1:], "", "in float16"),
    "train_acc": _EVALUATED,
    "val_acc": _EVALUATED,
    "evaluation": _EVALUATED,
    "accumulated_grads": (EPOCH_END, "needs_grads", ""),
    "step_losses": (EPOCH_END, "needs_step_series", ""),
    "step_grad_norms": (EPOCH_END, "needs_step_series", ""),
    "grad_norm": (_STEPS[1:], "needs_step_series", "if the loss is known"),
    "prev_step_grads": (_STEPS, "needs_prev_step_grads", "from the second step on"),
    "reference_weights": (tuple(HookPoint), "uses_reference_weights", "with a reference solution"),
}
"""Optional fields of a view: the points at which they are set, the flag that requests them, and further conditions."""
