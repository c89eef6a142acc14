"""The cost of noticing the steps of an unedited loop, in calls of functions, which no load of the host changes."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import loopscope
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from tests.framework.observing.loops import made, rows

WARM_UP, COUNTED = 20, 10
MOST = 8
"""Functions of loopscope that a step of an unedited loop calls besides those of an edited one: 5 in December 2026."""
MOST_OF_EDITED = 36
"""Functions of loopscope that a step of an edited loop calls without hooks: 30 in December 2026."""


def measured(folder: Path, counter: Callable[[], float], *, edited: bool) -> float:
    """Return by how much a counter grows per step of a loop with no hooks."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start = 0.0
    with loopscope.attach(model, optimizer, hooks=[], out=folder, display="none", loop="step", digest_every=0) as scope:
        data = [rows() for _ in range(WARM_UP + COUNTED)]
        for step, (inputs, targets) in enumerate(scope.batches(data) if edited else data):
            if step == WARM_UP:
                start = counter()
            loss = functional.cross_entropy(model(inputs), targets)
            (scope.backward if edited else Tensor.backward)(loss)
            optimizer.step()
            optimizer.zero_grad()
        return (counter() - start) / COUNTED


def test_unedited_steps_create_no_handles(tmp_path: Path) -> None:
    """A new handle of a hook would let every check count all hooks of the model again."""
    assert measured(tmp_path, lambda: RemovableHandle.next_id, edited=False) == 0


def test_unedited_steps_call_few_more_functions(tmp_path: Path) -> None:
    calls = [0]

    def count(frame: FrameType, event: str, argument: Any) -> None:
        calls[0] += event == "call" and str(frame.f_globals.get("__name__")).startswith("loopscope.")

    def read() -> float:
        sys.setprofile(count)
        return calls[0]

    try:
        edited, unedited = (measured(tmp_path / str(flag), read, edited=flag) for flag in (True, False))
    finally:
        sys.setprofile(None)
    assert 0 < unedited - edited <= MOST, (edited, unedited)
    assert edited <= MOST_OF_EDITED
