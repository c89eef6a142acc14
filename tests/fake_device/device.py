"""The simulated accelerator ``fake``: its registration in a process, its counts, and tests that run on it.

Registration lasts until the process ends: ``torch.accelerator`` then names the device. Tests therefore run in separate
processes, each a fork of one server that has imported everything (:func:`on_fake_device`).
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.fake_device import building
from tests.support.processes import own_process

BACKEND: ModuleType | None = None
SYNCHRONISING = ("items", "copies to the host", "copies to the device", "waits")
"""The counts of the backend at which the host waits for the device."""


def backend_module(backend: ModuleType) -> ModuleType:
    """Return the module ``torch.fake``, with the functions that torch requires and no others.

    It has no statistics of memory, no streams and no events.
    """
    module = ModuleType("torch.fake")
    generator = backend.default_generator()

    def get_rng_state(device: Any = "fake") -> torch.Tensor:
        return generator.get_state()

    def set_rng_state(state: torch.Tensor, device: Any = "fake") -> None:
        generator.set_state(state.clone())

    def manual_seed_all(seed: int) -> None:
        generator.manual_seed(seed)

    functions: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "manual_seed": manual_seed_all,
        "manual_seed_all": manual_seed_all,
    }
    vars(module).update(functions)
    return module


def register() -> None:
    """Register the device in this process, once; nothing removes it again."""
    global BACKEND
    if BACKEND is not None:
        return
    BACKEND = building.load_backend(building.library())
    torch.utils.rename_privateuse1_backend("fake")
    BACKEND.register_hooks()
    torch._register_device_module("fake", backend_module(BACKEND))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    # As on CUDA, ``model.to(device)`` keeps the parameters, so that tied ones stay tied.
    torch.__future__.set_swap_module_params_on_conversion(True)


class Synchronisations:
    """The number of times that the host waited for the device, by kind."""

    def __init__(self) -> None:
        self.by_kind: dict[str, int] = {}

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


@contextmanager
def count_synchronisations() -> Iterator[Synchronisations]:
    """Count the synchronisations of the body."""
    assert BACKEND is not None
    before, result = BACKEND.counts(), Synchronisations()
    yield result
    after = BACKEND.counts()
    result.by_kind = {kind: after[kind] - before[kind] for kind in SYNCHRONISING if after[kind] != before[kind]}


def on_fake_device(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a separate process with the device; skip it where the device cannot be compiled."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        register()
        test(**fixtures)

    isolated = own_process(run)

    @functools.wraps(isolated)
    def build_and_run(**fixtures: Any) -> None:
        if missing := building.missing_tool():
            pytest.skip(f"The simulated accelerator cannot be compiled: {missing} is missing.")
        building.library()
        isolated(**fixtures)

    # The process imports the test by its name and calls what own_process() wrapped.
    build_and_run.__wrapped__ = run  # type: ignore[attr-defined]
    return pytest.mark.process(build_and_run)
