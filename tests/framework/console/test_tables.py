import io
import json

import loopscope
import pytest
import torch
from loopscope import (
    experiments,  # noqa: F401 - fills the registry
    training_hooks,  # noqa: F401 - fills the registry
)
from loopscope.cli.hook_pages import experiment_list, first_line, hook_content, hook_list, hook_page, points_text
from loopscope.console.tables import comparison_rows, comparison_table, hook_table, result_line
from loopscope.hooks import ExperimentRegistry, HookPoint, HookRegistry, MetricInfo, TrainingHook, hook_options
from loopscope.hooks.selection import hook_kind
from rich.cells import cell_len
from rich.console import Console
from torch import nn

from tests.framework.runs.small_experiment import session


class Example(TrainingHook):
    """Watch the ``loss`` closely.

    A second paragraph
    over two lines.

    Args:
        every: how often
            it looks.
        mode: in which way.
    """

    name = "example"
    hook_points = frozenset({HookPoint.SNAPSHOT, HookPoint.PRE_STEP})

    def __init__(self, *, every: int = 3, mode: str = "fast") -> None:
        self.every = every

    def compute(self, ctx):
        return {}

    def describe_metrics(self):
        return [MetricInfo("level/<parameter>", "x [m]", "[0, 1]", "Higher is higher.")]


def rendered(shown, width=80):
    console = Console(file=io.StringIO(), force_terminal=False, width=width)
    console.print(shown)
    return console.file.getvalue()


def words(text):
    return " ".join(text.split())


def test_hook_list_shows_kind_and_summary():
    """Every registered hook has its kind and first line, in 80 columns."""
    text = rendered(hook_list(HookRegistry))
    assert max(map(cell_len, text.splitlines())) <= 80
    for hook in HookRegistry:
        title = next(line for line in text.splitlines() if line.startswith(hook.name))
        assert title.split()[1] == hook_kind(hook)
        assert words(first_line(hook)) in words(text)


@pytest.mark.parametrize("hook", list(HookRegistry), ids=lambda hook: hook.name)
@pytest.mark.parametrize("width", [80, 120])
def test_hook_page_lists_metrics_and_options(hook, width):
    """Every metric and option of every hook is in the page, within its width."""
    text = rendered(hook_page(hook_content(hook)), width)
    assert max(map(cell_len, text.splitlines())) <= width
    for info in hook().describe_metrics():
        assert f"  {hook.name}/{info.name}\n" in text
        for part in (info.formula, info.range, info.reading):
            assert words(part) in words(text)
    for option, parameter in hook_options(hook).items():
        assert f"{hook.name}.{option}  (" in text
        assert f"default {parameter.default}" in words(text)


def test_hook_page_has_the_expected_layout():
    """The page of an example hook matches line by line."""
    assert rendered(hook_page(hook_content(Example))).splitlines() == [
        "example  observer, PRE_STEP, SNAPSHOT",
        "Watch the loss closely.",
        "",
        "A second paragraph over two lines.",
        "",
        "Metrics",
        "  example/level/<parameter>",
        "    formula  x [m]            ",
        "    range    [0, 1]           ",
        "    reading  Higher is higher.",
        "",
        "Options, for --hook-config",
        "  example.every  (int, default 3)",
        "    how often it looks.",
        "  example.mode  (str, default fast)",
        "    in which way.",
    ]


def test_options_of_shipped_hooks_are_described():
    undocumented = [
        f"{hook.name}.{option['name']}"
        for hook in HookRegistry
        for option in hook_content(hook)["options"]
        if not option["about"]
    ]
    assert undocumented == []


def test_hook_points_are_shown_by_loop_and_epoch():
    windows = {
        "epoch": {HookPoint.SNAPSHOT: (50, None), HookPoint.POST_EPOCH: (None, 49)},
        "step": {HookPoint.SNAPSHOT},
    }
    hook = type("Windowed", (Example,), {"loop_points": windows})
    assert points_text(hook) == "epoch loop: POST_EPOCH to epoch 49, SNAPSHOT from epoch 50; step loop: SNAPSHOT"


def test_experiments_are_listed_with_strategies_and_presets():
    text = words(rendered(experiment_list(ExperimentRegistry)))
    for item in ExperimentRegistry:
        assert f"strategies {', '.join(item.strategies)} presets {', '.join(item.presets)}" in text


