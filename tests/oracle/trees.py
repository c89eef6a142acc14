"""Trees of the repository whose behaviour is recorded: the present one, and that of the stored reference."""

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
"""Characters of what a failed recording printed."""


class OracleError(Exception):
    """Behaviour cannot be compared; the text is a sentence."""


class NoReferenceError(OracleError):
    """The commit that the stored record comes from cannot be had."""


class RecordingError(OracleError):
    """A tree could not be recorded; the text has what was printed on standard error."""


def record_of(tree: Path, parts: list[str]) -> dict[str, Any]:
    """Return what the oracle of a tree records of this tree, in processes that import loopscope from there."""
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
    """Make a folder of links through which a tree can be imported, by the mapping of packages in its pyproject.toml."""
    mapping = tomllib.loads((tree / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["package-dir"]
    for package, source in sorted(mapping.items()):  # a package comes before what is in it
        target = folder.joinpath(*package.split("."))
        if "." in package:
            target.symlink_to(tree / source)
            continue
        target.mkdir(parents=True)
        for item in (tree / source).iterdir():
            (target / item.name).symlink_to(item)


def git(tree: Path, *words: str) -> str:
    """Return what git prints; raises :class:`NoReferenceError` where the tree is in no repository or git fails."""
    try:
        done = subprocess.run(["git", *words], cwd=tree, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        told = getattr(error, "stderr", "") or str(error)
        raise NoReferenceError(f"git {words[0]} failed in {tree}: {' '.join(told.split())}") from error
    return done.stdout.strip()


def reference_commit(tree: Path) -> str:
    """Return the last commit that changed the stored reference; raises :class:`NoReferenceError` if it is not there."""
    commit = git(tree, "log", "-1", "--format=%H", "--", str(REFERENCE))
    if not commit:
        raise NoReferenceError(f"No commit has {REFERENCE}; run make oracle-update and commit what it stores.")
    if git(tree, "status", "--porcelain", "--", str(REFERENCE)):
        raise NoReferenceError(f"{REFERENCE} has changes that are not committed; commit them, or undo them.")
    boundary = Path(git(tree, "rev-parse", "--path-format=absolute", "--git-path", "shallow"))
    if boundary.exists() and commit in boundary.read_text().split():
        raise NoReferenceError(
            f"The commit that changed {REFERENCE} last is not in this shallow clone; run git fetch --unshallow."
        )
    return commit


@contextmanager
def work_tree(tree: Path, commit: str) -> Iterator[Path]:
    """Check a commit out into a git work tree beside the repository, and remove it at the end."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "reference"
        git(tree, "worktree", "add", "--detach", str(place), commit)
        try:
            yield place
        finally:
            git(tree, "worktree", "remove", "--force", str(place))


def uncommitted(tree: Path) -> list[str]:
    """Return the files with changes that are not committed, but for those of the stored record."""
    changed = git(tree, "status", "--porcelain", "--untracked-files=all").splitlines()
    return [line.split(maxsplit=1)[1] for line in changed if str(REFERENCE.parent) not in line]
