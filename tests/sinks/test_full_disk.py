from pathlib import Path

import pytest

from sinks import CSVSink, JSONLSink
from tests.sinks.emits import run_info
from tests.sinks.test_sink_contracts import run_with
from tests.support import differences

needs_full_device = pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a device of Linux")


@needs_full_device
@pytest.mark.parametrize("sink_class", [CSVSink, JSONLSink])
def test_a_full_disk_costs_the_sink_and_not_the_run(tmp_path, sink_class):
    (tmp_path / f"only.{sink_class.name}").symlink_to("/dev/full")
    with pytest.warns(UserWarning, match="switched off.*No space left on device"):
        digest = run_with(tmp_path, [sink_class()])
    assert not differences(run_with(tmp_path, []), digest)


@pytest.mark.parametrize("sink_class", [CSVSink, JSONLSink])
def test_a_missing_folder_is_named(tmp_path, sink_class):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        sink_class().set_run_context(run_info(tmp_path / "nowhere"))
