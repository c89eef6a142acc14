"""GPU benchmarks: steps a second, copies relative to memory bandwidth, hooks with compiled steps."""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from loopscope.checkpoints import Checkpointing, CheckpointPlan, CheckpointWriter, Signals
from loopscope.engine import HookManager
from loopscope.errors import RunNotice
from loopscope.experiments.mod_arithmetic import ModArithmeticRunner
from loopscope.experiments.mod_arithmetic.runner import ModArithmeticConfig
from loopscope.hooks import TrainingHook
from loopscope.isolation import StateCopy
from loopscope.loops import epoch_loop
from loopscope.runs import build_run
from torch.nn import functional

from tests.benchmarks.guardian_cost import PlainCopy
from tests.benchmarks.rows import MICROSECONDS, PER_SECOND, TIMES, Effort, Row
from tests.benchmarks.subjects import Subject, observers
from tests.benchmarks.timing import Spread, Turns, difference, ratio

PREDECESSOR = "3,174 steps a second of its predecessor on an RTX 4090"
MODES: Mapping[str, str | None] = {
    "eager": None,
    "torch.compile": "default",
    "torch.compile with CUDA graphs": "reduce-overhead",
}
STEPS, WARM_UP = 200, 3


def on_a_gpu(effort: Effort) -> Iterator[Row]:
    """Measure on the GPU, if there is one."""
    if torch.cuda.is_available():
        yield from on_device(torch.device("cuda"), effort, MODES)


def on_device(device: torch.device, effort: Effort, modes: Mapping[str, str | None]) -> Iterator[Row]:
    """Measure everything on one device, and the costs of hooks in several modes of compilation."""
    yield from speed(device, effort)
    yield from guardian(device, effort)
    yield from checkpoint(device, effort)
    for name, mode in modes.items():
        yield from hooks_with_compilation(device, effort, name, mode)


def paper(device: torch.device, effort: Effort) -> Subject:
    """Build the paper preset's run on a device, with data for one epoch of a few steps."""
    batch = ModArithmeticConfig().batch_size if effort.share > 0 else effort.paper["batch_size"]
    rows = {"train_size": effort.times(STEPS) * batch, "batch_size": batch}
    config = ModArithmeticConfig(**effort.paper | rows)
    task, state = build_run(ModArithmeticRunner(config, device), "stride")
    return Subject.of(task, state, config.batch_size)


def settled(device: torch.device) -> None:
    """Wait until a device has completed its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def epochs(subject: Subject, hooks: Sequence[TrainingHook], device: torch.device) -> Callable[[], None]:
    """Return a function that trains an epoch in the real loop, to its end on the device."""
    manager = HookManager(hooks, subject.task, subject.state)

    def train() -> None:
        subject.task.length = subject.state.loop.epoch + 1
        epoch_loop(subject.task, manager)
        settled(device)

    return train


def bare_epochs(subject: Subject, device: torch.device) -> Callable[[], None]:
    """Return a function that trains an epoch in a hand-written loop, to its end on the device."""
    model, optimizer = subject.task.model, subject.task.optimizer
    pairs = list(zip(*(part.split(subject.batch_size) for part in (subject.inputs, subject.targets)), strict=True))

    def train() -> None:
        for inputs, targets in pairs:
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        settled(device)

    return train


def in_turns(functions: Sequence[Callable[[], None]], rounds: int, calls: int = 1) -> list[list[float]]:
    """Return the wall-clock seconds of a call of each function, in turn, without the first rounds."""
    turns = Turns(functions, calls, timer=time.perf_counter)
    for _ in range(WARM_UP):
        turns.round()
    turns.forget()
    for _ in range(rounds):
        turns.round()
    return turns.seconds


def speed(device: torch.device, effort: Effort) -> Iterator[Row]:
    """Measure the steps per second of the paper preset, in loopscope's loop and in a bare one, and hooks on it."""
    subjects = [paper(device, effort) for _ in range(3)]
    trained = [epochs(subjects[0], (), device), epochs(subjects[1], observers(3), device)]
    seconds = in_turns([*trained, bare_epochs(subjects[2], device)], effort.times(20))
    count = len(subjects[0].task.loader)
    for figure, each in zip(
        ("loopscope's loop", "loopscope's loop with three observers", "a bare loop"), seconds, strict=True
    ):
        rates = [count / one for one in each]
        yield Row(f"Paper preset, {figure}", PREDECESSOR, PER_SECOND, Spread.of(rates, max(rates)))


