"""Errors of experiments are reported with the lines of the user, and the printed resume command works."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from loopscope.cli import main, training_commands
from loopscope.data import TorchLoader
from loopscope.errors import this_command, user_code_lines
from torch.utils.data import DataLoader

from tests.framework.runs.small_experiment import Small, read_json, registered

FILE = re.escape(Path(__file__).name)


def broken(name: str, method: str) -> type[Small]:
    def fail(*arguments, **options):
        return [][3]

    return type("Broken", (Small,), {"name": name, method: fail})


@pytest.mark.longer
@pytest.mark.guarantee("mistakes-are-refused-early")
@pytest.mark.parametrize("method", ["compute_loss", "evaluate", "build_model", "build_loader", "should_stop"])
def test_experiment_error_shows_user_code_line(method, tmp_path: Path, capfd) -> None:
    """The error is one line with the file and source line of the user, and --traceback prints the traceback."""
    words = ["run", "broken", "--strategy", "plain", "--output-dir", str(tmp_path), "--no-console-output"]
    with registered(broken("broken", method)):
        assert main(words) == 1
        error = capfd.readouterr().err
        assert main([*words, "--traceback", "--overwrite"]) == 1
        error_with_traceback = capfd.readouterr().err
    where = rf"\[.*{FILE}:\d+ in fail: return \[\]\[3\]\]\."
    line = f"Code of the experiment raised IndexError: list index out of range {where}"
    assert re.fullmatch(rf"loopscope: {line} --traceback shows the full traceback\.\n", error)
    assert error_with_traceback.startswith("Traceback (most recent call last):\n")
    assert re.search(line, error_with_traceback.splitlines()[-1])
    if method in ("compute_loss", "should_stop"):
        summary = read_json(tmp_path / "broken/plain/summary.json")
        assert re.search(rf"IndexError: list index out of range \[.*{FILE}:\d+ in fail", summary["error"])
        assert summary["traceback"].endswith("IndexError: list index out of range\n")


@pytest.mark.longer
def test_rewind_and_verify_show_user_code_line(tmp_path: Path, capfd) -> None:
    """A run whose code raises is trained again up to that line, which is shown without a traceback."""
    words = ["run", "broken", "--strategy", "plain", "--output-dir", str(tmp_path), "--no-console-output"]
    folder = str(tmp_path / "broken/plain")
    with registered(type("Whole", (Small,), {"name": "broken"})):
        assert main(words) == 0
    with registered(broken("broken", "compute_loss")):
        for command_words in (["rewind", folder, "--step", "1"], ["verify", folder]):
            capfd.readouterr()
            assert main(command_words) == 1
            error = capfd.readouterr().err
            assert re.search(rf"^loopscope: Code of the experiment raised IndexError.*{FILE}:\d+ in fail", error)
            assert error.count("\n") == 1


class Rows(torch.utils.data.Dataset):
    """Rows with one unreadable row."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 13:
            raise OSError("row 13 is damaged")
        return torch.zeros(4), 0


@pytest.mark.guarantee("mistakes-are-refused-early")
@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 1])
def test_dataset_error_shows_user_code_line(workers, tmp_path: Path, capfd) -> None:
    """This holds in the main process and in a DataLoader worker."""
    load = lambda self, strategy: TorchLoader(DataLoader(Rows(), 4, num_workers=workers), 0)
    with registered(type("Loading", (Small,), {"name": "loading", "build_loader": load})):
        assert main(["run", "loading", "--strategy", "plain", "--output-dir", str(tmp_path)]) == 1
    error = capfd.readouterr().err
    assert re.search(rf"OSError: .*{FILE}:\d+ in __getitem__: raise OSError", error), error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_internal_error_is_raised_unchanged(tmp_path: Path, monkeypatch) -> None:
    """An error whose traceback has no user code is raised with its own type and message."""
    monkeypatch.setattr(training_commands, "check_device", json.loads)
    with registered(Small), pytest.raises(TypeError, match="the JSON object must be"):
        main(["run", "small", "--output-dir", str(tmp_path)])


