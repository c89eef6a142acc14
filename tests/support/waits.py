"""Counts how often the host waits for a device."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tests.support.transfers import TransferCount

WAITED = "called a synchronizing CUDA operation"
"""What torch warns of in its synchronisation debug mode."""


@dataclass
class Waits:
    """How often the host waited in the body of :func:`count_waits`; counted when it ends."""

    count: int = 0


@contextmanager
def count_waits(device: torch.device) -> Iterator[Waits]:
    """Count in the body: on a GPU by torch's own warnings, elsewhere what would be waits if it were one."""
    waits = Waits()
    if device.type != "cuda":
        with TransferCount() as transfers:
            yield waits
        waits.count = transfers.count
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(before)
    waits.count = sum(WAITED in str(warning.message) for warning in caught)
