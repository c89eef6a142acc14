from pathlib import Path

import pytest
from loopscope.sinks import CSVSink, JSONLSink, TensorBoardSink, WandbSink

from tests.sinks.emits import run_info
from tests.sinks.test_sink_contracts import run_with
from tests.support import differences

needs_full_device = pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a device of Linux")


FILES = {
    CSVSink: "only.csv",
    JSONLSink: "only.jsonl",
    TensorBoardSink: "tensorboard/events.out.tfevents.only",
    WandbSink: "only.jsonl",
}


@pytest.mark.longer
@needs_full_device
@pytest.mark.parametrize("sink_class", FILES)
def test_full_disk_disables_only_the_sink(tmp_path, sink_class, monkeypatch):
    """The run warns and ends in the state of a run without sinks."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    path = tmp_path / FILES[sink_class]
    path.parent.mkdir(exist_ok=True)
    path.symlink_to("/dev/full")
    with pytest.warns(UserWarning, match="is disabled.*No space left on device"):
        digest = run_with(tmp_path, [sink_class()])
    assert not differences(run_with(tmp_path, []), digest)


@pytest.mark.parametrize("sink_class", FILES)
def test_error_names_missing_folder(tmp_path, sink_class):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        sink_class().set_run_context(run_info(tmp_path / "nowhere"))
