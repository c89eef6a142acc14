"""The table of measured coverage belongs to the current code, and its intervals are as wide as they state."""

import json

import pytest

from docs import coverage

STORED = json.loads(coverage.TABLE.read_text(encoding="utf-8"))


def test_stored_table_has_all_rows():
    """A few simulations give the same rows as the stored table, which are from at least 500."""
    assert STORED["trials"] >= 500
    for hook, rows in coverage.measured(2)["hooks"].items():
        assert [row[:3] for row in STORED["hooks"][hook]] == [list(row[:3]) for row in rows]


@pytest.mark.parametrize("hook", STORED["hooks"])
def test_page_has_the_coverage(hook):
    page = (coverage.TABLE.parent / f"hooks/{hook}.md").read_text(encoding="utf-8")
    assert "\n".join(coverage.section(hook)) in page
    assert coverage.section("norms") == []


@pytest.mark.parametrize("hook", STORED["hooks"])
def test_intervals_cover_most_true_values(hook):
    """No stated interval covers less than 80 % in its settings."""
    assert all(share >= 0.8 for *_, share in STORED["hooks"][hook]), STORED["hooks"][hook]
