"""Output never has control codes from plug-ins, and lost output never causes a traceback."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from loopscope import sinks, training_hooks
from loopscope.cli import main
from loopscope.hooks import HookPoint, MetricInfo, TrainingHook

from tests.framework.runs.small_experiment import Small, registered
from tests.support.cases import some_of

FILLED = (sinks, training_hooks)
COMMANDS = "\x1b[31m\x07\x9b2J\x00"


class Noisy(TrainingHook):
    __doc__ = f"Contains {COMMANDS} everywhere."
    name = "noisy"
    hook_points = {HookPoint.SNAPSHOT}

    def __init__(self, *, loud: str = f"yes{COMMANDS}") -> None:
        self.loud = loud

    def compute(self, ctx: Any) -> dict[str, Any]:
        if ctx.epoch:
            raise ValueError(COMMANDS)
        return {f"a{COMMANDS}": 1.0}

    def describe_metrics(self) -> list[MetricInfo]:
        return [MetricInfo(f"a{COMMANDS}", f"x{COMMANDS}", COMMANDS, f"Look {COMMANDS}.")]


class Loud(Small):
    __doc__ = f"Experiment {COMMANDS}."
    name = "loud"

    def sample(self, model: Any) -> str:
        return f"two lines\n{COMMANDS}"


RUN = ["run", "loud", "--strategy", "plain", "--hooks", "noisy", "--on-hook-error", "skip", "--output-dir", "{folder}"]


@pytest.mark.some_rows(3)
@pytest.mark.guarantee("mistakes-are-refused-early")
@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize(
    "words",
    [["list"], ["hooks"], ["hooks", "noisy"], ["run", "loud", "--help"], RUN, [*RUN, "--silent"], [*RUN, "--live"]],
    ids=" ".join,
)
def test_plugin_text_sends_no_terminal_control_codes(words: list[str], tmp_path: Path, capfd) -> None:
    """Every line of every command is printable, even if a plug-in contains control characters."""
    with registered(Noisy, Loud):
        assert main([word.format(folder=tmp_path) for word in words]) == 0
    for text in capfd.readouterr():
        assert all(line.isprintable() for line in text.split("\n")), ascii(text)


ENDS = {"closed": ">&-", "both closed": ">&- 2>&-", "gone": "| true", "full": "> /dev/full"}


@pytest.mark.slow_rows("list-closed", "list-full", "list-both closed")
@pytest.mark.some_rows(2)
@pytest.mark.guarantee("monitoring-changes-nothing")
@pytest.mark.process
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("words", some_of(["list", "--help"]))
def test_lost_standard_output_gives_no_traceback(words: str, end: str) -> None:
    """Standard output that is closed, full or unread never ends a run with a traceback."""
    line = f"set -o pipefail; {sys.executable} -m loopscope {words} {ENDS[end]}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    expected = "loopscope: standard output could not be written: No space left on device.\n" if end == "full" else ""
    assert (done.returncode, done.stderr) == (int(end == "full"), expected)
