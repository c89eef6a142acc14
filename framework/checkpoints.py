"""Durable checkpoints: the whole training state in one file, written so that a crash leaves the old one intact."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from framework.errors import UsageError
from framework.random_streams import NumpyState, PythonState, StreamState
from framework.training_state import TrainingState

FORMAT = 1


def atomic_save(content: Any, path: Path) -> None:
    """Write with ``torch.save`` under a temporary name, flush to the disk, then rename over ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def save_checkpoint(path: Path, state: TrainingState, hooks: Mapping[str, Any]) -> None:
    """Write the training state and the states of the hooks; readable with ``weights_only=True``."""
    loop = state.loop.state_dict()
    content = {
        "format": FORMAT,
        "parameters": {name: value.detach() for name, value in state.model.named_parameters()},
        "buffers": dict(state.model.named_buffers()),
        "gradients": {name: value.grad for name, value in state.model.named_parameters()},
        "requires_grad": {name: value.requires_grad for name, value in state.model.named_parameters()},
        "modes": {name: module.training for name, module in state.model.named_modules()},
        "optimizer": state.optimizer.state_dict(),
        "scheduler": None if state.scheduler is None else state.scheduler.state_dict(),
        "scaler": None if state.scaler is None else state.scaler.state_dict(),
        "streams": _streams_to_plain(state.streams.save()),
        "loop": loop,
        "extras": {name: extra.state_dict() for name, extra in state.extras.items()},
        "hooks": dict(hooks),
    }
    atomic_save(content, path)


def load_checkpoint(path: Path, state: TrainingState) -> dict[str, Any]:
    """Put a checkpoint into a freshly built training state, in place, and return the hooks' states.

    Never executes code from the file. Raises :class:`UsageError` for a file that is damaged, of another format, or
    of another model.
    """
    try:
        content = torch.load(path, weights_only=True)
    except Exception as error:
        raise UsageError(f"{path} is not an intact checkpoint: {type(error).__name__}: {error}.") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UsageError(f"{path} is no checkpoint of format {FORMAT}.")
    parameters = dict(state.model.named_parameters())
    _same_names(path, "parameters", parameters, content["parameters"])
    _same_names(path, "buffers", dict(state.model.named_buffers()), content["buffers"])
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(content["parameters"][name])
            parameter.requires_grad_(content["requires_grad"][name])
            parameter.grad = content["gradients"][name]
        for name, buffer in state.model.named_buffers():
            buffer.copy_(content["buffers"][name])
    for name, module in state.model.named_modules():
        module.training = content["modes"][name]
    state.optimizer.load_state_dict(content["optimizer"])
    for owner, saved in ((state.scheduler, content["scheduler"]), (state.scaler, content["scaler"])):
        if owner is not None:
            owner.load_state_dict(saved)
    for name, extra in state.extras.items():
        extra.load_state_dict(content["extras"][name])
    state.loop.load_state_dict(content["loop"])
    _streams_from_plain(content["streams"], state).restore()
    hooks: dict[str, Any] = content["hooks"]
    return hooks


def _same_names(path: Path, what: str, have: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    different = sorted(
        name
        for name in {**have, **found}
        if name not in have or name not in found or have[name].shape != found[name].shape
    )
    if different:
        raise UsageError(f"{path} was written for another model: the {what} {', '.join(different[:5])} differ.")


def _streams_to_plain(streams: StreamState) -> dict[str, Any]:
    return {
        "torch": streams.torch_cpu,
        "python": torch.frombuffer(bytearray(streams.python.key), dtype=torch.uint8),
        "python_gaussian": streams.python.cached_gaussian,
        "numpy": torch.frombuffer(bytearray(streams.numpy.key), dtype=torch.uint8),
        "numpy_gaussian": streams.numpy.cached_gaussian,
        "accelerators": [state for _, state in streams.accelerators],
        "owned": [state for _, state in streams.owned],
    }


def _streams_from_plain(plain: Mapping[str, Any], state: TrainingState) -> StreamState:
    now = state.streams.save()
    return StreamState(
        plain["torch"],
        PythonState(bytes(np.asarray(plain["python"])), plain["python_gaussian"]),
        NumpyState(now.numpy.bit_generator, bytes(np.asarray(plain["numpy"])), plain["numpy_gaussian"]),
        tuple((device, saved) for (device, _), saved in zip(now.accelerators, plain["accelerators"], strict=False)),
        tuple((generator, saved) for (generator, _), saved in zip(now.owned, plain["owned"], strict=True)),
    )
