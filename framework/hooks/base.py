"""The base classes of every feature: observers, interventions and debug interventions, and the memory they declare."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar, overload

from torch import nn
from torch.utils._pytree import tree_map

from ..errors import UsageError
from .commits import StatePart
from .contexts import MetricInfo, MetricPanel, RunDataContext, RunInfo, metric_table
from .hook_points import EVERY_STEP, HookPoint, LoopPoints, StepSchedule
from .metrics import Metrics
from .taps import Tap

if TYPE_CHECKING:
    from .model_data_context import ModelDataContext

Value = TypeVar("Value")


class Remembered(Generic[Value]):
    """An attribute that belongs to the memory of a :class:`Remembering` object.

    It begins as what ``fresh()`` returns, made at its first use, and so it begins again after a reset. In the saved
    state it stands under its name without leading underscores.

    Args:
        fresh: makes the value: a tensor, a plain value, lists or dicts of them, or a :class:`Remembering` object.
        by_options: ``fresh`` takes the owner, on whose options the value depends.
        saved: ``False`` leaves it out of the saved state; for what is used up within a step.
        merged: the value is a :class:`Remembering` object, and its entries stand beside the owner's own.
    """

    def __init__(
        self, fresh: Callable[..., Value], *, by_options: bool = False, saved: bool = True, merged: bool = False
    ) -> None:
        self._fresh = fresh
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
        """Return a fresh value and give it to the owner, where Python finds it from then on."""
        if owner is None:
            return self
        value = vars(owner)[self.name] = self.make(owner)
        return value

    def make(self, owner: object) -> Value:
        """Return a fresh value; the owner keeps the one it has."""
        return self._fresh(owner) if self._by_options else self._fresh()


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
        """Collect what the class and its bases declare."""
        super().__init_subclass__(**options)
        declared = {name: value for each in reversed(cls.__mro__) for name, value in vars(each).items()}
        cls._remembered = tuple(value for value in declared.values() if isinstance(value, Remembered))
        keys = [entry.key for entry in cls._remembered]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise UsageError(f"{cls.__name__} remembers two attributes as {twice[0]!r}; rename one of them.")

    def state_dict(self) -> dict[str, Any]:
        """Return what this object remembers: tensors and plain values, readable without executing code."""
        state: dict[str, Any] = {}
        for entry in self._saved():
            value = getattr(self, entry.name)
            kept = value.state_dict() if isinstance(value, Remembering) else _copied(value)
            state |= kept if entry.merged else {entry.key: kept}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what :meth:`state_dict` returned; raises :class:`UsageError` if a part of it is missing."""
        for entry in self._saved():
            if not entry.merged and entry.key not in state:
                raise UsageError(f"its state has no {entry.key!r}, so it is that of another version")
            kept = state if entry.merged else state[entry.key]
            value = entry.make(self)
            if isinstance(value, Remembering):
                value.load_state_dict(kept)
            else:
                value = _copied(kept)
            setattr(self, entry.name, value)

    def reset(self) -> None:
        """Forget everything measured so far; called between strategies."""
        for entry in self._remembered:
            vars(self).pop(entry.name, None)

    def _saved(self) -> list[Remembered[Any]]:
        return [entry for entry in self._remembered if entry.saved]


def _copied(value: Any) -> Any:
    """Copy lists and dicts, so that none is shared by the memory and a state; tensors are."""
    return tree_map(lambda leaf: leaf, value)


