"""The index of a folder: the same answers with and without it, in every state of its file."""

import os
import sqlite3
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from loopscope.checkpoints import run_lock
from loopscope.cli import main
from loopscope.doctor import Detector, DetectorRegistry, Finding, History
from loopscope.many_runs import NAME, indexed_runs, run_index, run_values
from loopscope.report import FoundRun
from loopscope.runs import READ

from tests.framework.many_runs.sweeps import damage, sweep_of

COMMANDS = ("ls", "ls --json --all", "doctor --all", "doctor --json --all", "compare --all", "compare --json --all")
COMMANDS += ("compare --json --all --metrics **",)
Answer = Callable[[str], tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _small_folders_have_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Index folders of two runs, also if they have just been written."""
    monkeypatch.setattr(run_index, "FEWEST", 2)
    monkeypatch.setattr(run_index, "SETTLED", 0.0)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    return sweep_of(tmp_path / "sweep")


@pytest.fixture
def answer(sweep: Path, capsys) -> Answer:
    """Return the status and the output of a command about the folder."""

    def answered(command: str) -> tuple[int, str, str]:
        name, *options = command.split()
        status = main([name, str(sweep), *options])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return answered


def without_index(answer: Answer, command: str, sweep: Path) -> tuple[int, str, str]:
    """Return the answer of a command that uses no index."""
    (sweep / NAME).unlink(missing_ok=True)
    (sweep / NAME).mkdir()
    try:
        return answer(command)
    finally:
        (sweep / NAME).rmdir()


def refuse(*arguments: object, **options: object) -> None:
    raise AssertionError("a run was read")


@pytest.mark.parametrize("is_damaged", [False, True])
@pytest.mark.parametrize("command", COMMANDS)
def test_answers_are_equal_with_an_index(command: str, is_damaged: bool, sweep: Path, answer: Answer) -> None:
    if is_damaged:
        damage(sweep)
    expected = without_index(answer, command, sweep)
    assert [answer(command), answer(command)] == [expected, expected]
    assert (sweep / NAME).is_file()


@pytest.mark.parametrize("command", COMMANDS)
def test_second_answer_reads_no_record(command: str, sweep: Path, answer: Answer, monkeypatch) -> None:
    first = answer(command)
    for name in ("inspect_run", "read_history", "scan", "first_difference"):
        monkeypatch.setattr(run_values, name, refuse)
    monkeypatch.setattr(FoundRun, "_read", refuse)
    assert answer(command) == first


@pytest.mark.parametrize("command", ["ls --json --all", "doctor --json --all", "compare --json --all"])
def test_changed_files_are_read_again(command: str, sweep: Path, answer: Answer) -> None:
    """Rows are appended, and a file is changed without a change of its size and time."""
    answer(command)
    record = sweep / "killed/exp/healthy/healthy.jsonl"
    row = '{"epoch":0,"step":9,"hook_point":"POST_EPOCH","training_metrics/val_acc":0.25,"training_checks/loss":NaN}\n'
    with record.open("a") as file:
        file.write(row)
    changed = answer(command)
    assert changed == without_index(answer, command, sweep)
    answer(command)
    times = record.stat()
    record.write_text(record.read_text().replace("NaN", "9.5").replace("0.25", "0.75"))
    os.utime(record, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert answer(command) == without_index(answer, command, sweep)


def replaced_by_text(path: Path) -> None:
    path.write_text("no database" * 1000)


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def overwritten(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def with_another_table(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as database:
        database.execute("CREATE VIEW entries AS SELECT 1 AS run, 2 AS kind, 3 AS state, 4 AS value")


def with_other_values(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("UPDATE entries SET value = '[]' WHERE run LIKE '%a%'")
        database.execute("UPDATE entries SET value = '{\"record\": {}}' WHERE run LIKE '%b%'")
        database.execute("UPDATE entries SET value = x'ff' WHERE kind = 'length'")


FAULTS = (replaced_by_text, cut_off, overwritten, emptied, with_another_table, with_other_values)


@pytest.mark.parametrize("spoil", FAULTS)
def test_damaged_index_is_computed_again(spoil: Callable[[Path], None], sweep: Path, answer: Answer) -> None:
    expected = [answer(command) for command in COMMANDS]
    spoil(sweep / NAME)
    assert [answer(command) for command in COMMANDS] == expected
    assert [answer(command) for command in COMMANDS] == expected


def test_locked_index_is_not_waited_for(sweep: Path, answer: Answer, monkeypatch) -> None:
    monkeypatch.setattr(run_index, "PATIENCE", 0.01)
    expected = answer("doctor --all")
    database = sqlite3.connect(sweep / NAME, isolation_level=None)
    database.execute("BEGIN EXCLUSIVE")
    assert answer("doctor --all") == expected
    database.close()


def test_link_in_place_of_an_index(sweep: Path, answer: Answer, tmp_path: Path) -> None:
    """Nothing is written where the link leads."""
    target = tmp_path / "target"
    (sweep / NAME).symlink_to(target)
    status, *_ = answer("doctor --all")
    assert (status, target.exists()) == (0, False)


def test_other_code_has_other_values(sweep: Path, answer: Answer, monkeypatch) -> None:
    first = answer("doctor --all")
    monkeypatch.setattr(run_index, "code_version", lambda: "another")
    monkeypatch.setattr(run_values, "diagnose", lambda history: run_values.Diagnosis())
    assert answer("doctor --all") != first


def test_runs_in_progress_are_read_each_time(sweep: Path, answer: Answer) -> None:
    folder = sweep / "killed/exp/healthy"
    with run_lock(folder):
        assert "running" in answer("ls")[1]
        assert "running" in answer("ls")[1]
    assert "running" not in answer("ls")[1]


def test_recent_changes_are_not_indexed(sweep: Path, monkeypatch) -> None:
    monkeypatch.setattr(run_index, "SETTLED", 600.0)
    with indexed_runs() as runs:
        found = runs.find(sweep, READ)
        assert all(runs.index_of(run.path).state_of(run.path) is None for run in found)


def test_entries_of_removed_runs_are_removed(sweep: Path, answer: Answer) -> None:
    answer("ls")
    (sweep / "twins").rename(sweep.parent / "elsewhere")
    answer("ls")
    with sqlite3.connect(sweep / NAME) as database:
        runs = {bytes(run).decode() for (run,) in database.execute("SELECT run FROM entries")}
    assert runs
    assert not [run for run in runs if run.startswith("twins")]


class BrokenDetector(Detector):
    """A detector that raises."""

    name = "broken-for-the-index"

    def detect(self, history: History) -> list[Finding]:
        raise RuntimeError("out of order")


def test_warnings_are_repeated(sweep: Path, answer: Answer, monkeypatch) -> None:
    """A diagnosis with a warning is not kept, so that each answer has the warning."""
    monkeypatch.setitem(DetectorRegistry._entries, BrokenDetector.name, BrokenDetector)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        errors = [answer("doctor --all")[2].count("out of order") for _ in range(2)]
    assert errors[0] == errors[1] > 0


def test_small_folders_have_no_index(sweep: Path, answer: Answer, monkeypatch) -> None:
    monkeypatch.setattr(run_index, "FEWEST", 100)
    answer("ls")
    assert not (sweep / NAME).exists()


@pytest.mark.slow
@pytest.mark.process
def test_processes_share_an_index(sweep: Path, answer: Answer) -> None:
    """Four processes answer at once while the index is built."""
    start = (
        "from loopscope.many_runs import run_index; run_index.FEWEST, run_index.SETTLED, run_index.INTERVAL = 2, 0, 0"
    )
    code = f"{start}; import sys; from loopscope.cli import main; sys.exit(main(['doctor', {str(sweep)!r}, '--all']))"
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = {process.communicate()[0] for process in processes}
    assert outputs == {answer("doctor --all")[1]}
    with sqlite3.connect(sweep / NAME) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_doctor_takes_a_folder_of_experiments(sweep: Path, answer: Answer) -> None:
    out = answer("doctor --all")[1]
    assert all(f"{sweep}/{name}: " in out for name in ("killed/exp/healthy", "faulty/exp/faulty"))
