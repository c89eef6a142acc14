"""Changes of what a batch holds apart from tensors: lists, numbers, texts, keys and arrays."""

from collections import UserDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from loopscope.errors import StateMutationError
from loopscope.isolation import Call, Isolation
from loopscope.state import RandomStreams, TrainingState
from torch import nn

CALL = Call("spy", "PRE_STEP", 1)


@dataclass
class Rows:
    """A batch that is an object."""

    inputs: Any = field(default_factory=lambda: torch.ones(2))
    weights: list[float] = field(default_factory=lambda: [1.0, 2.0])
    text: str = "a"


def mapping() -> dict[str, Any]:
    return {"x": torch.ones(2), "weights": [1.0, 2.0], "scale": 1.0, "mask": np.ones(2), "words": ["a", ["b"]]}


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "item of a list": (mapping, lambda batch: batch["weights"].__setitem__(0, 9.0)),
    "number": (mapping, lambda batch: batch.__setitem__("scale", 3.0)),
    "number of another type": (mapping, lambda batch: batch.__setitem__("scale", 1)),
    "text": (mapping, lambda batch: batch["words"][1].__setitem__(0, "c")),
    "key that is gone": (mapping, lambda batch: batch.pop("scale")),
    "new key": (mapping, lambda batch: batch.__setitem__("more", None)),
    "order of keys": (mapping, lambda batch: batch.__setitem__("scale", batch.pop("scale"))),
    "key of tensors": (lambda: {"x": torch.ones(2)}, lambda batch: batch.__setitem__("y", batch.pop("x"))),
    "replaced array": (mapping, lambda batch: batch.__setitem__("mask", batch["mask"] * 0)),
    "attribute": (Rows, lambda batch: setattr(batch, "text", "b")),
    "list in an attribute": (Rows, lambda batch: batch.weights.append(1.0)),
    "mapping of user code": (lambda: UserDict(mapping()), lambda batch: batch["words"].append("c")),
    "object in a list": (lambda: [torch.ones(2), Rows()], lambda batch: batch[1].weights.clear()),
    "tuple with a list": (lambda: (torch.ones(2), [0, 1]), lambda batch: batch[1].reverse()),
}
ELEMENTS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "array": (mapping, lambda batch: batch["mask"].__setitem__(0, 9.0)),
    "array in a list": (lambda: [torch.ones(2), [np.ones(3)]], lambda batch: batch[1][0].fill(2)),
}
TEXTS = (lambda: [torch.ones(2), np.array(["a", "b"])], lambda batch: batch[1].__setitem__(0, "c"))


def observed(make: Callable[[], Any], change: Callable[[Any], Any], call: int, *, audit: bool = False) -> None:
    """Change the batch in one of several calls of an observer."""
    model = nn.Linear(2, 2)
    state = TrainingState(model, torch.optim.SGD(model.parameters()), RandomStreams(1))
    isolation = Isolation(state, audit=audit)
    for number in range(1, call + 1):
        state.loop.batch = make()
        with isolation.visit():
            isolation.observe(CALL, lambda: change(state.loop.batch) if number == call else None)  # noqa: B023


@pytest.mark.guarantee("observers-change-nothing")
@pytest.mark.parametrize("call", [1, 5])
@pytest.mark.parametrize("name", CHANGES)
def test_changed_contents_of_a_batch_are_detected(name: str, call: int) -> None:
    """In the first call and in a call whose bytes are not compared, the error names hook and point."""
    with pytest.raises(StateMutationError, match="'spy' at PRE_STEP"):
        observed(*CHANGES[name], call)


@pytest.mark.guarantee("observers-change-nothing")
@pytest.mark.parametrize("call", [1, 4])
@pytest.mark.parametrize("name", ELEMENTS)
def test_written_arrays_of_a_batch_are_detected(name: str, call: int) -> None:
    """Detected in calls whose bytes are compared, and with an audit in all; other calls are documented as a limit."""
    with pytest.raises(StateMutationError, match="'spy' at PRE_STEP"):
        observed(*ELEMENTS[name], call)
    with pytest.raises(StateMutationError, match="'spy' at PRE_STEP"):
        observed(*ELEMENTS[name], 5, audit=True)
    observed(*ELEMENTS[name], 5)


def test_written_array_of_texts_needs_an_audit() -> None:
    observed(*TEXTS, 1)
    with pytest.raises(StateMutationError, match="'spy' at PRE_STEP"):
        observed(*TEXTS, 1, audit=True)


def test_reading_any_batch_is_allowed() -> None:
    for make, _ in (*CHANGES.values(), *ELEMENTS.values(), TEXTS):
        observed(make, str, 3)


def nested(depth: int) -> list[Any]:
    """Return a batch whose list of a number is within this number of containers."""
    content: Any = [1.0]
    for _ in range(depth):
        content = [content]
    return [torch.ones(2), content]


def write(batch: Any) -> None:
    """Change the innermost number."""
    content = batch[1]
    while isinstance(content[0], list):
        content = content[0]
    content[0] = 2.0


@pytest.mark.parametrize(("depth", "detected"), [(7, True), (8, False)])
def test_depth_of_detected_contents_is_limited(depth: int, detected: bool) -> None:
    """Contents below eight containers are documented as a limit."""
    with pytest.raises(StateMutationError, match="'spy' at PRE_STEP") if detected else nullcontext():
        observed(lambda: nested(depth), write, 1)
