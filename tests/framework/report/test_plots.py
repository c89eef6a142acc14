"""``loopscope plot``: recorded curves with the requested smoothing and scaling."""

import json
import math
import re
import shutil
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopscope import experiments, sinks, training_hooks
from loopscope.errors import UsageError
from loopscope.hooks import HookPoint, HookRegistry, MetricPanel, Series
from loopscope.report import Look, hook_picture, matcher, metric_picture
from loopscope.report.curves import MetricCurve
from loopscope.report.drawing import figure_of, running_mean
from loopscope.report.panels import COLOURS
from loopscope.runs import run_folders
from loopscope.sinks import CSVSink

from tests.framework.report.plotted import CURVE, SLOPE, curve_record, everything, figure, record, tied_record
from tests.support import SpyHook
from tests.support.cases import some_of

assert experiments.__all__
assert sinks.__all__
assert training_hooks.__all__
NAN, INF = math.nan, math.inf


def drawn(axes) -> list[tuple[str, list[float], list[float]]]:
    """Return colour, steps and values of the curves in axes, without marks and horizontal lines."""
    lines = [line for line in axes.lines if line.get_linestyle() != "None" and line.get_transform() == axes.transData]
    return [(line.get_color(), line.get_xdata().tolist(), line.get_ydata().tolist()) for line in lines]


def marks(axes) -> dict[str, list[float]]:
    return {line.get_marker(): line.get_xdata().tolist() for line in axes.lines if line.get_linestyle() == "None"}


def recorded(folder: Path, metric: str) -> tuple[list[float], list[float]]:
    """Read the points of a metric from the JSONL file, without the readers of the sinks."""
    lines = [json.loads(line) for line in (folder / f"{folder.name}.jsonl").read_text().splitlines()]
    points = [(line["step"], line[metric]) for line in lines if metric in line]
    return [step for step, _ in points], [value for _, value in points]


@pytest.mark.longer
def test_plotted_lines_match_recorded_values(finished):
    """Each panel shows the values at their steps in the colour of the run."""
    runs = run_folders(finished, "plot")
    patterns = ["training_metrics/loss", "norms/total_*"]
    for axes in figure(*runs, patterns=patterns).axes:
        expected = [
            (colour, *recorded(run, axes.get_title("left"))) for colour, run in zip(COLOURS, runs, strict=False)
        ]
        assert drawn(axes) == expected
        assert len(expected[0][1]) == 5
    titles = [axes.get_title("left") for axes in figure(*runs, patterns=patterns).axes]
    assert titles == ["training_metrics/loss", "norms/total_weight_norm", "norms/total_grad_norm"]


def test_csv_record_gives_same_curves_as_jsonl(finished, tmp_path):
    shutil.copytree(finished / "plain", tmp_path / "plain", ignore=shutil.ignore_patterns("*.jsonl"))
    lossless, table = everything(finished / "plain"), everything(tmp_path / "plain")
    assert lossless.curves.keys() == table.curves.keys() >= {"norms/grad_norm/0.weight"}
    for name, curve in lossless.curves.items():
        np.testing.assert_array_equal(table.curves[name].steps, curve.steps)
        np.testing.assert_array_equal(table.curves[name].values, curve.values)


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("norms/*", ["norms/total"]),
        ("norms/**", ["norms/total", "norms/grad/a.weight", "norms/grad/a[0]"]),
        ("**", ["norms/total", "norms/grad/a.weight", "norms/grad/a[0]", "m/loss"]),
        ("*", ["norms/total", "norms/grad/a.weight", "norms/grad/a[0]", "m/loss"]),
        ("*s", []),
        ("**/loss", ["m/loss"]),
        ("norms/**/a.weight", ["norms/grad/a.weight"]),
        ("norms/**/total", ["norms/total"]),
        ("**t*", ["norms/total", "norms/grad/a.weight"]),
        ("*/*/a?weight", ["norms/grad/a.weight"]),
        ("norms?total", []),
        ("norms[!x]total", []),
        ("*/[l-t]o*", ["norms/total", "m/loss"]),
        ("norms/grad/a[0]", ["norms/grad/a[0]"]),
        ("norms/grad/a[[]*", ["norms/grad/a[0]"]),
        ("m/loss[", []),
    ],
)
def test_only_double_stars_match_slashes(pattern, matched):
    names = ["norms/total", "norms/grad/a.weight", "norms/grad/a[0]", "m/loss"]
    assert list(filter(matcher([pattern]), names)) == matched


