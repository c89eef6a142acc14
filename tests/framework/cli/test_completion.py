"""``loopscope completion SHELL``: the script of a shell completes commands, experiments, options and values."""

import re
import subprocess
from pathlib import Path

import pytest
from loopscope import sinks, training_hooks
from loopscope.cli import main
from loopscope.cli.completion import SHELLS
from loopscope.cli.main import USAGE

from tests.framework.runs.small_experiment import Small, registered

FILLED = (sinks, training_hooks)
COMPLETE = """
source {script}
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMPREPLY=()
_shtab_loopscope
echo "${{COMPREPLY[*]}}"
"""


@pytest.fixture
def script(tmp_path: Path, capsys) -> Path:
    """Return the file of the script for bash."""
    with registered(Small):
        assert main(["completion", "bash"]) == 0
    path = tmp_path / "loopscope.bash"
    path.write_text(capsys.readouterr().out)
    return path


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("loopscope ver", "verify"),
        ("loopscope run sm", "small"),
        ("loopscope run small --save", "--save-checkpoints"),
        ("loopscope run small --hooks norms --li", "--live"),
        ("loopscope run small --mode ''", "fast exact"),
        ("loopscope run small --strategy plain cl", "clipped"),
        ("loopscope run small --hooks hess", "hessian"),
        ("loopscope rewind run --expl", "--explain"),
    ],
)
def test_bash_completes_commands_options_and_values(words: str, completed: str, script: Path) -> None:
    source = COMPLETE.format(script=script, words=words)
    done = subprocess.run(["bash", "--norc", "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.split() == completed.split()


def test_every_command_is_completed(script: Path) -> None:
    (commands,) = re.findall(r"^_shtab_loopscope_subparsers=\((.*)\)", script.read_text(), re.M)
    assert set(re.findall(r"\w+", commands)) == set(re.findall(r"^  loopscope (\w+)", USAGE, re.M))


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_a_script(shell: str, capsys) -> None:
    with registered(Small):
        assert main(["completion", shell]) == 0
    assert "verify" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["bsh"], ["bash", "zsh"]])
def test_other_shells_are_refused(words: list[str], capsys) -> None:
    assert main(["completion", *words]) == 2
    error = capsys.readouterr().err
    assert "bash" in error
    assert error.count("\n") == 1
