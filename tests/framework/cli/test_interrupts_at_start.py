"""Ctrl-C and SIGTERM while the command starts: one sentence, and the status of the signal."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.process
SIZES = "--p 11 --train-size 80 --test-size 40 --epochs 100000 --strategy stride"
CALL = "from loopscope.__main__ import main; sys.exit(main())"
COMMANDS = {
    "module": ["-m", "loopscope"],
    "program": ["-c", f"import sys; sys.argv[0] = 'loopscope'; {CALL}"],
    "script": ["-c", f"import sys; {CALL}"],
}
SENTENCES = {
    signal.SIGINT: ("loopscope: interrupted.\n", "loopscope: stopped by sigint.\n"),
    signal.SIGTERM: ("loopscope: stopped by sigterm.\n",),
}
"""The sentences of each signal in lower case: before a run, and in a run."""
SENTENCE = r"loopscope: (?:interrupted|[Ss]topped by \w+)\."
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


def when_started(command: list[str], output: Path) -> "subprocess.Popen[bytes]":
    """Start a command whose imports (option -v) and messages go to a file, and return once it has imported its package.

    A pipe without a reader would stop the command after 64 KiB, in the middle of a line.
    """
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-v", *command], stdout=subprocess.DEVNULL, stderr=file, cwd=output.parent
        )
    while b"import 'loopscope.cli'" not in output.read_bytes():
        assert process.poll() is None, output.read_text()[-2000:]
        time.sleep(0.01)
    return process


@pytest.mark.some_rows(2)
@pytest.mark.parametrize("seconds", MOMENTS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl_c", "sigterm"])
@pytest.mark.parametrize("command", COMMANDS)
def test_signal_at_start_gives_one_sentence(tmp_path, command, number, seconds):
    """No traceback is shown, wherever the command is; a script that calls main() is no exception."""
    words = [*COMMANDS[command], "run", "mod_arithmetic", *SIZES.split()]
    with default_interrupts():
        process = when_started(words, tmp_path / "output")
    time.sleep(seconds)
    process.send_signal(number)
    assert process.wait(120) == 128 + number
    output = (tmp_path / "output").read_text()
    assert len(re.findall(SENTENCE, output)) == 1, output[-2000:]
    # It starts a line, or continues one that -v had begun.
    sentences = re.findall(rf"^(?:(?:# |import |code object ).*)?({SENTENCE}\n)", output, re.MULTILINE)
    assert len(sentences) == 1, output[-2000:]
    assert sentences[0].lower() in SENTENCES[number]
    assert "Traceback" not in output


def test_script_handles_signals_again_afterwards():
    """Importing the module and calling main() leave the handlers of a script as they were."""
    read = "print(signal.getsignal(signal.SIGINT).__name__)"
    script = f"import signal; from loopscope.__main__ import main; main(); {read}"
    done = subprocess.run([sys.executable, "-c", script, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "default_int_handler"
