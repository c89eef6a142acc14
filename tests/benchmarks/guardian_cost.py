"""Costs of an intervention: saving and restoring the training state, and neither with ``mutates = False``."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from loopscope.experiments.mod_arithmetic.runner import ModArithmeticConfig
from loopscope.hooks import HookPoint, TrainingHook
from loopscope.isolation import StateCopy
from loopscope.state import RandomStreams, TrainingState
from loopscope.tensors import local_shards
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.benchmarks.rows import BYTES, MICROSECONDS, TIMES, Effort, Row
from tests.benchmarks.subjects import Mutator, Reader, Subject, mod_arithmetic
from tests.benchmarks.timing import Spread, clock, ratio

POINT = HookPoint.POST_STEP
Seconds = list[float]


def save_and_restore(effort: Effort) -> Iterator[Row]:
    """Measure the guardian, and clone plus load_state_dict, against plain copies of the same bytes."""
    cases = (("quick", effort.quick, 180, 1.5), ("paper", effort.paper, 40, 1.1))
    for preset, options, pairs, bar in cases:
        subject = mod_arithmetic(options)
        plain = PlainCopy(subject)
        snapshot = StateCopy()
        ours, reference = _pairs(subject, plain, partial(_guard, subject, snapshot), effort.times(pairs))
        tensors = subject.tensors
        size = sum(tensor.nbytes for tensor in tensors) / 1e6
        against = f"plain copies, {len(tensors)} tensors, {size:.1f} MB, {1e3 * Spread.of(reference).median:.2f} ms"
        yield Row(f"Guardian save + restore, {preset} preset", against, TIMES, ratio(ours, reference), bar)
        naive, reference = _pairs(subject, plain, partial(_naive, subject), effort.times(pairs // 2))
        yield Row("clone + load_state_dict", against, TIMES, ratio(naive, reference))


def on_a_shard(effort: Effort) -> tuple[Seconds, Seconds, float]:
    """Time the guardian and plain copies of this rank's shards under FSDP2; the last value is their megabytes."""
    subject = large_shards(effort)
    seconds = _pairs(subject, PlainCopy(subject), partial(_guard, subject, StateCopy()), effort.times(40))
    return *seconds, sum(tensor.nbytes for tensor in local_shards(subject.tensors)) / 1e6


def large_shards(effort: Effort) -> Subject:
    """Return the paper's run with four times the parameters: a shard is as large as the other rows' whole state."""
    preset = ModArithmeticConfig(**effort.paper)
    larger = {"embed_dim": 2 * preset.embed_dim, "ff_dim": 2 * preset.ff_dim}
    return sharded(mod_arithmetic(effort.paper | larger))


def sharded(subject: Subject) -> Subject:
    """Shard a run's model by FSDP2, layer by layer, and train it by an optimizer of the shards."""
    from torch.distributed.fsdp import fully_shard

    model = subject.task.model
    for module in (*model.get_submodule("blocks").children(), model):
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = TrainingState(model, optimizer, RandomStreams(1))
    return replace(subject, task=replace(subject.task, optimizer=optimizer, scheduler=None, ranks=None), state=state)


class PlainCopy:
    """Copies every tensor of the training state to a buffer and back."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._buffers: list[Tensor] = []

    def prepare(self) -> None:
        """Collect the current tensors, untimed."""
        self._tensors = [tensor.detach() for tensor in local_shards(self._subject.tensors)]
        if [buffer.shape for buffer in self._buffers] != [tensor.shape for tensor in self._tensors]:
            self._buffers = [torch.empty_like(tensor) for tensor in self._tensors]

    def __call__(self) -> None:
        torch._foreach_copy_(self._buffers, self._tensors)
        torch._foreach_copy_(self._tensors, self._buffers)


def _guard(subject: Subject, snapshot: StateCopy) -> None:
    """Save and restore the state as the isolation does around an intervention."""
    snapshot.save(subject.state)
    snapshot.restore(subject.state)
    snapshot.release()


def _naive(subject: Subject) -> None:
    """Save and restore model, gradients and optimizer in the usual way; afterwards the copies alias live tensors."""
    model, optimizer = subject.task.model, subject.task.optimizer
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]
    moments = deepcopy(optimizer.state_dict())
    model.load_state_dict(weights)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    optimizer.load_state_dict(moments)


def _pairs(subject: Subject, plain: PlainCopy, other: Callable[[], None], pairs: int) -> tuple[Seconds, Seconds]:
    """Time ``other`` and the plain copy in turn, each after a separate training step: same caches, new gradients."""
    seconds: tuple[Seconds, Seconds] = ([], [])

    def measure() -> None:
        plain.prepare()
        turn = len(seconds[0]) > len(seconds[1])
        begin = clock()
        (plain if turn else other)()
        seconds[turn].append(clock() - begin)

    subject.train(2 * (pairs + 2), measure)
    count = min(map(len, seconds))
    return seconds[0][2:count], seconds[1][2:count]


COPYING = {torch.ops.aten.copy_, torch.ops.aten._foreach_copy_, torch.ops.aten.clone, torch.ops.aten._to_copy}


class CopyMeter(TorchDispatchMode):
    """Counts the bytes that torch copies."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in COPYING:
            copied = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            self.bytes += sum(tensor.nbytes for tensor in copied)
        return result


def interventions(effort: Effort) -> Iterator[Row]:
    """Count the bytes that a visit with one intervention copies, and time it."""
    subject = mod_arithmetic(effort.quick)
    for label, hook, bar in (("mutates = False", Reader(), 0.0), ("mutates = True", Mutator(), None)):
        copied, seconds = _fires(subject, hook, effort.times(90))
        figure = f"Intervention, {label}"
        yield Row(f"{figure}: bytes copied", "one visit", BYTES, copied, bar)
        yield Row(f"{figure}: a visit after a step", "nothing", MICROSECONDS, seconds)


def _fires(subject: Subject, hook: TrainingHook, steps: int) -> tuple[Spread, Spread]:
    """Call ``fire`` after each of ``steps`` training steps; count the bytes of every other call and time the rest."""
    manager = subject.manager([hook])
    copied: list[float] = []
    seconds: list[float] = []

    def fire() -> None:
        if len(copied) > len(seconds):
            begin = clock()
            manager.fire(POINT)
            seconds.append(clock() - begin)
        else:
            with CopyMeter() as meter:
                manager.fire(POINT)
            copied.append(meter.bytes)
        manager.delivery.flush_steps(0)

    subject.train(2 * steps + 2, fire)
    return Spread.of(copied), Spread.of(seconds[1:])
