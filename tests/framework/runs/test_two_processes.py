"""Two processes with the same run: the second checks the files again after it has the lock."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from loopscope.errors import UsageError
from loopscope.runs import Display

from tests.framework.checkpoints.crash_runs import BOTH_SINKS, run
from tests.framework.runs.small_experiment import Small, contents, read_json, registered, session

WORDS = ["run", "small", "--epochs", "1", "--save-checkpoints", "1", *BOTH_SINKS]


class Meanwhile(Display):
    """Lets another process train other-order after the end of plain."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self._folder, self._flags = folder, flags
        self.left: dict[str, bytes] = {}

    def strategy_ended(self, summary: Mapping[str, Any]) -> None:
        words = [*WORDS, "--strategy", "other-order", *self._flags, "--output-dir", str(self._folder)]
        assert run(words, self._folder.with_suffix(".log")) == 0
        self.left = contents(self._folder / "small/other-order")


@pytest.fixture(autouse=True)
def entries():
    with registered(Small):
        yield


@pytest.mark.some_rows(3)
@pytest.mark.guarantee("one-writer-per-run")
@pytest.mark.process
@pytest.mark.parametrize("option", [None, "resume", "overwrite"])
def test_run_finished_by_another_process_is_kept(option: str | None, tmp_path: Path) -> None:
    """A session whose strategy was finished in the meantime raises, and no file of it changes."""
    folder = tmp_path / "runs"
    mine = session(folder, epochs=1, strategies=["plain", "other-order"], **({option: True} if option else {}))
    mine.display = meanwhile = Meanwhile(folder)
    with pytest.raises(UsageError, match=r"process has written to .* The folder contains a finished run, which is"):
        mine.run()
    assert contents(folder / "small/other-order") == meanwhile.left
    assert read_json(folder / "small/plain/summary.json")["status"] == "completed"


@pytest.mark.some_rows(2)
@pytest.mark.process
@pytest.mark.parametrize("option", ["resume", "overwrite"])
def test_run_continued_by_another_process_is_kept(option: str, tmp_path: Path) -> None:
    """A session that wanted to resume or overwrite the run raises and asks to start again."""
    folder = tmp_path / "runs"
    session(folder, epochs=1, strategies=["other-order"], save_checkpoints=1).run()
    (folder / "small/other-order/summary.json").unlink()
    mine = session(folder, epochs=1, strategies=["plain", "other-order"], save_checkpoints=1, **{option: True})
    mine.display = meanwhile = Meanwhile(folder, "--resume")
    with pytest.raises(UsageError, match="which is left unchanged; start the command again"):
        mine.run()
    assert contents(folder / "small/other-order") == meanwhile.left


@pytest.mark.longer
def test_unchanged_run_is_overwritten_on_request(tmp_path: Path) -> None:
    session(tmp_path, epochs=1).run()
    assert [summary["status"] for summary in session(tmp_path, epochs=1, overwrite=True).run()] == ["completed"] * 3
