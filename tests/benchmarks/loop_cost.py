"""Extra costs of a training step over the same bare step: without hooks, with observers, with clipping."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from statistics import median
from typing import Any, NamedTuple

from loopscope.data import Batch, Loader
from loopscope.engine import HookManager
from loopscope.hooks import TrainingHook
from loopscope.loops import epoch_loop
from loopscope.state import LoopState
from loopscope.training_hooks.clipping import GradClip
from torch import Tensor

from tests.benchmarks.rows import MICROSECONDS, PERCENT, TIMES, Effort, Row
from tests.benchmarks.subjects import (
    Subject,
    bare_steps,
    mod_arithmetic,
    observers,
    shipped_observers,
    small_mlp,
    sweep,
)
from tests.benchmarks.timing import Spread, clock

MAX_NORM = 1.0


@dataclass
class HeavyWork:
    """Sums the time inside zero_grad, forward, backward and update; the remainder of a step is the loop's own time."""

    seconds: float = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper that adds the function's time to the sum."""

        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            begin = clock()
            result = function(*args, **options)
            self.seconds += clock() - begin
            return result

        return call

    @contextmanager
    def of(self, subject: Subject) -> Iterator[None]:
        """Time the work on one model while the body runs."""
        model, optimizer = subject.task.model, subject.task.optimizer
        backward = Tensor.backward
        owners = [(vars(model), {"forward": model.forward})]
        owners += [(vars(optimizer), {"zero_grad": optimizer.zero_grad, "step": optimizer.step})]
        before = [dict(namespace) for namespace, _ in owners]
        for namespace, functions in owners:
            namespace.update({name: self.timed(function) for name, function in functions.items()})
        Tensor.backward = self.timed(backward)
        try:
            yield
        finally:
            Tensor.backward = backward
            for (namespace, functions), saved in zip(owners, before, strict=True):
                for name in functions:
                    del namespace[name]
                namespace.update({name: saved[name] for name in functions if name in saved})


class TwoSweeps:
    """Reads the training state twice, as a check for mutations must, and records the time."""

    def __init__(self, subject: Subject) -> None:
        self._tensors = subject.tensors
        self.seconds: list[float] = []
        self.total = 0.0

    def __call__(self) -> None:
        begin = clock()
        sweep(self._tensors)
        sweep(self._tensors)
        self.seconds.append(clock() - begin)
        self.total += self.seconds[-1]


class Step(NamedTuple):
    """The seconds of one step, and the loop's own share of them."""

    total: float
    own: float


class Alternating(Loader):
    """A loader that takes one step of another loop before each batch and times both: A B A B on one model."""

    def __init__(self, loader: Loader, other: Iterator[None], work: HeavyWork, sweeps: TwoSweeps | None = None) -> None:
        self._loader = loader
        self._other = other
        self._work, self._sweeps = work, sweeps
        self.pairs: list[list[tuple[Step, Step]]] = []
        """The times of the other loop's step and of this loop's step, by epoch and step."""
        self.left = 0.0
        """The time at which the loop reached the end of the epoch's batches."""

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        batches = self._loader.batches(epoch, start)
        pairs: list[tuple[Step, Step]] = []
        self.pairs.append(pairs)
        while True:
            begin = self.now()
            next(self._other)
            middle = self.now()
            batch = next(batches, None)
            if batch is None:
                self.left = middle[0]
                return
            yield batch
            end = self.now()
            pairs.append((_step(begin, middle), _step(middle, end)))

    def now(self) -> tuple[float, float]:
        """Return the seconds so far without the sweeps, and the seconds of the heavy work among them."""
        sweep_seconds = 0.0 if self._sweeps is None else self._sweeps.total
        return clock() - sweep_seconds, self._work.seconds

    def __len__(self) -> int:
        return len(self._loader)

    def shuffled(self, seed: int) -> Loader:
        return self._loader.shuffled(seed)


def _step(begin: tuple[float, float], end: tuple[float, float]) -> Step:
    total, heavy = end[0] - begin[0], end[1] - begin[1]
    return Step(total, total - heavy)