def guardian(device: torch.device, effort: Effort) -> Iterator[Row]:
    """Compare the copies that undo an intervention with plain copies, which reach the memory bandwidth."""
    subject, snapshot = paper(device, effort), StateCopy()
    epochs(subject, (), device)()
    plain = PlainCopy(subject)
    plain.prepare()

    def guard() -> None:
        snapshot.save(subject.state)
        snapshot.restore(subject.state)
        snapshot.release()
        settled(device)

    def copy() -> None:
        plain()
        settled(device)

    ours, reference = in_turns((guard, copy), effort.times(50))
    size = sum(tensor.nbytes for tensor in subject.tensors)
    rate = 4 * size / median(reference) / 1e9  # in both directions, each read and written
    against = f"plain copies, {size / 1e6:.1f} MB, {rate:.0f} GB/s read and written"
    yield Row("Guardian save + restore, paper preset", against, TIMES, ratio(ours, reference), 1.1)


def checkpoint(device: torch.device, effort: Effort) -> Iterator[Row]:
    """Measure the time for which a checkpoint blocks the loop, against one copy of the same tensors to the host."""
    subject = paper(device, effort)
    train, ours, reference = epochs(subject, (), device), [], []
    train()
    size = sum(tensor.nbytes for tensor in subject.tensors)
    copy = CopyToHost(subject, device)
    with TemporaryDirectory() as folder:
        writer = CheckpointWriter(Path(folder), 2, subject.task.ranks)
        manager = HookManager((), subject.task, subject.state)
        describe = lambda: {"step": subject.state.loop.step, "score": None}
        taking = Checkpointing(manager, writer, CheckpointPlan(), Signals(), describe=describe)
        for _ in range(WARM_UP + effort.times(10)):
            train()
            copy.prepare()
            for function, seconds in ((copy, reference), (lambda: taking.take(wait=False), ours)):
                begin = time.perf_counter()
                function()
                seconds.append(time.perf_counter() - begin)
            writer.wait()
        writer.finish()
    ours, reference = ours[WARM_UP:], reference[WARM_UP:]
    against = f"a copy to the host, {size / 1e6:.1f} MB at {size / median(reference) / 1e9:.1f} GB/s"
    yield Row("Loop blocked by a checkpoint, paper preset", against, TIMES, ratio(ours, reference), 1.5)


class CopyToHost:
    """Copies every tensor of the training state into pinned memory."""

    def __init__(self, subject: Subject, device: torch.device) -> None:
        self._subject, self._device = subject, device
        pinned = device.type == "cuda"
        self._buffers = [torch.empty_like(tensor, device="cpu", pin_memory=pinned) for tensor in subject.tensors]

    def prepare(self) -> None:
        """Collect the current tensors, untimed."""
        self._tensors = [tensor.detach() for tensor in self._subject.tensors]

    def __call__(self) -> None:
        for buffer, tensor in zip(self._buffers, self._tensors, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        settled(self._device)


def hooks_with_compilation(device: torch.device, effort: Effort, name: str, mode: str | None) -> Iterator[Row]:
    """Measure the cost of three observers in a step whose model runs eagerly or compiled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RunNotice)
        alone, observed = (compiled(paper(device, effort), mode) for _ in range(2))
        functions = [epochs(alone, (), device), epochs(observed, observers(3), device)]
        without, with_hooks = in_turns(functions, effort.times(20))
    count = len(alone.task.loader)
    step = median(without) / count
    cost = difference([one / count for one in with_hooks], [one / count for one in without])
    yield Row(f"Three observers, {name}", f"a step of loopscope's loop, {step * 1e3:.3f} ms", MICROSECONDS, cost)


def compiled(subject: Subject, mode: str | None) -> Subject:
    """Compile a run's model in place, in one of torch's modes; do nothing for ``None``."""
    if mode is not None:
        subject.task.model.compile(mode=mode, dynamic=False)
    return subject
