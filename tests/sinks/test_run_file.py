import os

import pytest

from sinks.run_file import RunFile, complete_lines
from tests.sinks.emits import run_info


@pytest.fixture
def synced(monkeypatch):
    """Record the files that are forced onto the disk, by inode, while really forcing them."""
    inodes, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (inodes.append(os.fstat(number).st_ino), fsync(number)))
    return inodes


def test_a_flush_forces_the_file_onto_the_disk(tmp_path, synced):
    file = RunFile(".txt")
    file.open(run_info(tmp_path))
    file.write("line\n")
    assert synced == []
    file.flush()
    file.close()
    assert synced == [(tmp_path / "only.txt").stat().st_ino]


def test_an_older_file_is_written_over_and_others_are_left_alone(tmp_path):
    (tmp_path / "only.txt").write_text("old and longer\n")
    (tmp_path / "other.txt").write_text("other")
    file = RunFile(".txt")
    file.open(run_info(tmp_path))
    file.write("new\n")
    file.close()
    assert (tmp_path / "only.txt").read_text() == "new\n"
    assert (tmp_path / "other.txt").read_text() == "other"


def test_only_line_feeds_end_a_line(tmp_path):
    (tmp_path / "x").write_bytes("a\rb\x85c\u2028d\n\ncut".encode())
    assert list(complete_lines(tmp_path / "x")) == ["a\rb\x85c\u2028d", ""]
