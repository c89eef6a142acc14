"""Trees of the repository to be recorded: the current one, and that of the stored reference."""

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.oracle.storage import REFERENCE

MOST_ERRORS = 4000
"""Maximum number of characters of a failed recording's output."""


class OracleError(Exception):
    """An error that prevents a comparison; the text is a sentence."""


class NoReferenceError(OracleError):
    """The commit of the stored record is unavailable."""


class RecordingError(OracleError):
    """A tree could not be recorded; the text contains its standard error."""


def record_of(tree: Path, parts: list[str]) -> dict[str, Any]:
    """Return the record of a tree by its own oracle, in processes that import loopscope from there."""
    with tempfile.TemporaryDirectory() as folder:
        links, out = Path(folder) / "links", Path(folder) / "record.json"
        link_package(tree, links)
        words = [sys.executable, "-m", "tests.oracle", "record", "--out", str(out), *parts]
        done = subprocess.run(
            words, cwd=tree, env=os.environ | {"PYTHONPATH": str(links)}, stderr=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            raise RecordingError(f"{tree} could not be recorded; the last lines are:\n{done.stderr[-MOST_ERRORS:]}")
        return dict(json.loads(out.read_text("utf-8")))


def link_package(tree: Path, folder: Path) -> None:
    """Create a folder of links through which a tree can be imported, following the packages in its pyproject.toml."""
    mapping = tomllib.loads((tree / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["package-dir"]
    for package, source in sorted(mapping.items()):  # parents sort before their sub-packages
        target = folder.joinpath(*package.split("."))
        if "." in package:
            target.symlink_to(tree / source)
            continue
        target.mkdir(parents=True)
        for item in (tree / source).iterdir():
            (target / item.name).symlink_to(item)


def git(tree: Path, *words: str) -> str:
    """Return the output of git; raises :class:`NoReferenceError` if the tree is in no repository or git fails."""
    try:
        done = subprocess.run(["git", *words], cwd=tree, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        message = getattr(error, "stderr", "") or str(error)
        raise NoReferenceError(f"git {words[0]} failed in {tree}: {' '.join(message.split())}") from error
    return done.stdout.strip()


def reference_commit(tree: Path) -> str:
    """Return the last commit that changed the stored reference.

    Raises :class:`NoReferenceError` if it does not exist.
    """
    commit = git(tree, "log", "-1", "--format=%H", "--", str(REFERENCE))
    if not commit:
        raise NoReferenceError(f"No commit has {REFERENCE}; run make oracle-update and commit what it stores.")
    if git(tree, "status", "--porcelain", "--", str(REFERENCE)):
        raise NoReferenceError(f"{REFERENCE} has uncommitted changes; commit them, or undo them.")
    boundary = Path(git(tree, "rev-parse", "--path-format=absolute", "--git-path", "shallow"))
    if boundary.exists() and commit in boundary.read_text().split():
        raise NoReferenceError(
            f"The commit that changed {REFERENCE} last is not in this shallow clone; run git fetch --unshallow."
        )
    return commit


@contextmanager
def work_tree(tree: Path, commit: str) -> Iterator[Path]:
    """Check out a commit into a temporary git work tree, and remove it at the end."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "reference"
        git(tree, "worktree", "add", "--detach", str(place), commit)
        try:
            yield place
        finally:
            git(tree, "worktree", "remove", "--force", str(place))


def uncommitted(tree: Path) -> list[str]:
    """Return the files with uncommitted changes, except those of the stored record."""
    changed = git(tree, "status", "--porcelain", "--untracked-files=all").splitlines()
    return [line.split(maxsplit=1)[1] for line in changed if str(REFERENCE.parent) not in line]