@given(st.text("ab/.*?[]!-", max_size=8), st.text("ab/.", max_size=8))
def test_patterns_without_slashes_match_like_shell(pattern, name):
    """Any pattern is accepted without an error."""
    is_match = matcher([pattern])(name)
    if "/" not in name + pattern:
        assert is_match == (name == pattern or fnmatchcase(name, pattern))


@pytest.mark.parametrize("sink_class", [sinks.JSONLSink, CSVSink])
def test_series_and_dicts_become_curves(tmp_path, sink_class):
    """A series is drawn at its own steps, and each key of a dict is one curve."""

    def emit(steps, values):
        return steps[-1], {CURVE: Series(steps, values), "m/grad/a": Series(steps, [{"x": value} for value in values])}

    emits = [emit([1, 2, 3], [0.5, NAN, 2.5]), emit([5, 6], [-1.0, True])]
    run = everything(record(tmp_path, emits, point=HookPoint.POST_STEP, sink_class=sink_class))
    assert list(run.curves) == [CURVE, "m/grad/a/x"]
    for curve in run.curves.values():
        assert curve.steps.tolist() == [1, 2, 3, 5, 6]
        np.testing.assert_array_equal(curve.values, [0.5, NAN, 2.5, -1.0, 1.0])


def test_smoothing_draws_mean_over_faint_raw_curve(tmp_path):
    (axes,) = figure(curve_record(tmp_path, SLOPE), smooth=3, log_y=False).axes
    (_, steps, raw), (_, _, smooth) = drawn(axes)
    assert (steps, raw) == ([1, 2, 3, 4, 5], SLOPE)
    np.testing.assert_allclose(smooth, [0.5, 3.5 / 3, 1.5, 6.5 / 3, 3.0])
    assert [line.get_alpha() for line in axes.lines] == [0.25, None]


@pytest.mark.parametrize("window", [1, 2, 3, 10, 64, 100, 1000])
@pytest.mark.parametrize("geometric", [False, True])
def test_running_means_match_brute_force(window, geometric):
    values = np.random.default_rng(0).normal(size=100)
    values[[3, 4, 50, 97]] = NAN, INF, -INF, NAN
    means = running_mean(MetricCurve(np.arange(100.0), values), window, geometric=geometric).values
    for index, value in enumerate(means):
        half = min(window // 2, index, 99 - index)
        around = values[index - half : index + half + 1]
        around = around[np.isfinite(around) & ((around > 0) | (not geometric))]
        mean = np.exp(np.log(around).mean()) if geometric and len(around) else around.mean() if len(around) else NAN
        np.testing.assert_allclose(value, mean if np.isfinite(values[index]) else NAN, atol=1e-12)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9), st.integers(1, 12))
