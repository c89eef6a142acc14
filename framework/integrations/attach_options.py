"""What somebody chooses of a run that is attached: hooks, sinks, folder, data; and what their loop cannot give."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..data import Batch, Loader, TorchLoader
from ..errors import LoopscopeError, UsageError, require, unknown
from ..hooks import (
    ENDLESS,
    KEYWORDS,
    ConfiguredHook,
    LoopType,
    MetricSink,
    SinkRegistry,
    StepSchedule,
    TrainingHook,
    always_on,
    build_hooks,
    hook_groups,
    refuse_idle_options,
    select_hooks,
)

Loss = Callable[[nn.Module, Batch], Tensor]
Wanted = str | type[TrainingHook] | TrainingHook
Shown = Literal["normal", "silent", "none"]
OnError = Literal["raise", "skip"]
LACKS = {
    "needs_own_loop": "give the training to an experiment, whose loop is loopscope's",
    "needs_loss": "give loss=function(model, batch), which returns what scope.backward is given",
    "needs_loader": "give loader=, the DataLoader of the training data",
    "needs_evaluation": "give evaluate=function(model), which returns named numbers",
}
"""What a loop may lack, by the need of a hook, and what to do about it."""


@dataclass(frozen=True, kw_only=True)
class AttachOptions:
    """What is chosen of an attached run, as :func:`.attach` describes it."""

    hooks: Sequence[Wanted] = ()
    with_hooks: str | None = None
    hook_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    schedules: Mapping[str, StepSchedule] = field(default_factory=dict)
    sinks: Sequence[str | MetricSink] = ("jsonl",)
    out: str | Path | None = None
    overwrite: bool = False
    loss: Loss | None = None
    loader: "Loader | DataLoader[Any] | None" = None
    evaluate: Callable[[nn.Module], dict[str, float]] | None = None
    loop: LoopType = "epoch"
    length: int | None = None
    log_every: int = 100
    snapshot_every: int | None = None
    seed: int = 0
    audit: bool = False
    on_hook_error: OnError = "raise"
    display: Shown = "normal"
    reference: str | Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise :class:`UsageError` for a value that cannot be meant."""
        for name in ("hooks", "sinks"):
            value = getattr(self, name)
            listed = isinstance(value, (list, tuple))
            require(listed, f"{name} is {value!r}; it is a list: {name}=[{value!r}].")
        words = {"loop": LoopType, "on_hook_error": OnError, "display": Shown}
        for name, known in words.items():
            if getattr(self, name) not in get_args(known):
                raise unknown(f"value of {name}:", str(getattr(self, name)), get_args(known))
        counts = {"log_every": self.log_every, "snapshot_every": self.snapshot_every, "length": self.length}
        for name, count in counts.items():
            fits = count is None or (type(count) is int and count >= 1)
            require(fits, f"{name} is {count!r}; it must be an integer of at least 1.")
        for name in ("loss", "evaluate"):
            value = getattr(self, name)
            callable_ = value is None or callable(value)
            require(callable_, f"{name} is a {type(value).__name__}; it must be a function.")
        known_loader = self.loader is None or isinstance(self.loader, (Loader, DataLoader))
        kind = type(self.loader).__name__
        require(known_loader, f"loader is a {kind}; it must be a DataLoader of torch, or a loader of loopscope.")

    @property
    def due_every(self) -> int:
        """How often SNAPSHOT fires: in epochs of the epoch loop, in steps of the step loop."""
        return self.snapshot_every or (1 if self.loop == "epoch" else 1_000)

    def is_due(self, count: int) -> bool:
        """Return whether SNAPSHOT fires after so many epochs, or steps: always at the end, if that is known."""
        return count % self.due_every == 0 or count == self.length

    def lacks(self, **more: str) -> dict[str, str]:
        """Return what these choices leave a loop without, with what to do about it."""
        given = {"needs_loss": self.loss, "needs_loader": self.loader, "needs_evaluation": self.evaluate}
        return {need: remedy for need, remedy in (LACKS | more).items() if given.get(need) is None}

    def wanted(self) -> tuple[list[ConfiguredHook], set[str], dict[str, str]]:
        """Make the hooks.

        Return them, the names of those that were asked for one by one, and why others could not be made, by name.
        """
        named = [item for item in self.hooks if isinstance(item, str)]
        own = [item for item in self.hooks if not isinstance(item, (str, TrainingHook))]
        made = [item for item in self.hooks if isinstance(item, TrainingHook)]
        given = [hook.name for hook in made]
        made += [item.hook for item in build_hooks(own, self.hook_options, {}, [])]
        if twice := [hook.name for hook in made if hook.name in named]:
            raise UsageError(f"Hook {twice[0]!r} is given by name, and as a class or an object; leave one of them out.")
        if idle := [name for name in given if name in self.hook_options]:
            raise UsageError(f"Options are given for hook {idle[0]!r}, which is an object; give them as it is made.")
        keeping = any(sink.keeps for sink in self.made_sinks())
        names = select_hooks(self.with_hooks, named, hook_groups(), "attach")
        names = names or (always_on() if made or keeping else [])
        names = [name for name in names if name not in {hook.name for hook in made}]
        refuse_idle_options(self.hook_options, {*names, *(hook.name for hook in made)})
        required, left_out = {*given, *named, *(hook.name for hook in made)}, dict[str, str]()
        found = build_hooks(names, self.hook_options, {}, [], required=required, left_out=left_out)
        found += [ConfiguredHook(hook, {}) for hook in made]
        named_at = {item if isinstance(item, str) else item.name: place for place, item in enumerate(self.hooks)}
        found.sort(key=lambda item: named_at.get(item.hook.name, -1))  # several commit in this order
        for name, schedule in self.schedules.items():
            scheduled = [item.hook for item in found if item.hook.name == name]
            if not scheduled and name not in left_out:
                raise unknown("hook of schedules:", name, [item.hook.name for item in found])
            for hook in scheduled:
                hook.step_schedule = schedule
        return found, {hook.name for hook in made} | {name for name in named if name not in KEYWORDS}, left_out

    def made_sinks(self) -> list[MetricSink]:
        """Return the sinks: by name new ones."""
        found: list[MetricSink] = []
        for item in self.sinks:
            if isinstance(item, MetricSink):
                found.append(item)
            else:
                sink = SinkRegistry.get(item)
                sink.check_installed()
                made = f"sinks=[{sink.__name__}({sink.option}=...)]"
                require(sink.option is None, f"The sink {item!r} needs {sink.option}=; give it as an object: {made}.")
                found.append(sink())
        return found


