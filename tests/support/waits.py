"""Counter of the host's waits for a device."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tests.support.transfers import TransferCount

WAITED = "called a synchronizing CUDA operation"
"""Text of torch's warnings in its synchronisation debug mode."""


@dataclass
class Waits:
    """The number of waits in the body of :func:`count_waits`, set when the body ends."""

    count: int = 0


@contextmanager
def count_waits(device: torch.device) -> Iterator[Waits]:
    """Count the host's waits in the body: on a GPU by torch's own warnings, elsewhere by the transfers to the host."""
    waits = Waits()
    if device.type != "cuda":
        with TransferCount() as transfers:
            yield waits
        waits.count = transfers.count
        return
    previous_mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(previous_mode)
    waits.count = sum(WAITED in str(warning.message) for warning in caught)
