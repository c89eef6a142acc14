"""Process-wide torch settings on which a run's bytes depend: read quickly, put back exactly."""

from collections.abc import Callable
from typing import Any

import torch

from framework.random_streams import accelerator_devices


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _pop_modes(length: int, current: Callable[[], int], pop: Callable[[], Any]) -> None:
    while current() > length:
        pop()


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return (lambda: getattr(owner, name)), (lambda value: setattr(owner, name, value))


_C: Any = torch._C
_FLAGS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "grad mode": (torch.is_grad_enabled, _C._set_grad_enabled),
    "CPU autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on)),
    "CPU autocast dtype": (
        lambda: torch.get_autocast_dtype("cpu"),
        lambda dtype: torch.set_autocast_dtype("cpu", dtype),
    ),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "deterministic algorithms": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        _set_deterministic,
    ),
    "float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "flash attention": (_C._get_flash_sdp_enabled, _C._set_sdp_use_flash),
    "memory-efficient attention": (_C._get_mem_efficient_sdp_enabled, _C._set_sdp_use_mem_efficient),
    "math attention": (_C._get_math_sdp_enabled, _C._set_sdp_use_math),
    "oneDNN": (_C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
    "function modes": (
        _C._len_torch_function_stack,
        lambda length: _pop_modes(length, _C._len_torch_function_stack, _C._pop_torch_function_stack),
    ),
    "dispatch modes": (
        _C._len_torch_dispatch_stack,
        lambda length: _pop_modes(length, _C._len_torch_dispatch_stack, _C._pop_torch_dispatch_stack),
    ),
}
_ACCELERATOR_FLAGS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "accelerator autocast": (
        lambda: torch.is_autocast_enabled(accelerator_devices()[0].type),
        lambda on: torch.set_autocast_enabled(accelerator_devices()[0].type, on),
    ),
    "cuDNN benchmark": _attribute(torch.backends.cudnn, "benchmark"),
    "cuDNN deterministic": _attribute(torch.backends.cudnn, "deterministic"),
}


class GlobalFlags:
    """The settings as one tuple."""

    def __init__(self) -> None:
        flags = {**_FLAGS, **(_ACCELERATOR_FLAGS if accelerator_devices() else {})}
        self.names = tuple(flags)
        self._getters = tuple(get for get, _ in flags.values())
        self._setters = tuple(put for _, put in flags.values())

    def read(self) -> tuple[Any, ...]:
        """Return every setting, in the order of ``names``."""
        return tuple([get() for get in self._getters])

    def restore(self, saved: tuple[Any, ...]) -> None:
        """Put back the settings that differ from ``saved``."""
        for put, now, before in zip(self._setters, self.read(), saved, strict=True):
            if now != before:
                put(before)

    def differences(self, saved: tuple[Any, ...]) -> list[str]:
        """Name the settings that differ from ``saved``."""
        return [name for name, now, before in zip(self.names, self.read(), saved, strict=True) if now != before]