class Comparison:
    """Comparison of a loop with hooks with a bare one; a block is one epoch, its value the median over its steps."""

    def __init__(
        self, subject: Subject, hooks: Iterable[TrainingHook], epochs: int, max_norm: float | None = None
    ) -> None:
        subject.train(1, lambda: None)  # otherwise the optimizer has no state to read yet
        work, sweeps = HeavyWork(), TwoSweeps(subject)
        loader = Alternating(subject.task.loader, bare_steps(subject, max_norm, sweeps), work, sweeps)
        task = replace(subject.task, loader=loader)
        manager = HookManager(hooks, task, replace(subject.state, loop=LoopState()))
        epoch_ends = []
        with work.of(subject):
            for task.length in range(1, epochs + 2):
                epoch_loop(task, manager)
                epoch_ends.append((loader.now()[0] - loader.left) / len(loader))
        self._epoch_end = median(epoch_ends[1:])
        self._epochs = loader.pairs[1:]
        self.step = median(bare.total for pairs in self._epochs for bare, _ in pairs)
        """Seconds of a bare step, without the sweeps."""
        self.unit = median(sweeps.seconds)

    def _extra(self, part: Callable[[Step], float]) -> Spread:
        """Summarise the extra seconds of a step, including its share of the end of an epoch."""
        epochs = [[(part(bare), part(ours)) for bare, ours in pairs] for pairs in self._epochs]
        values = [median(ours - bare for bare, ours in pairs) for pairs in epochs]
        bare, ours = ([median(pair[loop] for pair in pairs) for pairs in epochs] for loop in (0, 1))
        return Spread.of(values, min(ours) - min(bare)).plus(self._epoch_end)

    def share(self, figure: str, against: str, bar: float) -> Row:
        """Return the row of a step's extra time, as a fraction of a bare step."""
        extra = self._extra(lambda step: step.total)
        share = Spread(*(seconds / self.step for seconds in (extra.median, extra.best, extra.noise)))
        return Row(figure, self._against(against), PERCENT, share, bar)

    def total(self, figure: str, against: str, bar: float | None = None) -> Row:
        """Return the row of a step's extra time."""
        return Row(figure, self._against(against), MICROSECONDS, self._extra(lambda step: step.total), bar)

    def own(self, figure: str, against: str, bar: float | None = None) -> Row:
        """Return the row of a step's extra time outside forward, backward, zero_grad and update."""
        figure = f"{figure}, own time"
        return Row(figure, self._against(against), MICROSECONDS, self._extra(lambda step: step.own), bar)

    def in_sweeps(self, figure: str, bar: float) -> Row:
        """Return the row of the same time, in units of two plain sweeps at the same position of the bare step."""
        own = self._extra(lambda step: step.own)
        units = Spread(*(seconds / self.unit for seconds in (own.median, own.best, own.noise)))
        return Row(f"{figure}, own time", f"two plain sweeps of the state, {self.unit * 1e6:.0f} µs", TIMES, units, bar)

    def _against(self, what: str) -> str:
        return f"{what}, {self.step * 1e3:.2f} ms"


def loop_cost(effort: Effort) -> Iterator[Row]:
    """Measure the loop without hooks, on a small and on the quick preset's model."""
    small = Comparison(small_mlp(), (), effort.times(60))
    yield small.total("Step without hooks, small MLP", "bare loop", 10e-6)
    quick = Comparison(mod_arithmetic(effort.quick), (), effort.times(15))
    yield quick.own("Step without hooks, quick preset", "bare loop", 20e-6)
    yield quick.share("Step without hooks, quick preset", "bare loop", 0.01)


def observers_in_the_loop(effort: Effort) -> Iterator[Row]:
    """Measure observers at POST_STEP of every step, in the loop."""
    subject = mod_arithmetic(effort.quick)
    for hooks, label, bar in (
        (observers(1), "One observer", 2),
        (observers(10), "Ten observers", 4),
        (shipped_observers(10), "Ten shipped observers", 6),
    ):
        compared = Comparison(subject, hooks, effort.times(10))
        yield compared.in_sweeps(f"{label} in the loop", bar)
        yield compared.own(f"{label} in the loop", "bare loop, quick preset")


def clipping(effort: Effort) -> Iterator[Row]:
    """Measure the hook grad_clip against torch's function in the bare loop."""
    hooks = [GradClip(max_norm=MAX_NORM)]
    compared = Comparison(mod_arithmetic(effort.quick), hooks, effort.times(10), MAX_NORM)
    against = "bare loop with clip_grad_norm_, quick preset"
    yield compared.in_sweeps("grad_clip every step", 2)
    yield compared.own("grad_clip every step", against)
