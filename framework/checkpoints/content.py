"""What a durable checkpoint holds: the whole training state as tensors and plain values, and how it is put back."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from ..state import MT19937_BYTES, NumpyState, PythonState, StreamState, TrainingState
from .format import open_checkpoint, write_checkpoint

PER_NAME = ("parameters", "buffers", "gradients", "requires_grad", "modes")
KEYS = {*PER_NAME, "kinds", "optimizer", "scheduler", "scaler", "loop", "extras"}


def captured(state: TrainingState) -> dict[str, Any]:
    """Return the training state without its random streams, by reference: tensors and plain values."""
    model = state.model
    return {
        "kinds": _kinds(state),
        "parameters": {name: value.detach() for name, value in model.named_parameters()},
        "buffers": dict(model.named_buffers()),
        "gradients": {name: value.grad for name, value in model.named_parameters()},
        "requires_grad": {name: value.requires_grad for name, value in model.named_parameters()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "optimizer": state.optimizer.state_dict(),
        "scheduler": None if state.scheduler is None else state.scheduler.state_dict(),
        "scaler": None if state.scaler is None else state.scaler.state_dict(),
        "loop": state.loop.state_dict(),
        "extras": {name: extra.state_dict() for name, extra in state.extras.items()},
    }


def captured_streams(streams: StreamState) -> dict[str, Any]:
    """Return the states of the random generators as tensors and plain values."""
    return {
        "torch": streams.torch_cpu,
        "python": _as_tensor(streams.python.key),
        "python_gaussian": streams.python.cached_gaussian,
        "numpy": _as_tensor(streams.numpy.key),
        "numpy_gaussian": streams.numpy.cached_gaussian,
        "accelerators": [state for _, state in streams.accelerators],
        "owned": [state for _, state in streams.owned],
    }


def put_back(captured: Mapping[str, Any], state: TrainingState, where: Path) -> None:
    """Put a captured training state into a freshly built one, in place.

    Raises :class:`UsageError`, naming ``where`` it comes from, if it was captured from another model, optimizer,
    scheduler or loader, or is not a captured state at all.
    """
    if not isinstance(captured, Mapping) or captured.keys() < KEYS:
        raise UsageError(f"{where} does not hold a whole training state.")
    try:
        _refuse_another_run(where, captured, state)
        _restore(captured, state)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise _does_not_fit(where, error) from error


def put_back_streams(captured: Mapping[str, Any], state: TrainingState, where: Path) -> None:
    """Put the random generators back; raises :class:`UsageError` for states that are not theirs."""
    try:
        _streams_from_plain(captured, state).restore()
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise _does_not_fit(where, error) from error


def save_checkpoint(folder: Path, state: TrainingState, hooks: Mapping[str, Any], streams: StreamState) -> None:
    """Write training state, random streams and the states of hooks at once: for loops of one's own, and for tests."""
    content = {"state": captured(state), "streams": captured_streams(streams), "hooks": dict(hooks)}
    write_checkpoint(folder, content, {"step": state.loop.step, "score": None})


def load_checkpoint(folder: Path, state: TrainingState) -> dict[str, Any]:
    """Put back what :func:`save_checkpoint` wrote, and return the states of the hooks."""
    content = open_checkpoint(folder).content()
    put_back(content["state"], state, folder)
    put_back_streams(content["streams"], state, folder)
    hooks: dict[str, Any] = content["hooks"]
    return hooks


def _does_not_fit(where: Path, error: Exception) -> UsageError:
    text = str(error).strip().partition("\n")[0].rstrip(".")
    return UsageError(f"{where} does not fit this run: {type(error).__name__}: {text}.")


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
    if state.scheduler is not None and state.loop.skipped_steps < state.loop.step:
        state.optimizer._opt_called = True  # type: ignore[attr-defined]  # or the scheduler would warn, if it is first


def _on_device(value: Any, device: torch.device) -> Any:
    """Move the tensors in nested dicts."""
    if isinstance(value, dict):
        return {name: _on_device(item, device) for name, item in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value


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
