"""What a training step costs more than the same step written bare: without hooks, with observers, with clipping."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from statistics import median

from framework.data import Batch, Loader
from framework.hooks import TrainingHook
from framework.loops import epoch_loop
from framework.manager import HookManager
from framework.training_state import LoopState
from tests.benchmarks.rows import MICROSECONDS, PERCENT, Effort, Row
from tests.benchmarks.subjects import Subject, bare_steps, mod_arithmetic, observers, small_mlp
from tests.benchmarks.timing import Spread, clock
from training_hooks.grad_clip import GradClip

MAX_NORM = 1.0


class Alternating(Loader):
    """Gives a loop its batches and takes one step of another loop before each, both timed: A B A B on one model."""

    def __init__(self, loader: Loader, other: Iterator[None]) -> None:
        self._loader = loader
        self._other = other
        self.pairs: list[list[tuple[float, float]]] = []
        """For each epoch, for each step, the seconds of the other loop and of this one."""
        self.left = 0.0
        """When the loop was told that its epoch has no more batches."""

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        batches = self._loader.batches(epoch, start)
        pairs: list[tuple[float, float]] = []
        self.pairs.append(pairs)
        while True:
            begin = clock()
            next(self._other)
            middle = clock()
            batch = next(batches, None)
            if batch is None:
                self.left = clock()
                return
            yield batch
            pairs.append((middle - begin, clock() - middle))

    def __len__(self) -> int:
        return len(self._loader)

    def shuffled(self, seed: int) -> Loader:
        return self._loader.shuffled(seed)


class Comparison:
    """One loop with hooks against one written bare; a block is one epoch, its value the median over its steps."""

    def __init__(
        self, subject: Subject, hooks: Iterable[TrainingHook], epochs: int, max_norm: float | None = None
    ) -> None:
        loader = Alternating(subject.task.loader, bare_steps(subject, max_norm))
        task = replace(subject.task, loader=loader)
        manager = HookManager(hooks, task, replace(subject.state, loop=LoopState()))
        epoch_ends = []
        for task.length in range(1, epochs + 2):
            epoch_loop(task, manager)
            epoch_ends.append((clock() - loader.left) / len(loader))
        self._epoch_end = median(epoch_ends[1:])
        self._blocks = loader.pairs[1:]
        self.step = median(bare for block in self._blocks for bare, _ in block)
        """Seconds of a bare step."""

    @property
    def extra(self) -> Spread:
        """Seconds a step takes longer, with its share of what the loop does at the end of an epoch."""
        values = [median(ours - bare for bare, ours in block) for block in self._blocks]
        bare, ours = ([median(pair[loop] for pair in block) for block in self._blocks] for loop in (0, 1))
        return Spread.of(values, min(ours) - min(bare)).plus(self._epoch_end)

    @property
    def share(self) -> Spread:
        """The same as a fraction of a bare step."""
        extra = self.extra
        return Spread(extra.median / self.step, extra.best / self.step, extra.noise / self.step)

    def against(self, what: str) -> str:
        """Say what the loop was compared with."""
        return f"{what}, {self.step * 1e3:.2f} ms"


def loop_cost(effort: Effort) -> Iterator[Row]:
    """Measure the loop without hooks, on a small and on the quick preset's model."""
    small = Comparison(small_mlp(), (), effort.times(60))
    yield Row("Step without hooks, small MLP", small.against("bare loop"), MICROSECONDS, small.extra, 10e-6)
    quick = Comparison(mod_arithmetic(effort.quick), (), effort.times(20))
    yield Row("Step without hooks, quick preset", quick.against("bare loop"), PERCENT, quick.share, 0.01)
    yield Row("Step without hooks, quick preset, in µs", quick.against("bare loop"), MICROSECONDS, quick.extra, 10e-6)


def observers_in_the_loop(effort: Effort) -> Iterator[Row]:
    """Measure observers at POST_STEP of every step, in the loop."""
    subject = mod_arithmetic(effort.quick)
    for count, label, bar in ((1, "One observer", 0.01), (10, "Ten observers", 0.04)):
        compared = Comparison(subject, observers(count), effort.times(8))
        yield Row(f"{label} in the loop, quick preset", compared.against("bare loop"), PERCENT, compared.share, bar)


def clipping(effort: Effort) -> Iterator[Row]:
    """Measure the hook grad_clip against torch's function in the bare loop."""
    hooks = [GradClip(max_norm=MAX_NORM)]
    compared = Comparison(mod_arithmetic(effort.quick), hooks, effort.times(8), MAX_NORM)
    against = compared.against("bare loop with clip_grad_norm_")
    yield Row("grad_clip every step, quick preset", against, PERCENT, compared.share, 0.01)
