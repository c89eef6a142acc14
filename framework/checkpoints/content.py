"""What a durable checkpoint holds: the whole training state as tensors and plain values, and how it is put back."""

from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from ..registry import qualified
from ..state import ATOMS, StreamState, TrainingState
from .format import open_checkpoint, write_checkpoint
from .writer import Staging


def captured(state: TrainingState, streams: StreamState) -> dict[str, Any]:
    """Return the training state by reference, as tensors and plain values; ``streams`` are those of the run's own."""
    return {part.name: part.stored.read(state, streams) for part in state.parts if part.stored is not None}


def put_back(captured: Any, state: TrainingState, where: Path) -> None:
    """Put a captured training state into a freshly built one, in place.

    Raises :class:`UsageError`, naming ``where`` it comes from, if it was captured from another model, optimizer,
    scheduler or loader, or is not a captured state at all.
    """
    stored = {part.name: part.stored for part in state.parts if part.stored is not None}
    if not isinstance(captured, Mapping) or captured.keys() != stored.keys():
        raise UsageError(f"{where} does not hold a whole training state.")
    try:
        for name, part in stored.items():
            if misfit := part.misfit(state, captured[name]):
                raise UsageError(f"{where} {misfit}.")
        for name, part in stored.items():
            part.load(state, captured[name])
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        text = str(error).strip().partition("\n")[0].rstrip(".")
        raise UsageError(f"{where} does not fit this run: {type(error).__name__}: {text}.") from error


def unstorable(content: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in nested content, by name, that cannot be read again without executing code from the file."""
    if isinstance(content, Mapping):
        for key, item in content.items():
            yield from unstorable(item, f"{name}/{key}" if name else str(key))
    elif type(content) in (list, tuple, set):
        for index, item in enumerate(content):
            yield from unstorable(item, f"{name}/{index}")
    elif not isinstance(content, Tensor) and type(content) not in ATOMS and not _can_be_read(content):
        yield name, content


def refusals(content: Any) -> list[str]:
    """Say of every value that checkpoints cannot hold what it is and what to do, in a sentence each."""
    remedy = (
        "since reading it would execute code from the file: keep tensors, numbers, strings, or lists and dicts of "
        "these there, or, if no later step reads what it holds, call loopscope.state.Transient.register on its class."
    )
    return [
        f"{name.removeprefix('state/')} is a {qualified(type(value))}, which no checkpoint can hold, {remedy}"
        for name, value in unstorable(content)
    ]


def _can_be_read(value: Any) -> bool:
    file = BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # whatever pickling a foreign object raises
        return False
    return True


def save_checkpoint(folder: Path, state: TrainingState, hooks: Mapping[str, Any], streams: StreamState) -> None:
    """Write training state, random streams and the states of hooks at once: for loops of one's own, and for tests.

    Raises :class:`UsageError` for a value that a checkpoint cannot hold.
    """
    content = Staging().copy({"state": captured(state, streams), "hooks": dict(hooks)})
    if sentences := refusals(content):
        raise UsageError(sentences[0])
    write_checkpoint(folder, content, {"step": state.loop.step, "score": None})


def load_checkpoint(folder: Path, state: TrainingState) -> dict[str, Any]:
    """Put back what :func:`save_checkpoint` wrote, and return the states of the hooks."""
    content = open_checkpoint(folder).content()
    put_back(content["state"], state, folder)
    hooks: dict[str, Any] = content["hooks"]
    return hooks