def test_smoothing_keeps_both_end_points(values, window):
    """The property holds for curves of any length, since the window shrinks toward the ends."""
    smooth = running_mean(MetricCurve(np.arange(float(len(values))), np.array(values)), window).values
    assert (len(smooth), smooth[0], smooth[-1]) == (len(values), values[0], values[-1])
    halves = [min(window // 2, index, len(values) - 1 - index) for index in range(len(values))]
    expected = [np.mean(values[index - half : index + half + 1]) for index, half in enumerate(halves)]
    np.testing.assert_allclose(smooth, expected, rtol=1e-9, atol=1e-6)


def test_spike_leaves_no_rounding_error_behind():
    """The running mean is exact again as soon as the window has passed the spike."""
    values = np.array([1e20] + [1e-6] * 50)
    means = running_mean(MetricCurve(np.arange(51.0), values), 5).values
    np.testing.assert_allclose(means[3:], 1e-6, rtol=1e-12)


def test_logarithmic_axis_has_geometric_mean(tmp_path):
    (axes,) = figure(curve_record(tmp_path, [1.0, 10.0, 1e5]), smooth=3).axes
    np.testing.assert_allclose(drawn(axes)[1][2], [1, 100, 1e5])


def legend(picture_figure) -> list[str]:
    return [text.get_text().replace("\n", "") for text in picture_figure.legends[0].get_texts()]


def test_legend_describes_the_smoothing(tmp_path):
    """The legend names the number of points and the geometric mean on logarithmic axes."""
    emits = [(step, {"m/a": 10.0 ** (2 * step), "m/b": step}) for step in (1, 2, 3)]
    folder = record(tmp_path, emits)
    label = "mean of 5 points, fewer towards the ends"
    assert legend(figure(folder, patterns=["m/b"], smooth=5)) == [label, "as recorded"]
    assert legend(figure(folder, patterns=["m/a"], smooth=4)) == [f"geometric {label}", "as recorded"]
    assert legend(figure(folder, smooth=5))[0] == f"{label}; geometric on logarithmic axes"
    assert figure(folder).legends == []


@pytest.mark.parametrize(
    ("values", "look", "scale"),
    [
        ([1.0, 1000.0], {}, "linear"),
        ([1.0, 1001.0], {}, "log"),
        ([0.0, 1.0, 2000.0], {}, "linear"),
        ([1.0, NAN, INF, 2.0], {}, "linear"),
        ([1.0, 1001.0], {"log_y": False}, "linear"),
        ([1.0, 2.0], {"log_y": True}, "log"),
        ([-1.0, 0.0], {"log_y": True}, "linear"),
    ],
)
def test_axis_scale_follows_request_or_range(tmp_path, values, look, scale):
    """An axis is logarithmic on request, or if positive values span more than three decades."""
    (axes,) = figure(curve_record(tmp_path, values), **look).axes
    assert axes.get_yscale() == scale


def test_step_axis_can_be_logarithmic(finished):
    assert {axes.get_xscale() for axes in figure(finished / "plain", patterns=["norms/total*"]).axes} == {"linear"}
    axes = figure(finished / "plain", patterns=["norms/total*"], log_x=True).axes
    assert {panel.get_xscale() for panel in axes} == {"log"}


def test_nonfinite_values_are_marked_and_counted(tmp_path):
    """The curve has a gap at each of them; integers beyond the range of floats count as infinite."""
    values = [1.0, 2.0, NAN, 3.0, 10**400, -INF, NAN, 4.0]
    (axes,) = figure(curve_record(tmp_path, values)).axes
    np.testing.assert_array_equal(drawn(axes)[0][2], [1, 2, NAN, 3, NAN, NAN, NAN, 4])
    assert marks(axes) == {"x": [3, 7], "^": [5], "v": [6]}
    assert axes.texts[0].get_text() == "2 NaN (×), 1 ∞ (▲), 1 −∞ (▼)"


def test_values_outside_logarithmic_axis_are_counted(tmp_path):
    (axes,) = figure(curve_record(tmp_path, [1.0, 0.0, -2.0, 3.0]), log_y=True).axes
    assert axes.texts[0].get_text() == "2 not above 0, omitted"


def test_metric_without_finite_values_has_marks_only(tmp_path):
    """Its panel has no numbers on the vertical axis."""
    (axes,) = figure(curve_record(tmp_path, [NAN, NAN])).axes
    assert (marks(axes), list(axes.get_yticks())) == ({"x": [1, 2]}, [])


def test_isolated_points_and_short_curves_have_dots(tmp_path):
    long = [1.0] * 50
    long[10], long[12] = NAN, NAN
    (axes,) = figure(curve_record(tmp_path, long)).axes
    assert axes.lines[0].get_markevery() == [11]
    (axes,) = figure(curve_record(tmp_path, SLOPE, strategy="short")).axes
    assert axes.lines[0].get_markevery() == [0, 1, 2, 3, 4]


def test_constant_curve_is_centered_on_its_axis(tmp_path):
    """Rounding errors of the smoothing do not change the axis limits."""
    (axes,) = figure(curve_record(tmp_path, [0.1] * 50), smooth=7).axes
    assert axes.get_ylim() == pytest.approx((0.095, 0.105))


def test_overlay_colors_metrics_of_one_run(tmp_path):
    emits = [(step, {f"m/{name}": step * number for number, name in enumerate("abc", 1)}) for step in (1, 2)]
    picture_figure = figure(record(tmp_path, emits), overlay=True)
    (axes,) = picture_figure.axes
    assert drawn(axes) == [(COLOURS[index], [1, 2], [index + 1, 2 * index + 2]) for index in range(3)]
    assert [text.get_text() for text in picture_figure.legends[0].get_texts()] == ["a", "b", "c"]
    assert axes.get_title("left") == "m"


def test_overlay_colors_runs_and_dashes_metrics(tmp_path):
    """With several runs, the colour marks the run and the dash pattern marks the metric."""
    emits = [(step, {"a/x": step, "b/y": -step}) for step in (1, 2)]
    picture_figure = figure(*(record(tmp_path, emits, strategy=name) for name in ("one", "two")), overlay=True)
    styles = [(line.get_color(), line.is_dashed()) for line in picture_figure.axes[0].lines]
    assert styles == [(COLOURS[0], False), (COLOURS[0], True), (COLOURS[1], False), (COLOURS[1], True)]
    assert [text.get_text() for text in picture_figure.legends[0].get_texts()] == ["one", "two", "a/x", "b/y"]


def test_run_keeps_its_color_in_all_panels(tmp_path):
    """The colours also agree if another run lacks the metric, which the picture reports."""
    one = record(tmp_path, [(1, {"a": 1.0}), (2, {"a": 2.0})], strategy="one")
    two = record(tmp_path, [(1, {"a": 1.0, "b": 5.0})], strategy="two")
    picture = metric_picture([everything(one), everything(two)], ["**"], overlay=False)
    assert picture.sentences == ["one has no b."]
    shared, alone = figure_of(picture, Look()).axes
    assert [line[0] for line in drawn(shared)] == [COLOURS[0], COLOURS[1]]
    assert [line[0] for line in drawn(alone)] == [COLOURS[1]]


@pytest.mark.longer
def test_provenance_of_tied_run_has_four_panels(tmp_path, monkeypatch):
    """The lines show the recorded norms, ratio, cosine and clip threshold."""
    monkeypatch.chdir(tmp_path)
    run = everything(tied_record(tmp_path / "tied"))
    picture_figure = figure_of(hook_picture("provenance", [run]), Look())
    norms, ratio, clip, cosine = (drawn(axes) for axes in picture_figure.axes)
    provenance, clip_hook = "embedding_provenance", "output_projection_clip"
    both = ["embedding_grad_l2_norm", "output_proj_grad_l2_norm"]
    names = [provenance + "/" + name for name in [*both, "output_to_embedding_ratio", "cosine"]]
    names += [clip_hook + "/" + name for name in [*both, "output_proj_clip_threshold"]]
    expected = [(run.curves[name].steps.tolist(), run.curves[name].values.tolist()) for name in names]
    assert [line[1:] for line in [*norms, ratio[0], cosine[0], *clip]] == expected
    assert (len(expected[0][0]), expected[-1][0][0]) == (12, 2)
    assert [line[0] for line in [*norms, *clip]] == [*COLOURS[:2], *COLOURS[:3]]
    assert [axes.get_yscale() for axes in picture_figure.axes][::2] == ["log", "log"]


@pytest.mark.longer
def test_provenance_colors_several_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [everything(tied_record(tmp_path / "bare", clip=False)), everything(tied_record(tmp_path / "clipped"))]
    picture_figure = figure_of(hook_picture("provenance", runs), Look())
    assert [line[0] for line in drawn(picture_figure.axes[0])] == [COLOURS[0], COLOURS[0], COLOURS[1], COLOURS[1]]
    assert {line[0] for line in drawn(picture_figure.axes[2])} == {COLOURS[1]}
    assert "clipped: clipped 92%" in picture_figure.axes[2].texts[0].get_text()


def test_initial_evaluation_is_drawn_at_step_zero(finished, tmp_path):
    """A run without a summary starts at its first recorded evaluation."""
    initial = json.loads((finished / "plain/summary.json").read_text())["initial"]
    curves = everything(finished / "plain").curves
    for name in ("val_acc", "evaluation/val_loss"):
        curve = curves[f"training_metrics/{name}"]
        assert (curve.steps[0], curve.values[0]) == (0, initial[name.rpartition("/")[2]])
    assert curves["training_metrics/loss"].steps[0] > 0
    running = shutil.copytree(finished / "plain", tmp_path / "plain", ignore=shutil.ignore_patterns("summary.json"))
    assert everything(running).curves["training_metrics/val_acc"].steps[0] > 0


def test_epochs_are_steps_over_epoch_length(finished):
    """The position is a whole number at the end of each epoch."""
    run = everything(finished / "plain")
    assert run.in_epochs().curves["training_metrics/loss"].steps.tolist() == [1, 2, 3, 4, 5]
    assert run.in_epochs().curves["training_metrics/val_acc"].steps[0] == 0
    epochs, steps = (curves["norms/total_grad_norm"].steps for curves in (run.in_epochs().curves, run.curves))
    np.testing.assert_allclose(epochs * run.epoch_steps, steps)


def test_unclear_epoch_ends_give_no_epoch_axis(tmp_path):
    """Steps become epochs only if the ends of the epochs are recorded and agree."""
    assert everything(curve_record(tmp_path, SLOPE)).epoch_steps == 0
    emits = [(8, {CURVE: Series([2, 8], [1.0, 2.0])})]
    steps = record(tmp_path, emits, strategy="steps", point=HookPoint.POST_STEP)
    assert everything(steps).epoch_steps == 0
    with (steps / "steps.jsonl").open("a") as file:
        file.write('{"epoch":1,"step":8,"hook_point":"POST_EPOCH","m/loss":3.0}\n')
    run = everything(steps)
    assert (run.epoch_steps, run.in_epochs().curves[CURVE].steps.tolist()) == (4, [0.5, 2])


@pytest.mark.longer
@pytest.mark.parametrize("log_y", [False, True])
@pytest.mark.parametrize("scale", some_of([1e-300, 1e-4, 0.07, 1e-3, 1e6, 123.0, 1e300, 1e5], 4))
def test_tick_labels_show_numbers_without_offset(tmp_path, scale, log_y):
    """The values range from 1e-300 to 1e300 on linear and logarithmic axes."""
    metrics = {"m/wide": [scale, 50 * scale], "m/narrow": [scale, 1.00001 * scale]}
    emits = [(step, {name: values[index] for name, values in metrics.items()}) for index, step in ((0, 1), (1, 900))]
    picture_figure = figure(record(tmp_path, emits), log_y=log_y, log_x=log_y)
    picture_figure.draw_without_rendering()
    for axis in [axis for axes in picture_figure.axes for axis in (axes.xaxis, axes.yaxis)]:
        labels = [(tick.get_loc(), tick.label1.get_text()) for tick in axis.get_major_ticks() + axis.get_minor_ticks()]
        texts = {text: at for at, text in labels if text}
        assert len(texts) >= 2 or axis.get_scale() == "log"
        for text, at in texts.items():
            assert re.fullmatch(r"-?\d{1,3}(,\d{3})*(\.\d+)?|-?\d(\.\d+)?e-?\d+", text)
            assert float(text.replace(",", "")) == pytest.approx(at, rel=1e-8)
            assert ("e" in text) <= (abs(at) < 1e-3 or abs(at) >= 1e6)
        assert axis.get_offset_text().get_text() == ""


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.parametrize("size", [(4, 3), (12, 8), (3, 12)])
@pytest.mark.parametrize("panels", [1, 5, *(pytest.param(number, marks=pytest.mark.slow) for number in (12, 24))])
def test_figure_shows_all_panels_or_is_refused(tmp_path, size, panels):
    """Panels and titles stay legible at each size, and too many panels for a size raise an error."""
    names = [f"m/{'quite_a_long_name/' * 2}{index}" for index in range(panels)]
    folders = [
        record(tmp_path, [(1, dict.fromkeys(names, 1.0)), (2, dict.fromkeys(names, NAN))], strategy=name)
        for name in "ab"
    ]
    if panels == 24 and size == (4, 3):
        with pytest.raises(UsageError, match="A size of 4x3 inches is too small for 24 panels"):
            figure(*folders, size=size)
        return
    picture_figure = figure(*folders, size=size)
    picture_figure.draw_without_rendering()
    assert (tuple(picture_figure.get_size_inches()), len(picture_figure.axes)) == (size, panels)
    for axes in picture_figure.axes:
        assert min(axes.get_position().size * size) > 0.2  # inches
        assert axes.title.get_fontsize() >= 4.5


class Drawn(SpyHook):
    """A hook with a panel in a separate picture."""

    name = "drawn"
    panels = (MetricPanel(picture="sketch", place=0, title="Both", y_label="", curves={"a": "first", "b": ""}),)

    def __init__(self) -> None:
        super().__init__()


def test_custom_hook_can_request_its_picture(tmp_path):
    """The picture names the runs that lack its metrics, and it is refused if every run lacks them."""
    runs = [everything(record(tmp_path, [(1, {f"drawn/{name}": 1.0})], strategy=name)) for name in "ax"]
    HookRegistry.register(Drawn)
    try:
        picture = hook_picture("sketch", runs)
        with pytest.raises(UsageError, match="has no metrics of drawn; enable these hooks"):
            hook_picture("sketch", runs[1:])
    finally:
        HookRegistry.unregister("drawn")
    assert picture.sentences == ["Both: drawn recorded none in x."]
    assert [label for label, _ in picture.legend] == ["a", "x", "first"]
