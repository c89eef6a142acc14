"""Provenance of a run: the commit of its code, uncommitted changes, the script, and the start time."""

import os
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import xxhash

PATIENCE = 5.0
"""Seconds after which git is given up, for example on a slow network disk."""


def read_provenance() -> dict[str, Any]:
    """Return the script and its digest, its start time in UTC, and the commit of its repository, if there is one."""
    script = _script()
    return {
        "script": None if script is None else str(script),
        "script_xxh3_128": None if script is None else script_digest(script),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **git_state(),
    }


def script_digest(script: Path) -> str | None:
    """Return the digest of a script's text, or ``None`` if it cannot be read."""
    try:
        return xxhash.xxh3_128_hexdigest(script.read_bytes())
    except OSError:
        return None


@cache
def git_state() -> Mapping[str, Any]:
    """Return the commit, and whether tracked files differ from it; empty without git or outside of a repository.

    It is read once per process, as the imported code does not change later either.
    """
    script = _script()
    folder = Path.cwd() if script is None else script.parent
    commit, changes = _git(folder, "rev-parse", "HEAD"), _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {} if commit is None or changes is None else {"git_commit": commit.strip(), "git_dirty": bool(changes)}


def _script() -> Path | None:
    """Return the file of the main module; ``None`` in a notebook or an interactive session."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return None if path is None else Path(path).absolute()


def _git(folder: Path, *words: str) -> str | None:
    """Return what a git command prints; ``None`` if it fails."""
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # status would otherwise refresh the index
    try:
        command = ["git", "-C", str(folder), *words]
        result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return result.stdout
