"""Functions of the accelerator's backend module, none of which every backend has.

``torch.cuda``, ``torch.xpu``, ``torch.mps``, ``torch.mtia`` and third-party backends offer different functions:
``torch.mps`` has neither ``is_initialized`` nor ``manual_seed_all``.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .errors import UsageError

# Cached, since torch may query the driver each time, and every call of a hook reads the state of the generators.
is_present = cache(torch.accelerator.is_available)
UNSUPPORTED = (AttributeError, NotImplementedError, RuntimeError, TypeError)
"""Errors that a backend raises for a function that it does not have."""


def devices_in_use() -> list[torch.device]:
    """List the accelerator devices whose random generators exist in this process and can be read."""
    kind = torch.accelerator.current_accelerator() if is_present() else None
    if kind is None:
        return []
    # An unused device has no generator; reading one would create a context of hundreds of MiB on it. A backend without
    # is_initialized() counts as used.
    is_initialized: Callable[[], bool] | None = getattr(_backend(kind.type), "is_initialized", None)
    if is_initialized is not None and not is_initialized():
        return []
    devices = [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]
    return [device for device in devices if _has_readable_generator(device)]


def generator_state(device: torch.device) -> Tensor:
    """Return the state of a device's random generator, a tensor of bytes."""
    state: Tensor = _backend(device.type).get_rng_state(device)
    return state


def set_generator_state(device: torch.device, state: Tensor) -> None:
    """Set the state of a device's random generator to a result of :func:`generator_state`."""
    _backend(device.type).set_rng_state(state, device)


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed the random generators of all devices of the kind of ``device``."""
    module = _backend(device.type)
    for name in ("manual_seed_all", "manual_seed"):
        if hasattr(module, name):
            getattr(module, name)(seed)
            return
    for used in devices_in_use():
        set_generator_state(used, torch.Generator(used).manual_seed(seed).get_state())


def refuse_unprotected(devices: set[torch.device]) -> None:
    """Check that the random generators of the devices of a model can be isolated.

    Raises:
        UsageError: for a device of the accelerator in use whose generator cannot be read.
    """
    kind = torch.accelerator.current_accelerator() if is_present() else None
    for device in sorted(devices, key=str):
        if kind is not None and device.type == kind.type and not _has_readable_generator(device):
            raise UsageError(
                f"torch.{device.type} cannot read the random generator of {device}, so random numbers that hooks draw "
                "there would change the run; train on the CPU, or with a version of torch that can."
            )


def _backend(kind: str) -> Any:
    """Return the module of a backend, such as ``torch.cuda``, or an object without functions if there is none."""
    try:
        return torch.get_device_module(kind)
    except RuntimeError:
        return object()


@cache
def _has_readable_generator(device: torch.device) -> bool:
    try:
        set_generator_state(device, generator_state(device))
    except UNSUPPORTED:
        return False
    return True
