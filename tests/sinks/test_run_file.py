import os
import resource

import pytest
from loopscope.sinks.run_file import FileSink, complete_lines

from tests.sinks.emits import run_info


class TextSink(FileSink):
    """Write lines to STRATEGY.txt."""

    name = "txt"

    def header(self, run, position):
        return ""

    def emit(self, metrics, epoch, hook_point, *, step):
        self._write(metrics)

    @classmethod
    def read(cls, path):
        return iter(())


def write(sink, text):
    sink.emit(text, 0, None, step=0)


@pytest.fixture
def synced(monkeypatch):
    """Record the inodes of files that are synchronised to disk, and synchronise them."""
    inodes, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (inodes.append(os.fstat(number).st_ino), fsync(number)))
    return inodes


def test_flush_synchronises_file_to_disk(tmp_path, synced):
    file = TextSink()
    file.set_run_context(run_info(tmp_path))
    write(file, "line\n")
    assert synced == []
    file.flush()
    file.close("completed")
    assert synced == [(tmp_path / "only.txt").stat().st_ino]


def test_existing_file_is_overwritten(tmp_path):
    """Other files in the folder are unchanged."""
    (tmp_path / "only.txt").write_text("old and longer\n")
    (tmp_path / "other.txt").write_text("other")
    file = TextSink()
    file.set_run_context(run_info(tmp_path))
    write(file, "new\n")
    file.close("completed")
    assert (tmp_path / "only.txt").read_text() == "new\n"
    assert (tmp_path / "other.txt").read_text() == "other"


def test_only_line_feeds_end_a_line(tmp_path):
    (tmp_path / "x").write_bytes("a\rb\x85c\u2028d\n\ncut".encode())
    assert list(complete_lines(tmp_path / "x")) == ["a\rb\x85c\u2028d\n", "\n"]


@pytest.fixture
def one_megabyte_limit():
    """Limit files to a megabyte, like a nearly full disk: longer writes are cut off."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_raises_an_error(tmp_path, one_megabyte_limit):
    """A line that does not fit raises OSError, and the lines before it stay complete."""
    file = TextSink()
    file.set_run_context(run_info(tmp_path))
    write(file, "x" * (2**20 - 2) + "\n")
    with pytest.raises(OSError, match="File too large"):
        write(file, "cut\n")
    file.close("completed")
    assert len(list(complete_lines(tmp_path / "only.txt"))) == 1


def test_written_line_is_on_file_immediately(tmp_path):
    """The complete line is in the file before the file is closed."""
    file = TextSink()
    file.set_run_context(run_info(tmp_path))
    text = "ü\r" * 100_000 + "\n"
    write(file, text)
    assert (tmp_path / "only.txt").read_bytes() == text.encode()
    file.close("completed")
