"""Durable checkpoints: the whole training state in one file that is written whole or not at all."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from framework.durable_files import write_whole
from framework.errors import UsageError
from framework.random_streams import MT19937_BYTES, NumpyState, PythonState, StreamState
from framework.training_state import TrainingState

FORMAT = 1
PER_NAME = ("parameters", "buffers", "gradients", "requires_grad", "modes")
KEYS = {*PER_NAME, "format", "kinds", "optimizer", "scheduler", "scaler", "streams", "loop", "extras", "hooks"}


def save_tensors(content: Any, path: Path) -> None:
    """Write tensors and plain values with ``torch.save``, whole or not at all."""
    write_whole(path, lambda file: torch.save(content, file))


def save_checkpoint(path: Path, state: TrainingState, hooks: Mapping[str, Any], streams: StreamState) -> None:
    """Write the training state, the run's random ``streams`` and the states of the hooks.

    The file is readable with ``weights_only=True``. Written between two epochs (step loop: two steps), it is all that
    the rest of the run needs; written within an epoch, of the epoch loop's batches it does not tell which are done.
    """
    model = state.model
    content = {
        "format": FORMAT,
        "kinds": _kinds(state),
        "parameters": {name: value.detach() for name, value in model.named_parameters()},
        "buffers": dict(model.named_buffers()),
        "gradients": {name: value.grad for name, value in model.named_parameters()},
        "requires_grad": {name: value.requires_grad for name, value in model.named_parameters()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "optimizer": state.optimizer.state_dict(),
        "scheduler": None if state.scheduler is None else state.scheduler.state_dict(),
        "scaler": None if state.scaler is None else state.scaler.state_dict(),
        "streams": _streams_to_plain(streams),
        "loop": state.loop.state_dict(),
        "extras": {name: extra.state_dict() for name, extra in state.extras.items()},
        "hooks": dict(hooks),
    }
    save_tensors(content, path)


def load_checkpoint(path: Path, state: TrainingState) -> dict[str, Any]:
    """Put a checkpoint into a freshly built training state, in place, and return the hooks' states.

    Never executes code from the file. Raises :class:`UsageError` for a file that cannot be read, is damaged, of
    another format, or was written for another model, optimizer, scheduler or loader.
    """
    content = _read(path)
    try:
        _refuse_another_run(path, content, state)
        _restore(content, state)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UsageError(f"{path} does not fit this run: {_first_line(error)}") from error
    hooks: dict[str, Any] = content["hooks"]
    return hooks


def _read(path: Path) -> dict[str, Any]:
    try:
        content = torch.load(path, weights_only=True, map_location="cpu")
    except FileNotFoundError as error:
        raise UsageError(f"There is no checkpoint {path}.") from error
    except Exception as error:
        raise UsageError(f"{path} is not an intact checkpoint: {_first_line(error)}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or content.keys() != KEYS:
        raise UsageError(f"{path} is not a checkpoint of format {FORMAT}, the one that this version reads.")
    return content


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {text}."


def _refuse_another_run(path: Path, content: Mapping[str, Any], state: TrainingState) -> None:
    """Raise :class:`UsageError` if names or shapes differ, before anything is changed."""
    model = state.model
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    modules = dict(model.named_modules())
    expected: tuple[dict[str, Any], ...] = (parameters, buffers, parameters, parameters, modules)
    for what, have in zip(PER_NAME, expected, strict=True):
        found = content[what]
        names = sorted(set(have) ^ set(found)) or sorted(
            name for name, value in found.items() if isinstance(value, Tensor) and _form(value) != _form(have[name])
        )
        if names:
            raise UsageError(f"{path} was written for another model: of its {what}, {', '.join(names[:5])} differ.")
    for part, kind in _kinds(state).items():
        if content["kinds"].get(part) != kind:
            raise UsageError(
                f"{path} was written with the {part} {content['kinds'].get(part)}, but this one is {kind}."
            )


def _kinds(state: TrainingState) -> dict[str, str]:
    """Name the classes whose states only they can read."""
    parts = {"optimizer": state.optimizer, "scheduler": state.scheduler, "scaler": state.scaler}
    return {part: "none" if owner is None else type(owner).__qualname__ for part, owner in parts.items()}


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype


def _restore(content: Mapping[str, Any], state: TrainingState) -> None:
    with torch.no_grad():
        for name, parameter in state.model.named_parameters():
            parameter.copy_(content["parameters"][name])
            parameter.requires_grad_(content["requires_grad"][name])
            gradient = content["gradients"][name]
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        for name, buffer in state.model.named_buffers():
            buffer.copy_(content["buffers"][name])
    for name, module in state.model.named_modules():
        module.training = content["modes"][name]
    defaults = dict(state.optimizer.defaults)
    state.optimizer.load_state_dict(content["optimizer"])
    state.optimizer.defaults = defaults  # to which some optimizers add when they load
    if state.scheduler is not None:
        state.scheduler.load_state_dict(content["scheduler"])
    if state.scaler is not None:
        state.scaler.load_state_dict(content["scaler"])
    for name, extra in state.extras.items():
        extra.load_state_dict(content["extras"][name])
    state.loop.load_state_dict(_on_device(content["loop"], next(state.model.parameters()).device))
    _streams_from_plain(content["streams"], state).restore()


def _on_device(value: Any, device: torch.device) -> Any:
    """Move the tensors in nested dicts."""
    if isinstance(value, dict):
        return {name: _on_device(item, device) for name, item in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value


def _streams_to_plain(streams: StreamState) -> dict[str, Any]:
    return {
        "torch": streams.torch_cpu,
        "python": _as_tensor(streams.python.key),
        "python_gaussian": streams.python.cached_gaussian,
        "numpy": _as_tensor(streams.numpy.key),
        "numpy_gaussian": streams.numpy.cached_gaussian,
        "accelerators": [state for _, state in streams.accelerators],
        "owned": [state for _, state in streams.owned],
    }


def _streams_from_plain(plain: Mapping[str, Any], state: TrainingState) -> StreamState:
    now = state.streams.save()
    return StreamState(
        plain["torch"],
        PythonState(_as_bytes(plain["python"]), plain["python_gaussian"]),
        NumpyState(now.numpy.bit_generator, _as_bytes(plain["numpy"]), plain["numpy_gaussian"]),
        tuple((device, saved) for (device, _), saved in zip(now.accelerators, plain["accelerators"], strict=False)),
        tuple((generator, saved) for (generator, _), saved in zip(now.owned, plain["owned"], strict=True)),
    )


def _as_tensor(key: bytes) -> Tensor:
    return torch.frombuffer(bytearray(key), dtype=torch.uint8)


def _as_bytes(tensor: Tensor) -> bytes:
    """Return the state of a Mersenne Twister; raises ``ValueError`` for another size, since it is copied raw."""
    key = tensor.numpy().tobytes()
    if len(key) != MT19937_BYTES:
        raise ValueError(f"a random generator's state has {len(key)} bytes instead of {MT19937_BYTES}")
    return key
