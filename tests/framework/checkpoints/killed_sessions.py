"""Sessions of the experiment small that stop as if killed: a copy of their folder at one step is all that remains."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loopscope.loops import NoProgress
from loopscope.runs import Display, Session
from loopscope.state import LoopState

from tests.framework.runs.small_experiment import Small, session


class Killed(BaseException):
    """Ends a run whose folder has been copied."""


class Killing(NoProgress):
    """Copies a folder after a step, in the state that a kill would leave, and ends the run."""

    def __init__(self, step: int, folder: Path, remains: Path) -> None:
        self._step, self._folder, self._remains = step, folder, remains

    def step(self, loop: LoopState) -> None:
        if loop.step >= self._step:
            copy(self._folder, self._remains)
            raise Killed


class KillingDisplay(Display):
    """A display without output that kills the run after a step."""

    def __init__(self, progress: Killing) -> None:
        self._progress = progress

    def strategy_started(self, *of_the_run: Any) -> Any:
        return self._progress


def copy(folder: Path, remains: Path) -> None:
    """Copy a folder during checkpoint writing; try again if a checkpoint was renamed in the meantime."""
    while True:
        shutil.rmtree(remains, ignore_errors=True)
        try:
            shutil.copytree(folder, remains)
            return
        except (OSError, shutil.Error):
            continue


def kill_after(step: int, folder: Path, remains: Path, runner: type[Small] = Small, **options: Any) -> bool:
    """Run or resume in ``folder`` up to ``step``, copy it to ``remains``, and return whether the step was reached."""
    return kill(session(folder, runner, **{"strategies": ["plain"], **options}), step, folder, remains)


def kill(killed: Session, step: int, folder: Path, remains: Path) -> bool:
    """Run a session in ``folder`` up to ``step``, copy it to ``remains``, and return whether the step was reached."""
    killed.display = KillingDisplay(Killing(step, folder, remains))
    try:
        killed.run()
    except Killed:
        return True
    copy(folder, remains)
    return False


Change = Callable[[bytes], bytes]


def flipped(place: float) -> Change:
    """Return a function that flips a bit at a fraction of a file."""

    def change(data: bytes) -> bytes:
        index = min(len(data) - 1, int(len(data) * place))
        return data[:index] + bytes([data[index] ^ 16]) + data[index + 1 :]

    return change


def change_file(path: Path, change: Change) -> None:
    path.write_bytes(change(path.read_bytes()))
