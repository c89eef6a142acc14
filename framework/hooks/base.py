"""Base classes of hooks (observers, interventions, debug interventions) and the declaration of their memory."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from copy import deepcopy
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar, overload

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..errors import UsageError
from .alerts import Alert
from .commits import StatePart
from .contexts import BackwardContext, MetricInfo, MetricPanel, RunDataContext, RunInfo, metric_table
from .hook_points import EVERY_STEP, HookPoint, LoopPoints, StepSchedule
from .metrics import Metrics
from .taps import Tap

if TYPE_CHECKING:
    from .model_data_context import ModelDataContext

Value = TypeVar("Value")


class Remembered(Generic[Value]):
    """An attribute that belongs to the memory of a :class:`Remembering` object.

    It has its initial value at the first use, and again at the first use after a reset. The key in the saved state is
    the attribute's name without leading underscores.

    Args:
        initial: the initial value, which is copied, or a class or function that returns it: a tensor, a plain value,
            lists or dicts of them, or a :class:`Remembering` object. A function creates tensors when they are needed,
            so that an import of the class creates none on the caller's default device.
        by_options: ``initial`` takes the owner, because the value depends on the owner's options.
        saved: ``False`` excludes the attribute from the saved state, for values that do not outlive a step.
        merged: the value is a :class:`Remembering` object, and its entries are stored among the owner's entries.
    """

    @overload
    def __init__(
        self, initial: Callable[..., Value], *, by_options: bool = ..., saved: bool = ..., merged: bool = ...
    ) -> None: ...
    @overload
    def __init__(self, initial: Value, *, saved: bool = ...) -> None: ...
    def __init__(self, initial: Any, *, by_options: bool = False, saved: bool = True, merged: bool = False) -> None:
        self._initial = initial
        self._by_options = by_options
        self.saved = saved
        self.merged = merged

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self.key = name, name.lstrip("_")

    @overload
    def __get__(self, owner: None, kind: type) -> Self: ...
    @overload
    def __get__(self, owner: object, kind: type) -> Value: ...
    def __get__(self, owner: object | None, kind: type) -> Self | Value:
        """Return a fresh value, and store it on the owner, so that Python does not call this method again."""
        if owner is None:
            return self
        # The class defines no __set__, so an entry of the same name in the owner's __dict__ takes precedence over it.
        value = vars(owner)[self.name] = self.make(owner)
        return value

    def make(self, owner: object) -> Value:
        """Return a fresh value without changing the owner."""
        if not callable(self._initial):
            initial: Value = deepcopy(self._initial)
            return initial
        value: Value = self._initial(owner) if self._by_options else self._initial()
        return value


class Remembering:
    """An object with a memory: the attributes that its class declares as :class:`Remembered`.

    >>> class Extremes(Remembering):
    ...     largest = Remembered(float)
    ...     _names = Remembered(list[str])
    >>> extremes = Extremes()
    >>> extremes._names.append("loss")
    >>> extremes.state_dict()
    {'largest': 0.0, 'names': ['loss']}
    >>> extremes.reset()
    >>> extremes._names
    []
    """

    _remembered: ClassVar[tuple[Remembered[Any], ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        """Collect the declarations of the class and its bases."""
        super().__init_subclass__(**options)
        declared = {name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()}
        cls._remembered = tuple(value for value in declared.values() if isinstance(value, Remembered))
        keys = [entry.key for entry in cls._remembered]
        if duplicates := [key for key in keys if keys.count(key) > 1]:
            raise UsageError(f"{cls.__name__} remembers two attributes as {duplicates[0]!r}; rename one of them.")

    def state_dict(self) -> dict[str, Any]:
        """Return the saved memory: tensors and plain values, which can be read without executing code."""
        state: dict[str, Any] = {}
        for entry in self._saved():
            value = getattr(self, entry.name)
            saved = value.state_dict() if isinstance(value, Remembering) else _copied(value)
            state |= saved if entry.merged else {entry.key: saved}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`.

        Raises:
            UsageError: an entry is missing.
        """
        for entry in self._saved():
            if not entry.merged and entry.key not in state:
                raise UsageError(f"its state has no {entry.key!r}, so it was saved by another version")
            saved = state if entry.merged else state[entry.key]
            value = vars(self).get(entry.name)
            if not isinstance(value, Remembering):
                value = entry.make(self)
            if isinstance(value, Remembering):  # keeps its other attributes, such as the path of a file
                value.reset()
                value.load_state_dict(saved)
            else:
                value = _copied(saved)
            setattr(self, entry.name, value)

    def reset(self) -> None:
        """Discard all measurements; called between strategies."""
        for entry in self._remembered:
            vars(self).pop(entry.name, None)

    def _saved(self) -> list[Remembered[Any]]:
        return [entry for entry in self._remembered if entry.saved]