def test_comparison_shows_nonempty_columns():
    rows = [
        {"strategy": "a", "loss": "1e-05", "treatments": ""},
        {"strategy": "[b]", "val_acc": "nan", "treatments": ""},
    ]
    lines = rendered(comparison_table(rows)).splitlines()
    assert lines[1].split() == ["strategy", "loss", "val_acc"]
    assert [line.split() for line in lines[3:5]] == [["a", "1e-05"], ["[b]", "nan"]]


def test_numbers_align_right_and_text_left():
    lines = rendered(comparison_table([{"name": "a", "n": "5"}, {"name": "long", "n": "12,345"}])).splitlines()
    assert lines[3].index("5") == lines[4].index("12,345") + 5
    assert lines[3].index("a") == lines[4].index("long")


def test_wide_comparison_is_transposed() -> None:
    """A table that does not fit has a line for each value and a column for each strategy."""
    rows = [{"strategy": name, "a_number_with_a_long_name": "0.5", "another_with_a_long_name": "12"} for name in "ab"]
    wide, narrow = (rendered(comparison_table(rows, width)).splitlines() for width in (80, 50))
    assert wide[1].split() == ["strategy", "a_number_with_a_long_name", "another_with_a_long_name"]
    assert [line.split() for line in narrow if line.strip(" ─")] == [
        ["strategy", "a", "b"], ["a_number_with_a_long_name", "0.5", "0.5"], ["another_with_a_long_name", "12", "12"]
    ]  # fmt: skip


@pytest.mark.longer
def test_comparison_shows_distance_from_named_strategy(tmp_path) -> None:
    """The distance column is omitted if the reference strategy is missing."""
    summaries = session(tmp_path, strategies=["plain", "clipped"], epochs=1).run()
    plain, clipped = comparison_rows(summaries, {"val_loss": "plain", "unknown": "plain"})
    distance = summaries[1]["final"]["val_loss"] - summaries[0]["final"]["val_loss"]
    assert float(clipped["val_loss − plain"]) == pytest.approx(distance, rel=1e-3)
    assert "val_loss − plain" not in plain
    assert not any("−" in name for name in comparison_rows(summaries[1:], {"val_loss": "plain"})[0])


def test_hook_table_leaves_missing_cells_empty() -> None:
    """The table has a line for each row, with thousands separators."""
    rows = {"forward_input": {"total_elements": 1234567, "rate": 0.25}, "output_grad": {"rate": float("nan")}}
    lines = [
        line.split() for line in rendered(hook_table("fp4", "gradient_overflow", rows), 60).splitlines() if line.strip()
    ]
    assert lines[:2] == [["fp4:", "gradient_overflow"], ["gradient_overflow", "total_elements", "rate"]]
    assert lines[3:] == [["forward_input", "1,234,567", "0.25"], ["output_grad", "nan"]]


def test_comparison_of_many_strategies_is_split() -> None:
    """Every table fits the width, and every strategy is in exactly one of them."""
    numbers = {"a_number_with_a_long_name": "0.25", "another_with_a_long_name": "1"}
    rows = [{"strategy": f"strategy_{name}", **numbers} for name in "abcdefg"]
    text = rendered(comparison_table(rows, 60), 60)
    assert "…" not in text
    assert max(map(cell_len, text.splitlines())) <= 60
    headings = [line.split()[1:] for line in text.splitlines() if line.startswith(" strategy ")]
    assert [name for heading in headings for name in heading] == [row["strategy"] for row in rows]
    assert words(text).count("a_number_with_a_long_name") == len(headings) == 4


def test_late_column_keeps_its_position() -> None:
    """A column of later rows keeps its position in those rows."""
    rows = [{"strategy": "a", "time": "1"}, {"strategy": "b", "gap": "0.5", "time": "2"}]
    assert rendered(comparison_table(rows)).splitlines()[1].split() == ["strategy", "gap", "time"]


@pytest.mark.parametrize(("loop", "over"), [("epoch", "mean of the epoch"), ("step", "last step")])
def test_final_loss_is_marked_as_mean(loop, over, tmp_path):
    """The line names the steps of the mean; a summary of an earlier version has no mark."""
    model = nn.Linear(4, 1)
    optimizer, options = torch.optim.SGD(model.parameters(), 0.1), {"length": 2, "display": "none"}
    with loopscope.attach(model, optimizer, hooks=["norms"], out=tmp_path / "run", loop=loop, **options) as scope:
        for batch in scope.batches(torch.ones(2, 3, 4)):
            scope.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    loss = f"{summary['training_loss']:.4g}"
    assert result_line(summary).plain.endswith(f", loss {loss} ({over})")
    del summary["training_loss_over"]
    assert result_line(summary).plain.endswith(f", loss {loss}")
