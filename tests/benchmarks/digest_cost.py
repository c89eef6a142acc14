"""Costs of digests of the training state, against a read of its bytes and the steps between two snapshots."""

from collections.abc import Iterator
from itertools import pairwise

import torch
from loopscope.digests import state_digests, sums
from torch import Tensor

from tests.benchmarks.rows import PERCENT, TIMES, Effort, Row
from tests.benchmarks.subjects import Subject, mod_arithmetic
from tests.benchmarks.timing import Spread, Turns, clock, ratio

EPOCHS = 10
"""Epochs between two snapshots of the quick preset."""


def digests(effort: Effort) -> Iterator[Row]:
    """Compare digests of the paper preset's state with reading it and with torch's own hash."""
    subject = mod_arithmetic(effort.paper)
    subject.train(1, lambda: None)
    tensors = [tensor.detach() for tensor in subject.tensors if tensor.numel()]
    words = [_words(tensor) for tensor in tensors]
    turns = Turns(
        [
            lambda: [word.sum() for word in words],
            lambda: [torch.hash_tensor(tensor) for tensor in tensors],
            lambda: [sums(tensor) for tensor in tensors],
            lambda: state_digests(subject.state),
        ]
    )
    turns.round()
    turns.forget()
    for _ in range(effort.times(40)):
        turns.round()
    read, hashed, summed, complete = turns.seconds
    size = sum(tensor.nbytes for tensor in tensors) / 1e6
    against = f"torch.sum of the same {size:.0f} MB as int64, {1e3 * Spread.of(read).median:.1f} ms"
    yield Row("A digest of the state, plain values included", against, TIMES, ratio(complete, read), 1.5)
    yield Row("The sums of its tensors alone", against, TIMES, ratio(summed, read))
    yield Row("torch.hash_tensor, which detects less", against, TIMES, ratio(hashed, read))


def _words(tensor: Tensor) -> Tensor:
    content = tensor.contiguous().reshape(-1).view(torch.uint8)
    return content[: len(content) // 8 * 8].view(torch.int64)


def at_snapshots(effort: Effort) -> Iterator[Row]:
    """Compare one digest with the steps of the quick preset between two snapshots."""
    subject = mod_arithmetic(effort.quick)
    steps = EPOCHS * len(subject.task.loader)
    step = Spread.of(steps_of(subject, effort.times(200)))
    digest: list[float] = []
    for _ in range(effort.times(40)):
        begin = clock()
        state_digests(subject.state)
        digest.append(clock() - begin)
    against = f"{EPOCHS} epochs of the quick preset, {steps} steps, {steps * step.median:.1f} s"
    shares = [seconds / (steps * step.median) for seconds in digest]
    yield Row("A digest at every snapshot", against, PERCENT, Spread.of(shares), 0.005)


def steps_of(subject: Subject, count: int) -> list[float]:
    """Return the seconds of a number of steps."""
    moments: list[float] = []
    subject.train(count + 1, lambda: moments.append(clock()))
    return [end - begin for begin, end in pairwise(moments)]