def _copied(value: Any) -> Any:
    """Copy lists and dicts, so that the memory and a saved state share none; tensors are shared."""
    leaves, containers = tree_flatten(value)
    return tree_unflatten(leaves, containers)


class TrainingHook(Remembering, ABC):
    """An observer: reads a frozen context and returns metrics; its other effects are undone or raise an error.

    Options are keyword-only, annotated arguments of ``__init__``; ``--hook-config name.option=value`` sets them. A hook
    declares its memory as :class:`Remembered` attributes, or defines ``state_dict``, ``load_state_dict`` and ``reset``.
    """

    name: ClassVar[str]
    hook_points: ClassVar[Set[HookPoint]] = frozenset()
    """Hook points, for both loops; a loop ignores points that it does not have. In the step loop, a hook with only
    points outside of steps is called at SNAPSHOT. ``loop_points`` takes precedence."""
    loop_points: ClassVar[LoopPoints | None] = None
    """Points by loop type (``"epoch"``, ``"step"``): a set, or a dict to ``(min_epoch, max_epoch)`` windows."""
    step_schedule: StepSchedule = EVERY_STEP
    point_schedules: Mapping[HookPoint, StepSchedule] = MappingProxyType({})
    """Schedules of single step-level points; ``step_schedule`` applies to the others."""
    has_fixed_schedule: ClassVar[bool] = False
    """The steps between two calls are part of what the hook measures, so that a budget leaves its schedule as it is."""
    loop_values: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Metrics of every step that are values of the loop (``loss``, ``step_lr``), by name; they are also recorded at
    steps at which a budget skips the hook."""
    needs_grads: ClassVar[bool] = False
    needs_prev_step_grads: ClassVar[bool] = False
    needs_step_series: ClassVar[bool] = False
    needs_step_replay: ClassVar[bool] = False
    """The hook repeats the pass of a step with its random numbers (:meth:`RunDataContext.replayed`)."""
    needs_pre_epoch_state: ClassVar[bool] = False
    needs_reference_weights: ClassVar[bool] = False
    """Without a reference solution the hook is dropped, or refused if it was requested by name."""
    needs_dense_gradients: ClassVar[bool] = False
    """Whether the hook cannot read sparse gradients, as of ``nn.Embedding(sparse=True)``; such models are refused."""
    needs_loss: ClassVar[bool] = False
    """The hook computes losses or gradients. Experiments fulfil this requirement and the next three; a custom training
    loop may not: it then drops the hook, or refuses it if it was requested by name."""
    needs_loader: ClassVar[bool] = False
    """The hook reads the training data itself."""
    needs_next_batch: ClassVar[bool] = False
    """The hook needs the complete batch of a step, as one object, before the first pass of that step."""
    needs_experiment_loop: ClassVar[bool] = False
    """The hook trains additional epochs, so the loop must be that of an experiment."""
    reports_evaluations: ClassVar[bool] = False
    """The hook is also called, as at SNAPSHOT, after an evaluation that neither POST_EPOCH nor SNAPSHOT follows."""
    uses_reference_weights: bool = False
    """The hook reports more if a reference solution exists."""
    debug: ClassVar[bool] = False
    in_health: ClassVar[bool] = False
    """The hook is in the group ``health``: cheap hooks that detect what goes wrong in any training."""
    is_finished: bool = False
    """Whether the training has shown what the hook was made for. A class that overrides this by a property ends a
    custom loop between two steps, with status 0, once it is true for all hooks with such a class."""
    always: ClassVar[bool] = False
    """The hook is active, and comes first, if any other hook or a sink that keeps metrics is active."""
    metrics: ClassVar[str] = ""
    """Table of every metric that ``compute`` or ``intervene`` can return, in the format of :func:`metric_table`."""
    panels: ClassVar[Sequence[MetricPanel]] = ()
    """Panels with the hook's metrics, for the pictures that options of ``loopscope plot`` draw."""

    @abstractmethod
    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return the metrics of one call: numbers, zero-dimensional tensors on any device, lists or dicts of them.

        The call runs without gradient tracking. An observer that needs autograd enters ``torch.enable_grad()``.
        """

    def describe_metrics(self) -> Sequence[MetricInfo]:
        """Return the descriptions in ``metrics``; override this method if the metrics depend on the hook's options."""
        return metric_table(self.metrics)

    @classmethod
    def file_names(cls, strategy: str) -> Sequence[str]:
        """Return the names of the files and folders that this hook may create in the run's folder."""
        return ()

    def start(self, run: RunInfo) -> None:
        """Prepare for a strategy, before its first step; raise :class:`UnsuitableError` for an unsuitable model."""

    def end(self, status: str) -> None:
        """Finish a strategy, after its last step; ``status`` as in :meth:`MetricSink.close`."""

    def table(self) -> Mapping[str, Mapping[str, float]]:
        """Return a table of final results, by row and column: shown at the end and stored in the summary."""
        return {}

    def is_urgent(self, metrics: Metrics) -> bool | Tensor:
        """Return whether :meth:`check` would return an alert for these metrics of a step-level point.

        The buffered metrics are then delivered at this step, not only at the end of the logging interval. A tensor
        on an accelerator is read at the next visit, so that the host does not wait for the device.
        """
        return False

    def check(self, values: Mapping[str, Any], step: int) -> Iterable[Alert] | None:
        """Check the metrics of one call, as host values, and return alerts about them."""

    def before_backward(self, ctx: BackwardContext) -> None:
        """Read the loss of a micro-batch, its autograd graph, or the gradients, right before the backward pass.

        A hook that defines this method keeps what it needs until its hook point of the step. It is called on the steps
        of ``step_schedule``, in the epochs in which the hook is called at any point, and at other steps for the first
        loss on the CPU that is NaN or infinite. It is not called in a loop that runs backward itself.

        The call runs like :meth:`compute`, but on all steps between a forward and a backward pass: do not differentiate
        the loss, whose graph the run still needs, and keep no reference to it, which would keep all activations alive.
        """

    def taps(self, model: nn.Module) -> Iterable[Tap]:
        """Return taps, which read or replace gradients during the backward pass, or count quantisations.

        Taps are called on the steps of ``step_schedule``, in the epochs in which the hook is called at any point.
        """
        return ()


