"""Settings of a script that change results: left in calls of loopscope's own hooks, entered again in passes.

These are the default dtype, the default device and autocast. A script may set them for its whole training, while hooks
that come with loopscope compute in float32, on the devices of their tensors. Autocast's cache of cast weights, which
cannot be read or restored, is left as it is: passes within the script's autocast do not use it.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import call
from typing import Any, NamedTuple

import torch
from torch.utils._device import DeviceContext

from .flags import QUICK_FLAGS

# Any, since the stubs of torch._C lack these functions, for which torch has no public ones.
_C: Any = torch._C
_MODES, _DEVICE = QUICK_FLAGS["function modes"], QUICK_FLAGS["default device"]

DEFAULT_SETTINGS: dict[Callable[[], Any], Any] = {
    torch.get_default_dtype: torch.float32,
    _C._len_torch_function_stack: 0,  # the mode of a default device is on this stack
    _C._is_any_autocast_enabled: False,
}
"""C functions that read the settings, 0.2 µs together, and their results if the script has changed none of them."""


class _Settings(NamedTuple):
    dtype: torch.dtype
    device: Any
    modes: tuple[Any, ...]
    """The entered function modes; that of the default device is one of them."""
    autocast: tuple[str, ...]
    """The kinds of devices on which autocast is enabled."""

    @classmethod
    def read(cls) -> "_Settings":
        kinds = _C._autocast_supported_devices() if _C._is_any_autocast_enabled() else ()
        enabled = tuple([kind for kind in kinds if torch.is_autocast_enabled(kind)])
        return cls(torch.get_default_dtype(), _DEVICE.get(), _MODES.get(), enabled)

    def neutral(self) -> "_Settings":
        modes = tuple([mode for mode in self.modes if not isinstance(mode, DeviceContext)])
        return _Settings(torch.float32, (None, None), modes, ())

    def enter(self, present: "_Settings") -> None:
        """Set the values that differ from the present ones."""
        if self.dtype is not present.dtype:
            torch.set_default_dtype(self.dtype)
        if self.modes != present.modes:
            _DEVICE.put(self.device)
            _MODES.put(self.modes)
        for kind in {*self.autocast} ^ {*present.autocast}:
            torch.set_autocast_enabled(kind, kind in self.autocast)


class _Left(threading.local):
    """The settings of the script that were left in this thread, the innermost last."""

    def __init__(self) -> None:
        self.settings: list[_Settings] = []


_LEFT = _Left()


@contextmanager
def neutral_settings() -> Iterator[None]:
    """Leave the script's settings for the body, and enter them again afterwards."""
    settings = _Settings.read()
    neutral = settings.neutral()
    _LEFT.settings.append(settings)
    neutral.enter(settings)
    try:
        yield
    finally:
        _LEFT.settings.pop()
        settings.enter(_Settings.read())


@contextmanager
def script_settings() -> Iterator[None]:
    """Run the body, a pass of the script's code, with the script's settings, but without autocast's cache.

    A pass would use casts of weights that were made before an update, or leave casts without a graph to the training.
    """
    left = _LEFT.settings
    if not left and [*map(call, DEFAULT_SETTINGS)] == [*DEFAULT_SETTINGS.values()]:
        yield
        return
    present, uses_cache = _Settings.read(), torch.is_autocast_cache_enabled()
    if left:
        left[-1].enter(present)
    try:
        if _C._is_any_autocast_enabled():
            torch.set_autocast_cache_enabled(False)
        yield
    finally:
        torch.set_autocast_cache_enabled(uses_cache)
        if left:
            present.enter(_Settings.read())
