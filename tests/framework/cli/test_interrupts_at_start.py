"""Ctrl-C while the command starts: one sentence and status 130."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

pytestmark = pytest.mark.process
WORDS = [
    "run",
    "mod_arithmetic",
    "--p",
    "11",
    "--train-size",
    "80",
    "--test-size",
    "40",
    "--epochs",
    "100000",
    "--strategy",
    "stride",
]
MODULE = ["-m", "loopscope"]
SCRIPT = ["-c", "import sys; sys.argv[0] = 'loopscope'; from loopscope.__main__ import main; sys.exit(main())"]
SLOW = pytest.mark.slow
# Seconds after the first line of the module: while torch is imported, while the registries are filled, in the run.
MOMENTS = [0.0, 0.4, *[pytest.param(moment, marks=SLOW) for moment in (0.1, 0.2, 0.8, 1.2, 1.6, 2.0, 3.0, 4.5)]]


@contextmanager
def restored_interrupts() -> Iterator[None]:
    """Let processes that the body starts receive SIGINT, which background processes ignore."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@pytest.mark.parametrize("seconds", MOMENTS)
@pytest.mark.parametrize("command", [MODULE, SCRIPT], ids=["module", "script"])
def test_interrupt_at_start_is_one_sentence(tmp_path, command, seconds):
    """No traceback is shown, wherever the command is."""
    with restored_interrupts():
        # -v prints the imports, which show that the module has started.
        process = subprocess.Popen(
            [sys.executable, "-v", *command, *WORDS],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
    messages = iter(process.stderr or ())
    assert any("framework/cli" in line or "loopscope/cli" in line for line in messages)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=120)
    printed = [line for line in rest.splitlines() if not line.startswith(("#", "import ", "code object"))]
    assert process.returncode == 130, printed[-20:]
    assert "Traceback" not in rest
    assert any(line.startswith("loopscope: ") for line in printed)
