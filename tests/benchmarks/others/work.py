"""Input of every framework: a model, its optimizer and batches, and the requested extras."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from tests.benchmarks.subjects import Subject
from tests.benchmarks.timing import clock

MAX_NORM, DECAY = 1.0, 0.999
Batch = tuple[Tensor, Tensor]


class Seen(NamedTuple):
    """The values that a callback receives after a step, while gradients still exist."""

    model: nn.Module
    loss: Tensor
    lr: float


Callback = Callable[[Seen], Mapping[str, float]]
"""A function that is called after every step; the framework logs its result."""


@dataclass(frozen=True)
class Asked:
    """The requested extras, which each framework implements in its own way."""

    receives_all_events: bool = False
    """Whether one callback is called at every event and does nothing."""
    callbacks: Sequence[Callback] = ()
    clips: bool = False
    averages: bool = False
    norms: bool = False
    """Whether the norm of every gradient is logged."""


@dataclass
class Work:
    """The training; ``data`` is iterated once for each of the ``epochs``."""

    model: nn.Module
    optimizer: Optimizer
    data: "Data"
    epochs: int
    folder: Path


class Data:
    """Batches in memory."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class TurnsOfData(Data):
    """Batches for a framework that take one step of another loop before each batch and time both: A B A B."""

    def __init__(self, batches: Sequence[Batch], other: Iterator[None]) -> None:
        super().__init__(batches)
        self._other = other
        self.begins: list[float] = []
        """The start time of each epoch."""
        self.bare: list[list[float]] = []
        """Seconds of the other loop's steps, for each epoch."""
        self.theirs: list[list[float]] = []
        """Seconds between two batches that the framework did not spend in the other loop, for each epoch."""

    def __iter__(self) -> Iterator[Batch]:
        begin = clock()
        self.begins.append(begin)
        self.bare.append([])
        self.theirs.append([])
        for batch in self.batches:
            next(self._other)
            end = clock()
            self.bare[-1].append(end - begin)
            yield batch
            begin = clock()
            self.theirs[-1].append(begin - end)

    def mean_step(self) -> tuple[list[float], list[float]]:
        """Return the seconds of a framework's step and of the other loop's, by epoch, without first and last.

        What a framework does at the end of an epoch belongs to that epoch, which lasts until the next one begins.
        """
        lengths = [end - begin for begin, end in zip(self.begins, self.begins[1:], strict=False)]
        pairs = list(zip(lengths, map(sum, self.bare), strict=False))[1:]
        return [(all_ - bare) / len(self) for all_, bare in pairs], [bare / len(self) for _, bare in pairs]

    def median_step(self) -> tuple[list[float], list[float]]:
        """Return the same for the median step, without occasional work."""
        return list(map(median, self.theirs[1:-1])), list(map(median, self.bare[1:-1]))


def batches_of(subject: Subject, most: int) -> list[Batch]:
    """Cut a run's training data into its batches."""
    size = subject.batch_size
    pieces = zip(subject.inputs.split(size), subject.targets.split(size), strict=True)
    return [(inputs.clone(), targets.clone()) for inputs, targets in pieces][:most]


def bare_steps(model: nn.Module, optimizer: Optimizer, batches: Iterable[Batch]) -> Iterator[None]:
    """Train endlessly in a hand-written loop, stopping after every step."""
    for inputs, targets in cycle(batches):
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        yield


def loss(seen: Seen) -> Mapping[str, float]:
    """Return the loss of the step."""
    return {"loss": float(seen.loss)}


def rate(seen: Seen) -> Mapping[str, float]:
    """Return the learning rate."""
    return {"lr": seen.lr}


def norm(seen: Seen) -> Mapping[str, float]:
    """Return the norm of all gradients together."""
    gradients = [parameter.grad for parameter in seen.model.parameters() if parameter.grad is not None]
    return {"grad_norm": float(torch.nn.utils.get_total_norm(gradients))}


def norm_of_each(seen: Seen) -> Mapping[str, float]:
    """Return the norm of every gradient."""
    gradients = {
        name: parameter.grad for name, parameter in seen.model.named_parameters() if parameter.grad is not None
    }
    norms = torch.stack(torch._foreach_norm(list(gradients.values())))
    return {f"norm/{name}": value for name, value in zip(gradients, norms.tolist(), strict=True)}


THREE_VALUES: Sequence[Callback] = (loss, rate, norm)
