"""Deterministic mode: the settings under which torch computes the same bits again, put back afterwards."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import LoopscopeError
from .flags import GlobalFlags, set_deterministic_algorithms

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
MISSING = " does not have a deterministic implementation"


class NotDeterministicError(LoopscopeError):
    """An operation has no deterministic implementation, so it does not run in deterministic mode."""


@contextmanager
def deterministic(*, on: bool) -> Iterator[None]:
    """Have torch use deterministic algorithms in the body.

    An operation without one raises there, which leaves the body as a :class:`NotDeterministicError`.

    Memory is not filled before use, as torch otherwise does in this mode: that costs a pass over every new tensor, and
    helps only code that reads what it never wrote.
    """
    if not on:
        yield
        return
    flags = GlobalFlags()
    saved, workspace = flags.read_all(), os.environ.get(CUBLAS)
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    try:
        set_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        os.environ.setdefault(CUBLAS, ":4096:8")  # read by CUDA's matrix products when they are first used
        yield
    except RuntimeError as error:
        told = explained(error)
        if told is error:
            raise
        raise told from error
    finally:
        flags.restore(saved)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
        if workspace is None:
            os.environ.pop(CUBLAS, None)


def explained(error: BaseException) -> BaseException:
    """Return the error that names the remedy, if torch refused an operation in deterministic mode; else the same."""
    operation, refused, _ = str(error).partition(MISSING)
    if not refused or not isinstance(error, RuntimeError):
        return error
    return NotDeterministicError(
        f"{operation} has no deterministic implementation here, so its results may differ from run to run: use another "
        "operation, or start the run with --no-determinism."
    )


def settings() -> Mapping[str, Any]:
    """Return the settings that decide whether the same bits come out again, as plain values."""
    return {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cublas_workspace": os.environ.get(CUBLAS, "not set"),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
