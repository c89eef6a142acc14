"""The difference of two records names the step, also within a series of steps."""

import json

import pytest
from loopscope.cli.diff import _first_metric

SERIES = {"steps": [31, 32, 33], "values": [1.0, 2.0, 3.0]}


@pytest.mark.parametrize(
    ("other", "step"),
    [
        ({"steps": [31, 32, 33], "values": [1.0, 2.0, 4.0]}, 33),
        ({"steps": [31, 32], "values": [1.0, 2.0]}, 33),
        ({"steps": [31, 33], "values": [1.0, 3.0]}, 32),
        ({"steps": [31, 32, 33], "values": [1.0, None, 3.0]}, 32),
        (2.0, 91),
        (None, 91),
    ],
)
def test_first_different_step_is_named(other, step):
    lines = [json.dumps({"epoch": 0, "step": 91, "a/loss": value}) for value in (SERIES, other)]
    text, place = _first_metric(1, *lines)
    assert text == f"Metrics in JSONL: a/loss differs at step {step} (line 1)."
    assert place == f"by step {step}, in the metric a/loss"