class InterventionHook(TrainingHook):
    """A hook that also receives the model context: it may change the training state, and is rolled back afterwards.

    For lasting changes, the class declares the changed parts in ``commits``, and the hook calls the commit methods of
    the model context. A hook that only reads or commits declares ``mutates = False`` and causes no copy of the state.
    """

    intervention_points: ClassVar[Set[HookPoint] | None] = None
    """Points at which ``intervene`` is called; ``compute`` is called at the others. ``None``: all points."""
    mutates: ClassVar[bool] = True
    commits: ClassVar[Set[StatePart]] = frozenset()

    @abstractmethod
    def intervene(self, run_ctx: RunDataContext, model_ctx: "ModelDataContext") -> Metrics:
        """Experiment on the training state and return metrics."""

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return metrics at the points outside ``intervention_points``."""
        raise NotImplementedError(f"Hook {self.name!r} observes at {ctx.hook_point.name} but defines no compute().")

    def intervenes_at(self, point: HookPoint) -> bool:
        """Return whether ``intervene``, not ``compute``, is called at ``point``."""
        return self.intervention_points is None or point in self.intervention_points


class DebugInterventionHook(InterventionHook):
    """An intervention that validates other hooks: excluded from every group, enabled by name only."""

    debug: ClassVar[bool] = True


def treatments(hooks: Iterable[TrainingHook]) -> dict[str, tuple[str, ...]]:
    """Return the names of the committing hooks, each with the parts of the training state that it changes."""
    return {
        hook.name: tuple(sorted(part.value for part in hook.commits))
        for hook in hooks
        if isinstance(hook, InterventionHook) and hook.commits
    }
