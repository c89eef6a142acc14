"""What hooks are told: the frozen view of one fire, and the description of one run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from ..data import Loader, with_copied_batches
from ..errors import UsageError
from ..training import Profiler, Ranks
from .hook_points import EPOCH_END, STEP_POINTS, HookPoint


@dataclass(frozen=True)
class MetricInfo:
    """One metric: its name (``norm/<parameter>`` for one per parameter), formula, range and reading."""

    name: str
    formula: str
    range: str
    reading: str

    @property
    def column(self) -> str:
        """The name without its per-parameter part: one column of a table."""
        return self.name.removesuffix("/<parameter>")

    def describes(self, metric: str) -> bool:
        """Return whether a value that a hook returns under the name ``metric`` is explained by this description."""
        return metric == self.name or (self.column != self.name and metric.startswith(self.column + "/"))


def metric_table(text: str) -> list[MetricInfo]:
    """Describe metrics in a table with a row for each: ``name | formula | range | reading``.

    A line indented deeper than the first row continues the row above it, so a row may be broken at any space; empty
    lines are left out.

    >>> table = metric_table('''
    ...     loss | mean of the step losses | [0, ∞) | Should fall.
    ...     norm/<parameter> | ‖g_p‖₂ | [0, ∞)
    ...         | Far above the others: the layer that makes
    ...         training unstable.
    ... ''')
    >>> table[1].reading
    'Far above the others: the layer that makes training unstable.'

    Raises:
        UsageError: a row has not four cells.
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
            raise UsageError(f"A metric is described as 'name | formula | range | reading'; this is not: {row!r}.")
    return [MetricInfo(*cells) for cells in table]


ENDLESS = 2**31
"""Length of a run, or of an epoch, that nobody knows beforehand."""


class Trained(Protocol):
    """What hooks and sinks may see of a :class:`TrainingTask`: no optimizer, which only the loop steps."""

    model: nn.Module
    loader: Loader
    length: int
    config: Any
    ranks: Ranks


@dataclass(frozen=True)
class ShownTask:
    """What a :class:`RunInfo` shows of a task: its loader yields copies where batches may be views of the data."""

    model: nn.Module
    loader: Loader
    length: int
    config: Any
    ranks: Ranks


@dataclass(frozen=True, kw_only=True)
class MetricPanel:
    """Metrics of a hook, by their names, that are drawn in one panel of a picture, beside those of other hooks."""

    picture: str
    """The picture, by the option of ``loopscope plot`` that draws it."""
    place: int
    """Panels of a picture stand in the order of their places."""
    title: str
    y_label: str
    curves: Mapping[str, str]
    """What each metric shows; curves of one text look alike in all panels. An empty one needs no explanation."""
    log_y: bool | None = False
    """A logarithmic vertical axis: yes, no, or where the values span many decades."""
    baseline: float | None = None
    """A value that is marked by a thin line."""
    shares: Mapping[str, str] = field(default_factory=dict)
    """Metrics whose mean is said below the title, in percent, with the word for it."""


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """One strategy's run, as hooks (``start``) and sinks (``set_run_context``) are told of it."""

    experiment: str
    strategy: str
    output_dir: Path
    task: Trained = field(repr=False)
    loop: str
    seed: int
    optimizer_class: type[Optimizer]
    reference_weights: Mapping[str, Tensor] | None = None
    """The weights of the reference solution by parameter name, if one was loaded."""
    metric_infos: Mapping[str, MetricInfo] = field(default_factory=dict)
    """Every metric that the run's hooks describe, by its full name ``hook/metric``."""
    treatments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The committing hooks, by name, with the parts of the training state that each changes."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    """What the loop cannot give that a hook may declare as a need (``"needs_loss"``, say), with what to do about it."""
    first_pass: Callable[[], Tensor] | None = field(default=None, repr=False)
    """Computes the loss of the first batch with its graph, leaving nothing behind, for hooks that must see what the
    model does; set by the hook manager."""

    def __post_init__(self) -> None:
        """Show of the task no more than hooks and sinks may see."""
        task = self.task
        object.__setattr__(
            self, "task", ShownTask(task.model, with_copied_batches(task.loader), task.length, task.config, task.ranks)
        )

    @property
    def model(self) -> nn.Module:
        """The model that is trained."""
        return self.task.model

    @property
    def ranks(self) -> Ranks:
        """Who trains the model together."""
        return self.task.ranks

    @property
    def config(self) -> Any:
        """The options of the experiment."""
        return self.task.config

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one pass over the data."""
        return len(self.task.loader)

    @property
    def is_endless(self) -> bool:
        """Whether nobody knows how long the run will be."""
        return self.task.length >= ENDLESS

    @property
    def steps(self) -> int:
        """Steps of the whole run, unless it stops earlier."""
        return ENDLESS if self.is_endless else self.task.length * (self.steps_per_epoch if self.loop == "epoch" else 1)