class TrainingHook(Remembering, ABC):
    """An observer: reads a frozen context and returns metrics; whatever else it does is undone or caught.

    Options are keyword-only, annotated arguments of ``__init__``; ``--hook-config name.option=value`` sets them. What
    the hook remembers are attributes declared as :class:`Remembered`; or it defines ``state_dict``,
    ``load_state_dict`` and ``reset`` itself.
    """

    name: ClassVar[str]
    hook_points: ClassVar[Set[HookPoint]] = frozenset()
    """Where the hook fires, in either loop as far as it has the point; ``loop_points`` takes precedence."""
    loop_points: ClassVar[LoopPoints | None] = None
    """Points by loop type (``"epoch"``, ``"step"``): a set, or a dict to ``(min_epoch, max_epoch)`` windows."""
    step_schedule: StepSchedule = EVERY_STEP
    point_schedules: Mapping[HookPoint, StepSchedule] = MappingProxyType({})
    """Schedules of single step-level points, where ``step_schedule`` is not meant for all of them."""
    needs_grads: ClassVar[bool] = False
    needs_prev_step_grads: ClassVar[bool] = False
    needs_step_series: ClassVar[bool] = False
    needs_pre_epoch_state: ClassVar[bool] = False
    needs_target_grad: ClassVar[bool] = False
    needs_reference_weights: ClassVar[bool] = False
    """Without a reference solution the hook is left out, or refused if it was asked for by name."""
    needs_loss: ClassVar[bool] = False
    """It computes losses or gradients of its own. What this and the next four ask for, experiments have; a loop of the
    user's own may lack it: the hook is then left out, or refused if it was asked for by name."""
    needs_loader: ClassVar[bool] = False
    """It reads the training data by itself."""
    needs_evaluation: ClassVar[bool] = False
    """It evaluates the model by itself."""
    needs_next_batch: ClassVar[bool] = False
    """It needs the whole batch of a step, as one, before the first pass of that step."""
    needs_own_loop: ClassVar[bool] = False
    """It trains epochs of its own, so that the loop must be one of an experiment."""
    uses_reference_weights: bool = False
    """The hook reports more if there is a reference solution."""
    debug: ClassVar[bool] = False
    always: ClassVar[bool] = False
    """The hook is on, and comes first, whenever any hook is on, or a sink that keeps metrics."""
    metrics: ClassVar[str] = ""
    """A table, as :func:`metric_table` reads it, of every metric that ``compute`` or ``intervene`` can return."""
    panels: ClassVar[Sequence[MetricPanel]] = ()
    """Its metrics that make a picture of their own, which ``loopscope plot`` draws by an option."""

    @abstractmethod
    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return this fire's metrics: numbers, zero-dimensional tensors on any device, lists or dicts of them.

        Runs without gradient tracking. An observer that needs autograd enters ``torch.enable_grad()`` itself.
        """

    def describe_metrics(self) -> Sequence[MetricInfo]:
        """List every metric of ``metrics``; a hook whose metrics depend on its options lists them itself instead."""
        return metric_table(self.metrics)

    @classmethod
    def leaves(cls, strategy: str) -> Sequence[str]:
        """Return the names of the files and folders that this hook may leave in the run's folder."""
        return ()

    def start(self, run: RunInfo) -> None:
        """Prepare for a strategy, before its first step; raise :class:`UnsuitableError` for a model of no use here."""

    def end(self, status: str) -> None:
        """Finish a strategy, after its last step; ``status`` as in :meth:`MetricSink.close`."""

    def table(self) -> Mapping[str, Mapping[str, float]]:
        """Return what the strategy came to, numbers by row and column; shown at its end and kept in its summary."""
        return {}

    def check(self, values: Mapping[str, Any], step: int) -> None:
        """Look at the host values of one fire, once they are there; the place for warnings by name and step."""

    def taps(self, model: nn.Module) -> Iterable[Tap]:
        """Declare the gradients this hook wants to see, or to replace, while they flow, and the quantisers to count.

        They are called on the steps of ``step_schedule``, in the epochs in which the hook fires anywhere.
        """
        return ()


class InterventionHook(TrainingHook):
    """A hook that also gets the model context: it may do anything to the training state, and is rolled back.

    What is to stay is declared in ``commits`` and asked for through the commit verbs of the model context. A hook that
    only reads or commits declares ``mutates = False`` and costs no copy of the state.
    """

    intervention_points: ClassVar[Set[HookPoint] | None] = None
    """Where ``intervene`` is called; elsewhere ``compute`` is. ``None``: everywhere."""
    mutates: ClassVar[bool] = True
    commits: ClassVar[Set[StatePart]] = frozenset()

    @abstractmethod
    def intervene(self, run_ctx: RunDataContext, model_ctx: "ModelDataContext") -> Metrics:
        """Experiment on the training state and return metrics."""

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return metrics at the points outside ``intervention_points``."""
        raise NotImplementedError(f"Hook {self.name!r} observes at {ctx.hook_point.name} but defines no compute().")

    def intervenes_at(self, point: HookPoint) -> bool:
        """Return whether ``intervene`` rather than ``compute`` is called at ``point``."""
        return self.intervention_points is None or point in self.intervention_points


class DebugInterventionHook(InterventionHook):
    """An intervention for validating other hooks: left out of every bulk selection, switched on by name."""

    debug: ClassVar[bool] = True


def treatments(hooks: Iterable[TrainingHook]) -> dict[str, tuple[str, ...]]:
    """Return the committing ones among hooks with what each of them changes."""
    return {
        hook.name: tuple(sorted(part.value for part in hook.commits))
        for hook in hooks
        if isinstance(hook, InterventionHook) and hook.commits
    }
