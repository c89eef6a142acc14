"""Exact numbers of every tensor dtype in the files of a run."""

import math
import warnings

import pytest
import torch
from loopscope.engine import HookManager
from loopscope.hooks import HookPoint, SinkRegistry
from loopscope.sinks import CSVSink, JSONLSink, read_csv, read_jsonl

from tests.sinks.emits import disable_clients, exact, run_info
from tests.support import Case, SpyHook, at, build

GIVEN = {
    "float64": torch.tensor(0.1, dtype=torch.float64),
    "float32": torch.tensor(0.1),
    "float16": torch.tensor(6e-8, dtype=torch.float16),
    "bfloat16": torch.tensor(1e38, dtype=torch.bfloat16),
    "int64": torch.tensor(2**62 + 1),
    "uint8": torch.tensor(255, dtype=torch.uint8),
    "bool": torch.tensor(True),
    "nan": torch.tensor(math.nan, dtype=torch.bfloat16),
    "inf": torch.tensor(-math.inf, dtype=torch.float16),
    "mixed": [torch.tensor(0.5, dtype=torch.float16), torch.tensor(3), torch.tensor(False)],
}
EXPECTED = {
    "float64": 0.1, "float32": 0.10000000149011612, "float16": 2.0**-24, "bfloat16": 0x96 / 2**7 * 2.0**126,
    "int64": 2**62 + 1, "uint8": 255, "bool": True, "nan": math.nan, "inf": -math.inf, "mixed": [0.5, 3, False],
}  # fmt: skip


def fired(sink_class, folder, point: HookPoint) -> None:
    """Fire once at ``point`` with a hook that returns a number of every dtype."""
    task, state = build(Case())
    hook = at(SpyHook, point)(lambda ctx: dict(GIVEN))
    manager = HookManager([hook], task, state, loop="epoch", sinks=[sink_class()])
    manager.start(run_info(folder, described=[f"spy/{name}" for name in GIVEN]))
    state.loop.step = 1
    manager.fire(point)
    manager.delivery.flush_steps(0)
    manager.end("completed")


@pytest.mark.parametrize(("sink_class", "read"), [(JSONLSink, read_jsonl), (CSVSink, read_csv)])
@pytest.mark.parametrize("point", [HookPoint.PRE_EPOCH, HookPoint.POST_STEP])
def test_files_keep_numbers_and_their_types(sink_class, read, point, tmp_path):
    fired(sink_class, tmp_path, point)
    (record,) = read(tmp_path / f"only.{sink_class.name}")
    found = {name: getattr(value, "values", [value])[0] for name, value in record.metrics.items()}
    assert exact(found) == exact({f"spy/{name}": value for name, value in EXPECTED.items()})


@pytest.mark.parametrize("sink_class", list(SinkRegistry), ids=lambda sink: sink.name)
@pytest.mark.parametrize("point", [HookPoint.PRE_EPOCH, HookPoint.POST_STEP])
def test_no_sink_fails_over_a_dtype(sink_class, point, tmp_path, monkeypatch):
    disable_clients(monkeypatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fired(sink_class, tmp_path, point)
    assert [str(warning.message) for warning in caught if "failed" in str(warning.message)] == []
