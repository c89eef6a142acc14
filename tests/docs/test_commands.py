"""Every command in README.md and the pages runs unchanged, or is parsed for a stated reason."""

import contextlib
import io
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from loopscope.cli import main

from tests.docs.markdown import PAGES, ROOT, blocks, code, prose
from tests.docs.running import PARSED, recipes, status_of

FIRST = ("docs/first-run.md", "docs/writing-a-hook.md", "docs/writing-an-experiment.md")
EVERY = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def commands(page: Path) -> list[str]:
    return [command for block in blocks(page) if block.language == "console" for command in block.commands()]


@cache
def help_of(command: str) -> str:
    """Return the help of a loopscope command; raises ``AssertionError`` for an unknown command."""
    words = ["run", "mod_arithmetic"] if command == "run" else [command]
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert status_of(lambda: main([*words, "--help"])) == 0, command
    return shown.getvalue()


@EVERY
def test_every_shown_command_is_in_a_console_block(page: Path) -> None:
    """Lines that start with $ occur only in console blocks, all of which other tests run."""
    lines = re.findall(r"^[ >]*\$ ", page.read_text(encoding="utf-8"), re.M)
    assert len(lines) == len(commands(page))


@EVERY
def test_every_command_in_the_text_is_one(page: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for span in code(prose(page)):
        program, *words = span.split() or [""]
        if program == "loopscope" and words and re.fullmatch(r"[a-z]+", words[0]):
            assert set(re.findall(r"--[a-z-]+", span)) <= set(re.findall(r"--[a-z-]+", help_of(words[0]))), span
        elif program == "make" and words:
            assert recipes()[words[0]], span
        elif program == "pip":
            assert set(re.findall(r"[\w]+(?=[\],])", span.partition("[")[2])) <= extras.keys(), span


@pytest.mark.parametrize("command", PARSED)
def test_unexecuted_command_is_shown_and_justified(command: str) -> None:
    """Commands that are only parsed are make commands, appear on a page and have a stated reason."""
    assert command in [shown for page in PAGES for shown in commands(page)]
    assert PARSED[command]
    assert command.partition(" ")[0] == "make"  # run_recipe searches for it


@pytest.mark.slow
def test_commands_of_first_pages_run_in_shell(tmp_path: Path) -> None:
    """All commands of the first three pages, except those of make, run unchanged in one shell and one folder."""
    (tmp_path / ".venv").symlink_to(sys.prefix)
    for page in FIRST:
        for block in blocks(ROOT / page):
            if block.file:
                with (tmp_path / block.file).open("a", encoding="utf-8") as file:
                    file.write(block.text)
    lines = [line for page in FIRST for line in commands(ROOT / page) if not line.startswith("make ")]
    environment = {**os.environ, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-e"], input="\n".join(lines), cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
