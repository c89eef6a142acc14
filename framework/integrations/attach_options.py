"""Options of an attached run, and the parts of training that its loop does not provide."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from operator import index
from pathlib import Path
from typing import Any, Literal, TypedDict, get_type_hints

import torch
from torch import Tensor, nn

from ..data import Batch, Loader
from ..errors import LoopscopeError, UsageError, require, unknown
from ..hooks import ENDLESS, LoopType, MetricSink, StepSchedule, TrainingHook
from ..hooks.selection import (
    KEYWORDS,
    ConfiguredHook,
    always_on,
    build_hooks,
    create_sinks,
    hook_groups,
    refuse_idle_options,
    select_hooks,
)
from ..names import as_names
from ..runs import RunSettings, describe_type, fits, union_members
from .argument_checks import check_function, check_hooks, check_tables
from .epoch_plan import EpochPlan
from .given_data import EndlessLoader, GivenData, as_loader, check_given, length_of

Loss = Callable[[nn.Module, Batch], Tensor]
HookGroup = Literal["none", "minimal", "health", "observers", "interventions", "full"]
HookChoice = str | type[TrainingHook] | TrainingHook
DisplayMode = Literal["brief", "normal", "verbose", "silent", "none"]
StopOn = Literal["critical", "nonfinite"]
PLAIN = frozenset({bool, int, str, Path, type(None)})
"""Types of options that are checked against their annotation."""
FIRST_DIGESTS = (1, 10, 100)
"""Early steps with a digest of the state, at which another training shows first; each costs little."""
NO_BATCH = object()
MISSING_PARTS = {
    "needs_experiment_loop": "train in an experiment of loopscope",
    "needs_loss": "give loss=function(model, batch), which returns the argument of scope.backward",
    "needs_loader": "give loader=, the DataLoader of the training data",
}
"""Parts that a loop may lack, by the need of a hook, with advice."""


class AttachArguments(TypedDict, total=False):
    """The keyword arguments that :func:`.attach` takes for a model and for a Trainer, for type checkers and editors.

    Their defaults and meanings are those of :func:`.attach`.
    """

    hooks: Sequence[HookChoice] | None
    with_hooks: HookGroup | None
    hook_options: Mapping[str, Mapping[str, Any]] | None
    schedules: Mapping[str, StepSchedule] | None
    loss: Loss | None
    loader: "GivenData | None"
    evaluate: Callable[[nn.Module], dict[str, float]] | None
    also: Mapping[str, nn.Module] | None
    out: str | Path | None
    overwrite: bool
    sinks: Sequence[str | MetricSink]
    loop: LoopType | None
    length: int | None
    log_every: int
    snapshot_every: int | None
    digest_every: int | None
    seed: int
    audit: bool
    check_every_call: bool
    on_hook_error: Literal["raise", "skip", "auto"]
    profile_hooks: bool
    guardian_device: str | None
    hook_offload_state: bool
    display: DisplayMode
    stop_after: int | None
    stop_on: StopOn | None
    reference: str | Path | None
    config: Mapping[str, Any] | None
    isolate_evaluation: bool
    budget: float | str | Path | None
    compiled: Literal["safe", "all"]


@dataclass(frozen=True, kw_only=True)
class AttachOptions(RunSettings):
    """The settings of every run, and further options of an attached one; :func:`.attach` describes them."""

    on_hook_error: Literal["raise", "skip", "auto"] = "auto"
    hooks: Sequence[HookChoice] = ()
    hook_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    schedules: Mapping[str, StepSchedule] = field(default_factory=dict)
    sinks: Sequence[str | MetricSink] = ("jsonl",)
    out: str | Path | None = None
    loss: Loss | None = None
    loader: "GivenData | None" = None
    evaluate: Callable[[nn.Module], dict[str, float]] | None = None
    also: Mapping[str, nn.Module] = field(default_factory=dict)
    loop: LoopType | None = None
    """``None`` for epochs, and for steps in a loop that reports no batches."""
    length: int | None = None
    log_every: int = 100
    snapshot_every: int | None = None
    digest_every: int | None = None
    seed: int = 0
    display: DisplayMode = "brief"
    stop_after: int | None = None
    stop_on: StopOn | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    isolate_evaluation: bool = True

    def __post_init__(self) -> None:
        """Raise :class:`UsageError` for an invalid value."""
        super().__post_init__()
        for name, annotation in get_type_hints(type(self)).items():
            value = getattr(self, name)
            with suppress(TypeError):  # NumPy's integers, and tensors of one
                value = value if isinstance(value, bool) else index(value)
            if PLAIN.issuperset(union_members(annotation)) and not fits(value, annotation):
                argument = "audit" if name == "audit_hooks" else name
                raise UsageError(f"{argument} is {value!r}; it must be {describe_type(annotation)}.")
        for name in ("hooks", "sinks"):
            value = getattr(self, name)
            is_list = isinstance(value, (list, tuple, str))
            require(is_list, f"{name} is {value!r}; it must be a list: {name}=[{value!r}].")
            object.__setattr__(self, name, as_names(value))
        check_hooks(self.hooks)
        check_tables(self.hook_options, self.schedules)
        kind, is_table = type(self.config).__name__, isinstance(self.config, Mapping)
        require(is_table, f'config is a {kind}; it must be a dict of plain values: {{"name": value}}.')
        counts = {name: getattr(self, name) for name in ("log_every", "snapshot_every", "length", "stop_after")}
        for name, count in counts.items():
            require(count is None or count >= 1, f"{name} is {count!r}; it must be an integer of at least 1.")
        every = self.digest_every
        require(every is None or every >= 0, f"digest_every is {every!r}; it must be a number of steps, or 0 for none.")
        check_function("loss", self.loss, ("model", "batch"))
        check_function("evaluate", self.evaluate, ("model",))
        is_mapping = isinstance(self.also, Mapping)
        require(is_mapping, f'also is a {type(self.also).__name__}; it must be a dict of modules: {{"name": module}}.')
        check_given(self.loader)

    @property
    def snapshot_interval(self) -> int:
        """The interval of SNAPSHOT, in epochs (step loop: steps)."""
        return self.snapshot_every or (1_000 if self.loop == "step" else 1)

    def is_due(self, count: int) -> bool:
        """Return whether SNAPSHOT fires after ``count`` epochs (step loop: steps); it always does at a known end."""
        return count % self.snapshot_interval == 0 or count == self.length

    def is_digest_due(self, step: int) -> bool:
        """Return whether a digest of the state follows a step; without an interval, SNAPSHOT has further ones."""
        every = self.digest_every
        return step in FIRST_DIGESTS if every is None else bool(every) and step % every == 0

    def next_work(self, step: int) -> int:
        """Return the first step, from this one on, that a digest, SNAPSHOT or a delivery of metrics may follow."""
        snapshots = self.snapshot_interval if self.loop == "step" else None
        intervals = [every for every in (self.log_every, self.digest_every, snapshots) if every]
        single = [at for at in (*FIRST_DIGESTS, self.length) if at is not None and at >= step]
        return min([-(-step // every) * every for every in intervals] + single)

    def lacks(self, **more: str) -> dict[str, str]:
        """Return the parts that the loop lacks with these options, by the need of a hook, with advice."""
        given = {"needs_loss": self.loss, "needs_loader": self.loader}
        return {need: advice for need, advice in (MISSING_PARTS | more).items() if given.get(need) is None}

    def create_hooks(self) -> tuple[list[ConfiguredHook], set[str], dict[str, str]]:
        """Create the hooks.

        Returns:
            The hooks, the names of those that were requested individually, and the hooks of a group that could not be
            created, by name, with the reasons.
        """
        named = [item for item in self.hooks if isinstance(item, str)]
        classes = [item for item in self.hooks if not isinstance(item, (str, TrainingHook))]
        objects = [item for item in self.hooks if isinstance(item, TrainingHook)]
        given = [hook.name for hook in objects]
        objects += [item.hook for item in build_hooks(classes, self.hook_options, {}, [])]
        if twice := [hook.name for hook in objects if hook.name in named]:
            raise UsageError(f"Hook {twice[0]!r} is given by name, and as a class or an object; leave one of them out.")
        if idle := [name for name in given if name in self.hook_options]:
            raise UsageError(f"Options are given for hook {idle[0]!r}, which is an object; pass them to its class.")
        is_recorded = any(sink.keeps for sink in self.create_sinks())
        names = select_hooks(self.with_hooks, named, hook_groups(), "")
        names = names or (always_on() if objects or is_recorded else [])
        names = [name for name in names if name not in {hook.name for hook in objects}]
        refuse_idle_options(self.hook_options, {*names, *(hook.name for hook in objects)})
        required, left_out = {*given, *named, *(hook.name for hook in objects)}, dict[str, str]()
        hooks = build_hooks(names, self.hook_options, {}, [], required=required, left_out=left_out)
        hooks += [ConfiguredHook(hook, {}) for hook in objects]
        positions = {item if isinstance(item, str) else item.name: place for place, item in enumerate(self.hooks)}
        hooks.sort(key=lambda item: positions.get(item.hook.name, -1))  # committing hooks act in this order
        for name, schedule in self.schedules.items():
            scheduled = [item.hook for item in hooks if item.hook.name == name]
            if not scheduled and name not in left_out:
                raise unknown("hook of schedules:", name, [item.hook.name for item in hooks])
            for hook in scheduled:
                hook.step_schedule = schedule
        return hooks, {hook.name for hook in objects} | {name for name in named if name not in KEYWORDS}, left_out

    def create_sinks(self) -> list[MetricSink]:
        """Return the sinks; each call creates new ones for those given by name."""
        return create_sinks(self.sinks)


class OptionalLoader(Loader):
    """The training data of a custom loop, if ``loader=`` was given, and the length of its epochs."""

    def __init__(self, given: "GivenData | None", seed: int) -> None:
        self._given = as_loader(given, seed)
        self.plan = EpochPlan()

    @property
    def _loader(self) -> Loader:
        if self._given is None:
            raise LoopscopeError(f"The training data of this loop are unknown; {MISSING_PARTS['needs_loader']}.")
        return self._given

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of the given loader, in its order for ``epoch``.

        Raises:
            UsageError: if it has none.
        """
        batches, steps = self._loader.batches(epoch, start), self.plan.steps
        if isinstance(self._given, EndlessLoader) and steps is not None:  # an epoch has the length of the loop's
            batches = islice(batches, max(steps - start, 0))
        first = next(batches, NO_BATCH)
        require(start > 0 or first is not NO_BATCH, "loader= has no batches; give the data of the training.")
        if first is not NO_BATCH:
            yield first
        yield from batches

    def __len__(self) -> int:
        """Return the steps per epoch, or ``ENDLESS`` if they are unknown."""
        return self.plan.steps or (ENDLESS if self._given is None else len(self._given))

    def steps_until(self, epoch: int) -> int:
        """Return the planned number of steps before ``epoch`` starts."""
        return self.plan.steps_until(epoch)

    def shuffled(self, seed: int) -> Loader:
        """Return the same data in another order."""
        return self._loader.shuffled(seed)

    def drawn(self, seed: int) -> Loader:
        """Return the same data in an order that depends on ``seed`` alone."""
        return self._loader.drawn(seed)

    def generators(self) -> tuple[torch.Generator, ...]:
        """Return the random generators of the loader."""
        return () if self._given is None else self._given.generators()

    @property
    def copies(self) -> bool:
        """Whether every batch has separate memory."""
        return self._given is None or self._given.copies


def missing_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Raise :class:`LoopscopeError` in place of a loss function that was not given."""
    raise LoopscopeError(f"The loss function of this loop is unknown; {MISSING_PARTS['needs_loss']}.")


def steps_in(loader: Any, accumulate: int) -> int | None:
    """Return the steps of a pass over a loader of micro-batches, or ``None`` if the loader has no length."""
    length = length_of(loader)
    return None if length is None else -(-length // accumulate)
