"""Digests of everything that a training changes, after every step of an optimizer."""

import random
import sys
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Digests = dict[str, str]


class Recorder:
    """Digests watched models, the optimizer and the random generators after every step of any optimizer."""

    def __init__(self) -> None:
        self.steps: list[Digests] = []
        self._models: list[Callable[[], nn.Module]] = []
        self._logs: list[Callable[[], list[dict[str, Any]]]] = []
        self._handle = register_optimizer_step_post_hook(self._after_step)

    def watch(self, model: Callable[[], nn.Module]) -> None:
        """Include a model, which is looked up at every step, since trainers wrap theirs late."""
        self._models.append(model)

    def watch_log(self, log: Callable[[], list[dict[str, Any]]]) -> None:
        """Include what a Trainer has logged at the end, apart from times and evaluations."""
        self._logs.append(log)

    def _after_step(self, optimizer: Any, inputs: Any, options: Any) -> None:
        if not in_hook():
            self.steps.append({name: digest(value) for name, value in self._entries(optimizer)})

    def finish(self) -> None:
        """Add the digests after the training, and stop.

        Without gradients: validation of Lightning sets them to None, and the training without hooks does not validate.
        """
        self._handle.remove()
        self.steps.append({name: digest(value) for name, value in self._entries(None) if "gradient of" not in name})
        self.steps[-1] |= {f"log {number}": digest(logged_values(log())) for number, log in enumerate(self._logs)}

    def _entries(self, optimizer: Any) -> Iterator[tuple[str, Any]]:
        for number, model in enumerate(self._models):
            tensors = {**dict(model().named_parameters()), **dict(model().named_buffers())}
            for name, tensor in tensors.items():
                yield f"model {number}: {name}", tensor
                yield f"model {number}: gradient of {name}", tensor.grad if isinstance(tensor, nn.Parameter) else None
        if optimizer is not None:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for index, parameter in enumerate(parameters):
                yield f"{type(optimizer).__name__}: parameter {index}", parameter
                yield f"{type(optimizer).__name__}: state of {index}", optimizer.state.get(parameter)
            for index, group in enumerate(optimizer.param_groups):
                yield f"{type(optimizer).__name__}: group {index}", {**group, "params": len(group["params"])}
        yield "random generator of torch", torch.get_rng_state()
        yield "random generator of NumPy", np.random.get_state()[1:]
        yield "random generator of Python", random.getstate()


def logged_values(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries of a Trainer's log that two equal trainings share."""
    rows = [row for row in log if not any(name.startswith("eval_") for name in row)]
    left_out = ("time", "per_second")
    return [{name: value for name, value in row.items() if not name.endswith(left_out)} for row in rows]


def in_hook() -> bool:
    """Return whether the caller runs within a call of a hook, whose changes loopscope rolls back."""
    frame: Any = sys._getframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("loopscope.engine"):
            return True
        frame = frame.f_back
    return False


def digest(value: Any) -> str:
    """Return a digest of the bytes of all tensors in a value, and of its other contents as text."""
    state = blake2b(digest_size=8)
    for part in pieces(value):
        state.update(part)
    return state.hexdigest()


def pieces(value: Any) -> Iterator[bytes]:
    """Yield the bytes of a value, depth first."""
    if isinstance(value, Tensor):
        yield from tensor_pieces(value.detach())
    elif isinstance(value, np.ndarray):
        yield value.tobytes()
    elif isinstance(value, dict):
        for key, item in value.items():
            yield str(key).encode()
            yield from pieces(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from pieces(item)
    elif isinstance(value, (bool, int, float, str, type(None))):
        yield repr(value).encode()
    else:  # such as a subspace of an optimizer's own class; its address differs between processes
        yield type(value).__name__.encode()
        yield from pieces(getattr(value, "__dict__", None))


def tensor_pieces(tensor: Tensor) -> Iterator[bytes]:
    """Yield dtype, shape and bytes of a tensor, of its local shard, or of the tensors that it consists of."""
    yield f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    if is_traceable_wrapper_subclass(tensor):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # type: ignore[attr-defined]
        for part in parts:
            if isinstance(part, Tensor):  # the other parts of a DTensor are its mesh and its placements
                yield from tensor_pieces(part.detach())
    elif tensor.is_sparse:
        yield from tensor_pieces(tensor._indices())
        yield from tensor_pieces(tensor._values())
    else:
        yield tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
