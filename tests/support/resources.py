"""Limits on the resources of a test: those that its markers name, and processor time.

A test that starts a process, ranks or the compiler carries the marker of that resource. Without it the start raises,
and the test fails even if the code under test catches the exception. All other tests are quick tests, whose processor
time ``--quick-limit`` bounds (``make fast`` passes it). Neither shared fixtures nor a test that is the first in its
process to import a library count towards the limit. Tests of more than a tenth of a second carry the marker ``longer``,
and ``make fast`` leaves them out.
"""

import functools
import multiprocessing.process
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed

EXEMPT = {"slow", "gpu", "xla"}
"""Markers of unlimited tests."""
RESOURCES = {"process": {"process", "ranks", "compile", "browser"}, "ranks": {"ranks"}, "compile": {"compile"}}
"""The guarded resources and the markers that allow them: ranks are processes; compilers and browsers start them."""
UNTIMED = {"process", "ranks", "compile", "browser", "trainer", "statistical"} | EXEMPT
"""Markers whose tests may take longer than a quick one."""
FIRST_IMPORT = 10
"""The number of modules imported by a test above which its time is not limited, because later tests benefit."""


class ResourceGuard:
    """Checks which resources the running test uses, and its processor time.

    The guarded functions are wrapped once per session; between tests everything is allowed.
    """

    def __init__(self) -> None:
        self.quick_limit: float | None = None
        """Seconds of processor time that a quick test may take; None for no limit."""
        self._markers: set[str] | None = None
        self._refused: list[str] = []
        self._started = self._uncounted = 0.0
        self._imported = 0
        self._watches_dynamo = False

    def install(self) -> None:
        """Wrap the functions that start processes, ranks and the compiler."""
        for owner, name in ((subprocess.Popen, "__init__"), (os, "fork"), (os, "forkpty"), (os, "posix_spawn")):
            self._guard(owner, name, "process")
        self._guard(multiprocessing.process.BaseProcess, "start", "process")
        self._guard(torch, "compile", "compile")
        self._guard_ranks()

    def begin(self, item: pytest.Item) -> None:
        """Start to check a test against its markers, from its set-up on."""
        self._markers = {marker.name for marker in item.iter_markers()}
        self._refused, self._uncounted = [], 0.0
        self._watch_dynamo()
        self._imported = len(sys.modules)
        self._started = time.process_time()

    def end(self) -> None:
        """Allow everything again after a test's tear-down; fail the test if it exceeded its limits."""
        seconds = time.process_time() - self._started - self._uncounted
        markers, self._markers = self._markers or set(), None
        if self._refused:
            pytest.fail(self._refused[0], pytrace=False)
        is_timed = not markers & UNTIMED and len(sys.modules) - self._imported < FIRST_IMPORT
        if is_timed and self.quick_limit is not None and seconds > self.quick_limit:
            pytest.fail(
                f"This quick test took {seconds:.1f} s of processor time; the limit is {self.quick_limit:g} s. "
                "Make it smaller, or mark it slow.",
                pytrace=False,
            )

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Exclude the processor time of the body from the test's."""
        started, previous = time.process_time(), self._uncounted
        try:
            yield
        finally:
            self._uncounted = previous + time.process_time() - started

    def _require(self, resource: str, action: str) -> None:
        """Fail a test that uses a resource without the marker for it."""
        if self._markers is not None and not self._markers & (RESOURCES[resource] | EXEMPT):
            message = f"{action} in a test without the marker {resource!r}: add @pytest.mark.{resource}."
            self._refused.append(message)
            pytest.fail(message)

    def _guard(self, owner: Any, name: str, resource: str) -> None:
        original = getattr(owner, name)
        action = f"{getattr(owner, '__name__', owner)}.{name} was called"

        @functools.wraps(original)
        def guarded(*args: Any, **options: Any) -> Any:
            self._require(resource, action)
            return original(*args, **options)

        setattr(owner, name, guarded)

    def _guard_ranks(self) -> None:
        original = torch.distributed.init_process_group

        @functools.wraps(original)
        def guarded(*args: Any, **options: Any) -> None:
            if int(options.get("world_size", os.environ.get("WORLD_SIZE", 1))) > 1:
                self._require("ranks", "A process group of several ranks was made")
            original(*args, **options)

        torch.distributed.init_process_group = guarded

    def _watch_dynamo(self) -> None:
        """Guard compilations that bypass ``torch.compile``, once the compiler has been imported."""
        if not self._watches_dynamo and "torch._dynamo" in sys.modules:
            self._watches_dynamo = True
            from torch._dynamo.callback import callback_handler

            callback_handler.register_start_callback(lambda *_: self._require("compile", "A compilation began"))
