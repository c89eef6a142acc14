"""Ctrl-C and SIGTERM while the command starts: one sentence, and the status of the signal."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

pytestmark = pytest.mark.process
SIZES = "--p 11 --train-size 80 --test-size 40 --epochs 100000 --strategy stride"
CALL = "from loopscope.__main__ import main; sys.exit(main())"
COMMANDS = {
    "module": ["-m", "loopscope"],
    "program": ["-c", f"import sys; sys.argv[0] = 'loopscope'; {CALL}"],
    "script": ["-c", f"import sys; {CALL}"],
}
# Seconds after the first import of the command: while torch is imported, while the registries are filled, in the run.
MOMENTS = [0.0, 0.4, *[pytest.param(moment, marks=pytest.mark.slow) for moment in (0.1, 0.2, 0.8, 1.2, 1.6, 2.5, 4.5)]]


@contextmanager
def default_interrupts() -> Iterator[None]:
    """Let processes that the body starts receive SIGINT, which background processes ignore."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@pytest.mark.parametrize("seconds", MOMENTS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl_c", "sigterm"])
@pytest.mark.parametrize("command", COMMANDS)
def test_signal_at_start_gives_one_sentence(tmp_path, command, number, seconds):
    """No traceback is shown, wherever the command is; a script that calls main() is no exception."""
    words = [*COMMANDS[command], "run", "mod_arithmetic", *SIZES.split()]
    with default_interrupts():
        # -v prints the imports, which show that the command has started.
        process = subprocess.Popen(
            [sys.executable, "-v", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=tmp_path
        )
    messages = iter(process.stderr or ())
    assert any("import 'loopscope.cli'" in line for line in messages)
    time.sleep(seconds)
    process.send_signal(number)
    _, rest = process.communicate(timeout=120)
    printed = [line for line in rest.splitlines() if not line.startswith(("#", "import ", "code object"))]
    assert process.returncode == 128 + number, printed[-20:]
    assert "Traceback" not in rest
    assert any(line.startswith("loopscope: ") for line in printed)


def test_script_handles_signals_again_afterwards():
    """Importing the module and calling main() leave the handlers of a script as they were."""
    read = "print(signal.getsignal(signal.SIGINT).__name__)"
    script = f"import signal; from loopscope.__main__ import main; main(); {read}"
    done = subprocess.run([sys.executable, "-c", script, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "default_int_handler"
