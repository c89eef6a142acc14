"""The commands of ``loopscope equal``, which run under ``loopscope watch``, also in the trees of two revisions."""

import argparse
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import UsageError, require
from .watch import problem_of, watched_environment


@dataclass(frozen=True)
class Side:
    """A command, and the folder in which it runs."""

    name: str
    command: Sequence[str]
    folder: Path

    def run(self, folder: Path, options: Mapping[str, Any], seed: int = 0) -> None:
        """Run the command under ``loopscope watch``, with a number added to its seeds.

        Args:
            folder: the folder of the run; the output of the command is in a file of the same name with ``.txt``.
            options: further options of attach.
            seed: the number.

        Raises:
            UsageError: if the command fails, or trains nothing.
        """
        from ..runs import CONFIG

        options = {"display": "none", "out": str(folder), "overwrite": True, **options}
        environment = {**os.environ, **watched_environment(self.command, options, seed)}
        folder.parent.mkdir(parents=True, exist_ok=True)
        if (folder / CONFIG).is_file():  # of an earlier question, whose values must not count for this one
            shutil.rmtree(folder)
        log = folder.with_suffix(".txt")
        with log.open("w") as output:
            status = subprocess.run(
                self.command, cwd=self.folder, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False
            ).returncode
        text = shlex.join(self.command)
        require(status == 0, f"{text} ended with status {status}; its output is in {log}.")
        require(folder.is_dir(), f"{text} has made no step of an optimizer of torch; its output is in {log}.")


def sides_of(given: argparse.Namespace, contexts: ExitStack) -> tuple[Side, Side]:
    """Return both commands with their folders; the trees of revisions exist until the end of the context."""
    here, number = Path.cwd(), 1 if given.git else 2
    takes = "--git takes one command" if given.git else "loopscope equal takes two commands or two folders"
    require(len(given.sides) == number, f"{takes}, each in quotes, but got {len(given.sides)}.")
    commands = [shlex.split(side) for side in given.sides]
    for command in commands:
        if problem := problem_of(command, "equal"):
            raise UsageError(problem[0])
    if not given.git:
        return Side("a", commands[0], here), Side("b", commands[1], here)
    revisions = given.git.split("..")
    require(len(revisions) == 2 and all(revisions), f"--git is {given.git!r}; give two revisions such as main..HEAD.")
    trees = [contexts.enter_context(_tree(revision)) for revision in revisions]
    return Side("a", commands[0], trees[0]), Side("b", commands[0], trees[1])


@contextmanager
def _tree(revision: str) -> Iterator[Path]:
    """Yield the folder of a revision that corresponds to this one, in a temporary work tree of git."""
    git = partial(subprocess.run, capture_output=True, text=True, check=False)
    prefix = git(["git", "rev-parse", "--show-prefix"])
    require(prefix.returncode == 0, "--git needs a folder in a git repository.")
    with tempfile.TemporaryDirectory(prefix="loopscope-equal-") as folder:
        tree = Path(folder, "tree")
        added = git(["git", "worktree", "add", "--detach", str(tree), revision])
        require(added.returncode == 0, f"git has no tree of {revision!r}: {added.stderr.strip()}")
        try:
            yield tree / prefix.stdout.strip()
        finally:
            git(["git", "worktree", "remove", "--force", str(tree)])
