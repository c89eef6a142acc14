import io
import json
import random
import re

import pytest
from loopscope import training_hooks  # noqa: F401 - one of the hooks is always on
from loopscope.hooks import Alert, HookPoint, Series
from loopscope.sinks.console import ConsoleSink
from rich.console import Console

from tests.sinks.emits import run_info

SCALARS = {"training_metrics/loss": 0.123456, "norms/total": 1234.5678, "norms/grad/layers.0.weight": 9.9}


def console_of(width, *, terminal=True, height=25):
    return Console(
        file=io.StringIO(),
        width=width,
        height=height,
        force_terminal=terminal,
        force_interactive=terminal,
        legacy_windows=False,
    )


def started(width=80, *, terminal=True, described=(), first=None, height=25):
    """Return a sink in a run, and its console."""
    console = console_of(width, terminal=terminal, height=height)
    sink = ConsoleSink(console=console, first=first or {"none": []})
    sink.set_run_context(run_info(None, "stride", list(described)))
    return sink, console


def shown(metrics, width=80, *, point=HookPoint.POST_EPOCH, **options):
    """Return the output of a sink for one emit and a SNAPSHOT."""
    sink, console = started(width, **options)
    sink.emit(metrics, 9, point, step=1234)
    sink.snapshot(9, 1234)
    return console.file.getvalue()


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_nothing_is_shown_before_a_snapshot():
    console = console_of(80)
    sink = ConsoleSink(console=console)
    sink.set_run_context(run_info(None))
    sink.emit(SCALARS, 0, HookPoint.POST_EPOCH, step=1)
    assert console.file.getvalue() == ""
    sink.snapshot(0, 1)
    assert "0.1235" in console.file.getvalue()


def test_title_shows_run_epoch_and_step():
    title = plain(shown(SCALARS)).splitlines()[0]
    assert title.startswith("exp  stride  epoch 9  step 1,234 ")


def test_values_have_four_digits_below_their_hook():
    """The table rounds to four significant digits."""
    lines = [line.split() for line in plain(shown(SCALARS, 30)).splitlines()]
    assert lines[1:] == [["training_metrics"], ["loss", "0.1235"], ["norms"], ["total", "1235"]]


def test_metrics_of_single_parameters_are_hidden():
    assert "layers.0.weight" not in shown(SCALARS)


def test_hooks_keep_their_description_order():
    text = shown({"b/x": 1, "a/y": 2}, 30, described=["a/y", "b/x"])
    assert text.index("a") < text.index("b")


@pytest.mark.parametrize(
    ("terminal", "texts"),
    [(True, ["ø 3", "ø 7"]), (False, ["3 (mean of 4); 4 values not recorded", "7; 1 value not recorded"])],
)
def test_series_is_shown_as_its_mean(terminal, texts):
    """The mean is over the values since the last table, and plain lines add their number."""
    sink, console = started(terminal=terminal, first=None if terminal else {"group": ["h/loss"]})
    for epoch, values in enumerate([[1.0, 2.0], [4.0, 5.0]]):
        sink.emit({"h/loss": Series([1, 2], values)}, epoch, HookPoint.POST_STEP, step=2)
    sink.snapshot(1, 4)
    sink.emit({"h/loss": Series([5], [7.0])}, 2, HookPoint.POST_STEP, step=5)
    sink.snapshot(2, 5)
    assert re.findall(r"loss +(.+?)(?: +[↑↓→])? *\n", plain(console.file.getvalue())) == texts


def test_preferred_metrics_come_first_by_group():
    """Each group has its own line, and the table omits groups without values."""
    first = {"accuracy": ["t/val_acc", "t/absent"], "one weight": ["norms/grad/layers.0.weight"], "absent": ["x/y"]}
    lines = plain(shown({"a/b": 1.0, "t/val_acc": 0.5, **SCALARS}, first=first)).splitlines()
    assert lines[1:3] == ["accuracy     val_acc 0.5", "one weight   layers.0.weight 9.9"]
    assert lines[3].split() == ["a", "training_metrics", "norms"]


