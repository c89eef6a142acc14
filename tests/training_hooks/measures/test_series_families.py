"""The members of families that hooks report: those of a small model without a transfer, few of a large one."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from loopscope.training_hooks.measures import FamilyFile, SeriesBudget, on_host, reported_series

from tests.support.transfers import TransferCount


def family(*values):
    return {str(index): torch.tensor(float(value)) for index, value in enumerate(values)}


def test_families_within_budget_stay_on_device():
    """All members are reported, as the same tensors, without a transfer to the host."""
    members = family(*range(5))
    with TransferCount() as transfers:
        series = reported_series({"a": members, "b": family()}, SeriesBudget("hook", top=3, bottom=2), step=1)
    assert transfers.count == 0
    assert series == {f"a/{name}": value for name, value in members.items()}


def test_large_families_report_extremes_and_names():
    """Each family has its own extremes, and a family may follow another one."""
    totals = {"sum": torch.tensor(0.1), "count": torch.tensor(3)}
    families = {"a": family(0, 5, 1, 4, 2, 3), "b": family(9, 8, 7, 6, math.nan, 4), "c": family(1, 1, 1, 1, 1)}
    budget = SeriesBudget("hook", "2", top=1, bottom=1)
    series = reported_series(families, budget, totals, step=1, chosen_with={"c": "a"})
    assert list(series) == ["sum", "count", "a/0", "a/1", "a/2", "b/2", "b/4", "b/5", "c/0", "c/1", "c/2"]
    with TransferCount() as transfers:
        series = reported_series(families, budget, totals, step=1)
    assert transfers.count == 1
    assert (series["a/1"], series["sum"], series["count"]) == (5.0, torch.tensor(0.1).item(), 3)
    assert type(series["count"]) is int


def test_file_has_all_members(tmp_path):
    file = FamilyFile()
    file.start("hook", SimpleNamespace(output_dir=tmp_path, strategy="only"))
    families = {"a": family(0, 5, math.inf), "b": family()}
    series = reported_series(families, SeriesBudget("hook", top=1, bottom=0), step=7, file=file)
    assert list(series) == ["a/2"]
    assert json.loads((tmp_path / "only.hook.jsonl").read_text()) == {"step": 7, "a": on_host(families)["a"], "b": {}}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64])
def test_numbers_are_exact_in_any_dtype(dtype):
    values = {"a": {"x": torch.tensor(3, dtype=dtype), "y": torch.tensor(0.1, dtype=torch.float64)}}
    assert on_host(values) == {"a": {"x": 3.0, "y": 0.1}}
