"""The table of measured coverage belongs to the current code, and its intervals are as wide as they state."""

import json

import pytest
from loopscope import training_hooks  # noqa: F401 - fills the registry
from loopscope.hooks import HookRegistry

from docs import coverage, generate

STORED = json.loads(coverage.TABLE.read_text(encoding="utf-8"))
HEAVY_TAILS = ", heavy-tailed rows"


@pytest.mark.longer
def test_stored_table_has_all_rows():
    """A few simulations give the same rows as the stored table, which are from at least 500."""
    assert STORED["trials"] >= 500
    for hook, rows in coverage.measured(2)["hooks"].items():
        assert [row[:3] for row in STORED["hooks"][hook]] == [list(row[:3]) for row in rows]


def test_every_standard_error_has_measured_coverage():
    """A metric ``x_error`` whose reading calls it a standard error needs a row for x."""
    for hook in HookRegistry:
        errors = [info for info in hook().describe_metrics() if "standard error" in info.reading.lower()]
        estimates = {info.name.split("/")[0].removesuffix("_error") for info in errors if "_error" in info.name}
        assert estimates <= {row[0] for row in STORED["hooks"].get(hook.name, [])}, hook.name


@pytest.mark.parametrize("hook", STORED["hooks"])
def test_page_has_the_coverage(hook):
    assert "\n".join(coverage.section(hook)) in generate.hook_page(HookRegistry.get(hook))
    assert coverage.section("norms") == []


@pytest.mark.parametrize("hook", STORED["hooks"])
def test_intervals_cover_most_true_values(hook):
    """No stated interval covers less than 80 % in its settings, or 75 % if the rows have infinite fourth moments."""
    for metric, setting, _, share in STORED["hooks"][hook]:
        assert share >= (0.75 if setting.endswith(HEAVY_TAILS) else 0.8), (metric, setting, share)


def test_only_the_noise_scale_has_heavy_tailed_rows():
    """The lower bound holds for the six rows of one hook, and for no other."""
    heavy = [hook for hook, rows in STORED["hooks"].items() for row in rows if row[1].endswith(HEAVY_TAILS)]
    assert heavy == ["gradient_noise_scale"] * 3 * len(coverage.HEAVY)