def test_training_metrics_come_first_by_default():
    sink = ConsoleSink(console=(console := console_of(80)))
    sink.set_run_context(run_info(None))
    sink.emit({"a/b": 1.0, **SCALARS}, 0, HookPoint.POST_EPOCH, step=1)
    sink.snapshot(0, 1)
    assert plain(console.file.getvalue()).splitlines()[1] == "training   loss 0.1235"


def test_arrows_show_trend_of_last_three_values():
    """The arrows are coloured."""
    sink, console = started()
    for step in (1, 2, 3):
        sink.emit({"h/up": step, "h/down": -step, "h/same": 7}, step, HookPoint.POST_EPOCH, step=step)
    sink.snapshot(3, 3)
    assert re.findall(r"(up|down|same) +\S+ +([↑↓→])", console.file.getvalue()) == []  # they are coloured
    assert dict(re.findall(r"(up|down|same) +\S+ +([↑↓→])", plain(console.file.getvalue()))) == {
        "up": "↑",
        "down": "↓",
        "same": "→",
    }


@pytest.mark.parametrize("width", [80, 120])
def test_table_fits_height_and_counts_omitted_metrics(width):
    """Each hook still appears in the table."""
    metrics = {f"hook_{hook}/metric_{index}": hook + index / 8 for hook in range(18) for index in range(20)}
    lines = plain(shown(metrics, width, height=40)).splitlines()
    assert len(lines) <= 40
    left_out = len(metrics) - sum(line.count("metric_") for line in lines)
    assert lines[-1] == f"{left_out} more, not recorded"
    assert all(f"hook_{hook}" in "\n".join(lines) for hook in range(18))


def test_changed_numbers_precede_constants_and_lists():
    """A full table omits values that have not changed."""
    metrics = {
        f"h{hook}/{kind}_{index}": 1.0 for hook in range(20) for index in range(6) for kind in ("still", "moved")
    }
    sink, console = started()
    sink.emit({"h0/list": [1, 2], **metrics}, 0, HookPoint.POST_EPOCH, step=1)
    sink.snapshot(0, 1)
    console.file.truncate(0)
    sink.emit(
        {name: 2.0 if "moved" in name else value for name, value in metrics.items()}, 0, HookPoint.POST_EPOCH, step=2
    )
    sink.snapshot(0, 2)
    table = console.file.getvalue()
    assert table.count("moved_") >= 20
    assert table.count("still_") == 0


def test_unshown_values_appear_on_close():
    console = console_of(80)
    sink = ConsoleSink(console=console)
    sink.set_run_context(run_info(None))
    sink.emit(SCALARS, 0, HookPoint.POST_EPOCH, step=1)
    sink.close("interrupted")
    assert "0.1235" in console.file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_resumed_console_matches_uninterrupted_console(terminal):
    """The outputs are equal with and without a terminal."""
    uninterrupted, console = started(terminal=terminal)
    for epoch, value in enumerate([1.0, 2.0, 3.0, 4.0]):
        if epoch == 3:
            position, begin = json.loads(json.dumps(uninterrupted.position())), console.file.tell()
            resumed, other = started(terminal=terminal)
            resumed.resume(run_info(None, "stride"), position)
        for sink in [uninterrupted] if epoch < 3 else [uninterrupted, resumed]:
            sink.emit({"h/up": value, "h/still": 5, "h/nan": float("nan")}, epoch, HookPoint.POST_EPOCH, step=epoch)
            sink.emit({"h/s": Series([epoch], [value])}, epoch, HookPoint.POST_STEP, step=epoch)
            if epoch % 2:
                sink.snapshot(epoch, epoch)
    assert other.file.getvalue() == console.file.getvalue()[begin:]
    assert ("↑" in other.file.getvalue()) == terminal


def test_a_snapshot_without_news_shows_nothing():
    console = console_of(80)
    sink = ConsoleSink(console=console)
    sink.set_run_context(run_info(None))
    sink.snapshot(0, 1)
    assert console.file.getvalue() == ""


