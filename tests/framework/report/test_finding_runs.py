"""Runs are found in folders with unreadable parts and links."""

import os
from pathlib import Path
from shutil import copytree

import pytest
from loopscope.cli import main
from loopscope.many_runs import find_runs

from tests.framework.runs.small_experiment import session


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train once, and return the folder of the run."""
    folder = tmp_path_factory.mktemp("run")
    session(folder, strategies=["plain"], epochs=1, hooks=["norms"]).run()
    return folder / "small" / "plain"


def folder_with(run: Path, tmp_path: Path) -> Path:
    """Return a folder that contains a run three levels below."""
    folder = tmp_path / "results"
    copytree(run, folder / "a" / "b" / "run")
    return folder


@pytest.mark.parametrize("target", ["a", "..", ".", "a/b/run", "missing"])
def test_links_are_not_followed(run, tmp_path, target):
    """Links to folders with runs, to parents and to nothing are left out; every run is found once."""
    folder = folder_with(run, tmp_path)
    (folder / "link").symlink_to(target)
    (folder / "a" / "back").symlink_to(folder)
    assert [found.path for found in find_runs(folder)] == [folder / "a" / "b" / "run"]


def test_given_folder_may_be_a_link(run, tmp_path):
    """A link that the command is given is read."""
    folder = folder_with(run, tmp_path)
    (tmp_path / "link").symlink_to(folder)
    assert [found.path.name for found in find_runs(tmp_path / "link")] == ["run"]


UNREADABLE = "/proc/1/fdinfo"  # even root may not list it, unless it owns the process


def is_unreadable() -> bool:
    try:
        os.listdir(UNREADABLE)
    except OSError:
        return os.path.isdir(UNREADABLE)
    return False


@pytest.mark.skipif(not is_unreadable(), reason="this process may read the folders of process 1")
@pytest.mark.parametrize("command", ["show", "compare", "resume", "verify"])
def test_unreadable_folder_gives_one_sentence(tmp_path, capsys, command):
    """A folder that cannot be read is reported in one line, without a traceback."""
    (tmp_path / "locked").symlink_to(UNREADABLE)
    status = main([command, str(tmp_path / "locked")])
    printed = capsys.readouterr()
    assert status == 2
    assert "cannot be read: Permission denied" in " ".join((printed.out + printed.err).split())


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root reads every folder")
def test_unreadable_part_is_one_line(run, tmp_path, capsys):
    """An unreadable folder next to a run is one line of the list."""
    folder = folder_with(run, tmp_path)
    (folder / "locked").mkdir(mode=0)
    assert main(["ls", str(folder)]) == 0
    assert "locked" in capsys.readouterr().out
