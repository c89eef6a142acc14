"""Tests of a training in a test suite: the laws that every training obeys, without a run."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .errors import require
from .isolation import StateCopy
from .laws import LawCheck, Recording, Trial
from .state import RandomStreams, TrainingState

STEPS = 2
"""Steps at which laws are tried, since some compare two."""


def check_training(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    *,
    optimizer: Optimizer | None = None,
    laws: Sequence[str] = (),
) -> None:
    """Raise an ``AssertionError`` that names every broken law, its counterexample and a remedy.

    The training makes two steps on the batch; afterwards model, optimizer and random generators are as before.

    >>> from torch.nn.functional import mse_loss
    >>> def loss(model, batch):
    ...     return mse_loss(model(batch["x"]), batch["y"])
    >>> check_training(nn.Linear(3, 1), loss, {"x": torch.randn(8, 3), "y": torch.randn(8, 1)})

    Args:
        model: the model, in train mode.
        loss: ``loss(model, batch)`` returns the loss, a tensor with a graph.
        batch: a batch of at least 4 rows.
        optimizer: the optimizer; by default SGD over all trainable parameters.
        laws: the names of the laws to try; by default all that apply.
    """
    import_module("loopscope.laws.shipped")
    check = LawCheck(laws)
    optimizer = optimizer or torch.optim.SGD([item for item in model.parameters() if item.requires_grad], lr=0.1)
    streams = RandomStreams(0)
    state = TrainingState(model, optimizer, streams)

    @contextmanager
    def branch() -> Iterator[None]:
        copy = StateCopy(streams=True).save(state)
        try:
            yield
        finally:
            copy.restore(state)

    recording = Recording(streams)
    is_recording = True

    def is_active() -> bool:
        return is_recording

    with branch(), recording.recording(model, is_active):
        for number in range(1, STEPS + 1):
            optimizer.zero_grad()
            value = loss(model, batch)
            has_graph = isinstance(value, Tensor) and value.requires_grad
            require(has_graph, "loss(model, batch) must return a tensor with a graph.")
            value.backward()  # type: ignore[no-untyped-call]
            recording.leave()
            is_recording = False
            for step in recording.steps:
                step.verify()
            list(check.try_at(Trial(recording.steps, model, [optimizer], branch, streams, number)))
            is_recording = True
            recording.clear()
            optimizer.step()
    broken = [item for item in check.results() if item["verdict"] == "broken"]
    lines = [f"{item['statement']}: {item['evidence']}; {item['remedy']} ({item['law']})" for item in broken]
    assert not broken, "broken laws of training:\n" + "\n".join(lines)