@pytest.mark.parametrize(("first", "numbers"), [
    ({"a": ["norms/total"], "b": ["norms/list", "x/y"]}, "total 1235, list 1, 2"), ({"a": ["x/y"]}, "loss 0.1235"),
])  # fmt: skip
def test_plain_output_is_one_line_per_snapshot(first, numbers):
    """The line contains the preferred metrics and the number of values."""
    text = shown(SCALARS | {"norms/list": [1, 2]}, terminal=False, first=first)
    assert text == f"stride, epoch 9, step 1,234: {numbers}; 5 values not recorded\n"


def test_plain_line_shows_ages_counts_and_alerts():
    """The line gives the age of an old value and the alerts per metric."""
    console, calls = console_of(80, terminal=False), []
    sink = ConsoleSink(console=console, first={"a": ["h/x", "h/y"]}, recorded=True, shown=lambda: calls.append(1))
    sink.set_run_context(run_info(None, "stride"))
    sink.emit({"h/x": 1.0}, 0, HookPoint.POST_EPOCH, step=9)
    sink.emit({"h/y": Series([10, 11], [1.0, 2.0]), "h/z": {"a": [1, 2]}}, 2, HookPoint.POST_STEP, step=11)
    sink.alert([alert_of("h", "y"), alert_of("h", "y"), alert_of("g", "")])
    sink.snapshot(2, 12)
    sink.emit({"h/x": 3.0}, 3, HookPoint.POST_EPOCH, step=15)
    sink.snapshot(3, 15)
    assert console.file.getvalue().splitlines() == [
        "stride, epoch 2, step 12: x 1 (2 epochs old), y 1.5 (mean of 2); alerts: 2 h/y, 1 g",
        "stride, epoch 3, step 15: x 3, y 2 (1 epoch old)",
    ]
    assert calls == [1, 1]


def alert_of(hook, metric):
    alert = Alert("Look.", metric=metric)
    alert.hook = hook
    return alert


@pytest.mark.parametrize("width", [40, 80, 120])
def test_lines_fit_width_without_cutting_numbers(width):
    """The table shortens long lists to their first number and length."""
    metrics = {f"hook_{hook}/a_metric_{index}": index * 1.5 for hook in range(4) for index in range(6)}
    lists = {"long/list": [0.123456] * 50, "long/dict": {"a": 1.5, "b": 1e-7}}
    lines = plain(shown(metrics | lists, width, height=60)).splitlines()
    assert max(map(len, lines)) <= width
    assert sum(line.count("a_metric_") for line in lines) == 24
    assert {"0.1235, ... (50)", "1.5", "1e-07"} <= {text.strip() for line in lines for text in re.split("  +", line)}


def test_wide_terminal_shows_parallel_blocks():
    metrics = {f"hook_{hook}/a_metric_with_a_name_{index}": index * 1.25 for hook in range(4) for index in range(6)}
    heights = [len(shown(metrics, width).splitlines()) for width in (40, 80, 140)]
    assert heights == [29, 15, 8]


def test_markup_in_names_is_shown_literally():
    assert "[red]m" in plain(shown({"h/[red]m": 1.0, "h/b": "[/]"}))


def test_drawing_uses_no_random_numbers():
    random.seed(1)
    before = random.getstate()
    shown(SCALARS)
    assert random.getstate() == before


def test_table_counts_alerts_within_its_height():
    """The alerts have their own last line."""
    sink, console = started(height=40)
    sink.emit({f"h{hook}/m_{index}": 1.5 for hook in range(18) for index in range(20)}, 9, HookPoint.POST_EPOCH, step=1)
    sink.alert([alert_of("h1", "m_1")] * 3)
    sink.snapshot(9, 1)
    lines = plain(console.file.getvalue()).splitlines()
    assert lines[-1] == "alerts: 3 h1/m_1"
    assert len(lines) <= 40