@dataclass(frozen=True)
class OptimizerGroup:
    """A read-only copy of one parameter group: the names of its parameters and its hyper-parameters."""

    names: tuple[str, ...]
    lr: float
    weight_decay: float
    betas: tuple[float, float] | None
    options: Mapping[str, Any]


@dataclass(frozen=True)
class ForwardResult:
    """What :meth:`RunDataContext.forward` returns: the model's output and the captured modules' outputs."""

    output: Any
    captured: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverServices:
    """The functions behind the methods of :class:`RunDataContext`; built once for a run."""

    forward: Callable[[Any, Sequence[str], bool], ForwardResult]
    batch_gradients: Callable[[Any], dict[str, Tensor]]
    evaluate: Callable[[Mapping[str, Tensor]], dict[str, float]]
    optimizer_groups: Callable[[], tuple[OptimizerGroup, ...]]
    last_metrics: Callable[[HookPoint | None], Mapping[str, Any]]
    ranks: Ranks = field(default_factory=Ranks)
    row_indices: Callable[[int, int], Tensor | None] = lambda epoch, batch: None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDataContext:
    """The frozen view of one fire. A field is ``None`` where it does not apply; docs/loop.md has the table."""

    hook_point: HookPoint
    epoch: int
    step: int
    """Optimizer steps: the 1-based number of the step in progress, between steps the number of steps done."""
    model: nn.Module
    config: Any
    loader: Any
    services: ObserverServices
    profiler: Profiler
    batch_idx: int | None = None
    batch_data: Any = None
    loss: float | Tensor | None = None
    """The step's loss (a zero-dimensional tensor) once it is computed; after an epoch (step loop: at SNAPSHOT) the mean
    over the steps of the epoch (of the last ``log_every`` steps), a float."""
    train_acc: float | None = None
    val_acc: float | None = None
    evaluation: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """All numbers of the newest evaluation, the two accuracies included, as long as no step was taken since."""
    lr: float | None = None
    """The present learning rate of the first parameter group: at POST_STEP and later the next step's."""
    step_lr: float | Tensor | None = None
    """That group's rate in the newest step that was made, before the first one the present rate."""
    loss_scale: float | None = None
    """What the loss of the step was multiplied by for its backward pass, which taps see (float16 only); gradients on
    parameters are unscaled."""
    skipped_steps: int = 0
    """Steps so far whose update was skipped, since their gradients left float16; they fire no POST_STEP."""
    accumulated_grads: Mapping[str, Tensor] | None = None
    """Mean gradient of the finished epoch (step loop: of the last ``log_every`` steps) by parameter name, as
    POST_BACKWARD saw it (``needs_grads``)."""
    step_losses: Tensor | None = None
    """Losses of the steps of the finished epoch (step loop: since the last SNAPSHOT), oldest first: shape (steps,),
    float64 (``needs_step_series``)."""
    step_grad_norms: Tensor | None = None
    """Euclidean norms of all gradients of the same steps, as POST_BACKWARD saw them (``needs_step_series``)."""
    prev_step_grads: Mapping[str, Tensor] | None = None
    """Gradient of the previous step by parameter name, as POST_BACKWARD saw it (``needs_prev_step_grads``)."""
    target_grad: Mapping[str, Tensor] | None = None
    """The experiment's target gradient by parameter name (``needs_target_grad``)."""
    reference_weights: Mapping[str, Tensor] | None = None
    """The weights of the reference solution by parameter name (``needs_`` or ``uses_reference_weights``)."""

    @property
    def optimizer_groups(self) -> tuple[OptimizerGroup, ...]:
        """The optimizer's parameter groups, copied: names, learning rate, decay, betas."""
        return self.services.optimizer_groups()

    @property
    def ranks(self) -> Ranks:
        """Who trains the model together; a hook calls ``ranks.join()`` before it takes sums or means over them."""
        return self.services.ranks

    @property
    def row_indices(self) -> Tensor | None:
        """The numbers in the data set of the rows of the step's batch, of this rank's: int64 of shape (rows,), a copy.

        ``None`` between steps, and where the loader does not know them (:meth:`.Loader.row_indices`).
        """
        return None if self.batch_idx is None else self.services.row_indices(self.epoch, self.batch_idx)

    def forward(self, inputs: Any, *, capture: Sequence[str] = (), train: bool = False) -> ForwardResult:
        """Run the model on ``inputs`` without gradients, leaving modes, buffers and random streams as they were.

        Args:
            inputs: the model's input, or a tuple of its positional inputs.
            capture: names of submodules whose outputs are returned beside the model's.
            train: run in train mode (with dropout) instead of eval mode.
        """
        return self.services.forward(inputs, capture, train)

    def compute_batch_gradients(self, batch: Any) -> dict[str, Tensor]:
        """Return the gradient of the mean training loss on ``batch`` by parameter name, in the model's present modes.

        What that needs (gradients, buffers, modes, random streams) is borrowed and put back.
        """
        return self.services.batch_gradients(batch)

    def evaluate(self, weights: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the numbers of the experiment's evaluation with other weights; the model's own are not touched.

        In eval mode and on the random stream of the run's own evaluation after this step, so that both see the same
        draws. Raises :class:`LoopscopeError` under FSDP2, where weights cannot be exchanged.

        Args:
            weights: tensors that stand for parameters and buffers, by name; the model's own stand where none is given.
                DTensors for DTensors; of the same shapes, of any floating-point dtype and device.
        """
        return self.services.evaluate(weights)

    def get_last_metrics(self, point: HookPoint | None = None) -> Mapping[str, Any]:
        """Return the newest metrics by full name, of ``point`` or of all points; observers of this fire included."""
        return self.services.last_metrics(point)


_STEPS = tuple(sorted(STEP_POINTS))
_EVALUATED = (HookPoint.PRE_EPOCH, *EPOCH_END), "", "after an evaluation, before the next step, if that reports it"
SET_AT: Mapping[str, tuple[tuple[HookPoint, ...], str, str]] = {
    "batch_idx": (_STEPS, "", ""),
    "batch_data": (_STEPS, "", ""),
    "row_indices": (_STEPS, "", "where the loader knows the rows' numbers"),
    "loss": ((*_STEPS[1:], *EPOCH_END), "", "in the step loop after the first log_every steps"),
    "loss_scale": (_STEPS[1:], "", "in float16 (--amp fp16)"),
    "train_acc": _EVALUATED,
    "val_acc": _EVALUATED,
    "evaluation": _EVALUATED,
    "accumulated_grads": (EPOCH_END, "needs_grads", "in the step loop after the first log_every steps"),
    "step_losses": (EPOCH_END, "needs_step_series", ""),
    "step_grad_norms": (EPOCH_END, "needs_step_series", ""),
    "prev_step_grads": (_STEPS, "needs_prev_step_grads", "from the second step on"),
    "target_grad": (tuple(HookPoint), "needs_target_grad", "where the experiment defines target_grad"),
    "reference_weights": (tuple(HookPoint), "uses_reference_weights", "with --reference PATH"),
}
"""Where the fields of a view are set that may be ``None``, the need that asks for them, and on what else it depends."""