class GivenLoader(Loader):
    """The training data of a loop of somebody's own, as far as hooks were given it, and the length of its epochs."""

    def __init__(self, given: "Loader | DataLoader[Any] | None", seed: int) -> None:
        self._given = TorchLoader(given, seed) if isinstance(given, DataLoader) else given
        self.steps: int | None = None
        """Optimizer steps of an epoch, once they are known."""

    @property
    def _loader(self) -> Loader:
        if self._given is None:
            raise LoopscopeError(f"This loop has not told where its data come from; {LACKS['needs_loader']}.")
        return self._given

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of the loader that was given, in its own order of ``epoch``."""
        return self._loader.batches(epoch, start)

    def __len__(self) -> int:
        """Return the steps of an epoch, or that nobody knows."""
        return self.steps or (ENDLESS if self._given is None else len(self._given))

    def shuffled(self, seed: int) -> Loader:
        """Return the same data in another order."""
        return self._loader.shuffled(seed)

    def drawn(self, seed: int) -> Loader:
        """Return the same data in the order of ``seed`` alone."""
        return self._loader.drawn(seed)

    def generators(self) -> tuple[torch.Generator, ...]:
        """Return the random generators of the loader."""
        return () if self._given is None else self._given.generators()

    @property
    def copies(self) -> bool:
        """Whether every batch lies in memory of its own."""
        return self._given is None or self._given.copies


def no_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Stand for the loss of a loop that has told none."""
    raise LoopscopeError(f"This loop has told no loss; {LACKS['needs_loss']}.")


def steps_in(loader: Any, accumulate: int) -> int | None:
    """Return the steps of a pass over a loader of micro-batches; ``None`` for one that does not know its length."""
    try:
        return -(-len(loader) // accumulate)
    except TypeError:  # a generator, or a DataLoader of a stream
        return None