def test_long_user_traceback_is_shortened() -> None:
    """The first two and last two lines remain, with the number of omitted lines between them."""

    def down(depth: int) -> int:
        return 1 // depth + down(depth - 1)

    with pytest.raises(ZeroDivisionError) as raised:
        down(50)
    lines = user_code_lines(raised.value).split("; ")
    assert len(lines) == 5
    assert lines[2] == "48 more lines"
    assert lines[-1].endswith("in down: return 1 // depth + down(depth - 1)")


SCRIPT = '''
import sys

from loopscope import HookPoint, HookRegistry, TrainingHook, ExperimentRegistry
from loopscope.__main__ import main
from tests.framework.runs.small_experiment import Small

ExperimentRegistry.register(Small)


@HookRegistry.register
class Late(TrainingHook):
    """Fails once."""

    name = "late"
    hook_points = {HookPoint.POST_STEP}
    metrics = "x | x | x | x"

    def compute(self, ctx):
        if ctx.step == 2 and "resume" not in sys.argv:
            raise ValueError("two")
        return {"x": 1.0}


if __name__ == "__main__":
    sys.exit(main())
'''
ROOT = str(Path(__file__).parents[3])


@pytest.mark.slow
@pytest.mark.guarantee("resumed-runs-are-identical")
@pytest.mark.process
@pytest.mark.parametrize(
    "start",
    [
        pytest.param(["late hook.py"], id="script"),
        pytest.param(["-m", "late_hook"], id="module", marks=pytest.mark.slow),
    ],
)
def test_printed_resume_command_works(start, tmp_path: Path) -> None:
    """The command works for a hook defined in a script or module and for a folder name that needs quoting."""
    (tmp_path / "late hook.py").write_text(SCRIPT)
    (tmp_path / "late_hook.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "OMP_NUM_THREADS": "1"}
    words = ["run", "small", "--strategy", "plain", "--epochs", "1", "--hooks", "late", "--output-dir", "my $results"]
    run = subprocess.run(
        [sys.executable, *start, *words], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 1
    assert "Hook 'late' raised at POST_STEP of step 2: ValueError: two [late" in run.stderr
    (command,) = re.findall(r"To resume from it: (.*)", run.stdout + run.stderr)
    assert command.endswith("resume 'my $results/small/plain'")
    resumed = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert read_json(tmp_path / "my $results/small/plain/summary.json")["status"] == "completed"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["spread.py", "run", "x"], "{python} spread.py"),
        (["my spread.py", "resume", "x"], "{python} 'my spread.py'"),
        (["/odd place/loopscope", "run"], "'/odd place/loopscope'"),
        (["pytest", "tests"], "loopscope"),
        ([""], "loopscope"),
        (["/odd place/loopscope", "hooks"], "loopscope"),
    ],
)
def test_printed_command_matches_the_started_program(argv, expected, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    python_path = shutil.which("python")
    python = "python" if python_path and Path(python_path).parent == Path(sys.executable).parent else sys.executable
    assert this_command() == expected.format(python=python)


@pytest.mark.slow_rows("-x")
@pytest.mark.process
@pytest.mark.parametrize("name", ["plain", "two words", "it's $HOME", "-x"])
def test_shell_reads_original_words(name) -> None:
    command = this_command(name)
    assert command.isprintable()
    assert command == " ".join(command.split())
    read = subprocess.run(command.replace("loopscope ", "printf %s ./", 1), shell=True, capture_output=True)
    assert os.fsdecode(read.stdout) == f"./{name}"


def test_installed_command_is_printed_by_name(tmp_path: Path, monkeypatch) -> None:
    program = tmp_path / "loopscope"
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [str(program), "run"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert this_command() == "loopscope"
