"""Tests in a separate process: long ones, and those that change state that a process has only once."""

import functools
import importlib
import multiprocessing
import os
import random
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch

PRELOADED = [
    *("tests.support.ranks", "tests.framework.checkpoints.crash_runs", "torch.distributed.fsdp"),
    *("torch.distributed.tensor.parallel", "torch._dynamo"),  # every optimizer imports the latter
]
"""Modules that the fork server imports; importing them in each process would take seconds."""


def fork_server() -> Any:
    """Return the context of a fork server that has imported everything and run nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def own_process(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a separate process, with the warning filters and the working directory of this one.

    Its fixtures must be picklable: paths and parameters, no ``monkeypatch`` and no ``capsys``.
    """

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        receiver, sender = fork_server().Pipe(duplex=False)
        surroundings = dict(os.environ), os.getcwd(), [*warnings.filters]
        call = (test.__module__, test.__name__, fixtures, surroundings, sender)
        process = fork_server().Process(target=_run, args=call)
        process.start()
        sender.close()
        try:
            failure = receiver.recv()
        except EOFError:
            failure = f"The process of the test exited with status {process.exitcode}."
        process.join()
        if failure:
            pytest.fail(failure, pytrace=False)

    return pytest.mark.process(run)


def _run(module: str, name: str, fixtures: dict[str, Any], surroundings: tuple[Any, ...], sender: Connection) -> None:
    environment, folder, filters = surroundings
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(1)
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    try:
        # Without pytest, importing a test module warns that its assertions cannot be rewritten.
        test = getattr(importlib.import_module(module), name).__wrapped__
        warnings.filters[:] = filters
        test(**fixtures)
    except BaseException:
        sender.send(traceback.format_exc())
    else:
        sender.send("")
