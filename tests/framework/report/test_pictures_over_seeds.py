"""Pictures of means over seeds: means and bands against scipy, and tests between groups."""

import json
import shutil
from pathlib import Path

import loopscope
import numpy as np
import pytest
from loopscope import sinks
from loopscope.errors import UsageError
from loopscope.report import compare_runs, inspect_run, read_runs, seeds_picture
from loopscope.report.drawing import BAND
from loopscope.runs import CONFIG
from scipy import stats

from tests.framework.report.plotted import CURVE, curve_record

assert sinks.__all__
GENERATOR = np.random.default_rng(3)
VALUES = {"a": GENERATOR.normal(2.0, 0.1, (4, 6)), "b": GENERATOR.normal(1.0, 0.1, (4, 6))}


def seeded(root: Path, strategy: str, seed: int, values: list[float]) -> Path:
    """Record a curve as a run of a strategy with a seed."""
    folder = root / strategy / f"seed-{seed}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    curve_record(root / "once", values, strategy=strategy).rename(folder)
    shutil.rmtree(root / "once")
    config = json.loads((folder / CONFIG).read_text()) | {"config": {"seed": seed, "output_dir": str(root)}}
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for strategy, rows in VALUES.items():
        for seed, row in enumerate(rows.tolist()):
            seeded(tmp_path, strategy, seed, row[: 5 if seed == 3 else 6])
    return tmp_path


def test_seed_plot_shows_mean_and_interval(runs):
    """The line is the mean and the band is the 95% t interval, up to the last step that every seed has."""
    figure = loopscope.plot(runs, CURVE, seeds=True)
    lines, bands = figure.axes[0].lines, figure.axes[0].collections
    assert len(lines) == len(bands) == len(VALUES)
    for line, band, values in zip(lines, bands, VALUES.values(), strict=True):
        common = values[:, :5]
        assert line.get_xdata().tolist() == [1, 2, 3, 4, 5]
        assert line.get_ydata() == pytest.approx(common.mean(axis=0))
        expected = stats.t.interval(0.95, 3, common.mean(axis=0), stats.sem(common))
        corners = band.get_paths()[0].vertices
        for step, low, high in zip(range(1, 6), *expected, strict=True):
            heights = corners[corners[:, 0] == step][:, 1]
            assert (heights.min(), heights.max()) == pytest.approx((low, high))
    assert [text.get_text() for text in figure.legends[0].texts] == ["a", "b", BAND]


def test_group_test_matches_compare_command(tmp_path):
    """The remark of a panel and the compare command report the same paired t test."""
    for strategy, rows in VALUES.items():
        for seed, row in enumerate(rows.tolist()):
            folder = seeded(tmp_path, strategy, seed, row)
            summary = {
                "status": "completed",
                "epochs": 6,
                "steps": 6,
                "error": None,
                "metrics": {},
                "training_loss": 1.0,
            }
            summary |= {"initial": {}, "final": {}, "target_reached": None, "strategy": strategy, "treatments": {}}
            summary |= {"seconds": {"training": 1.0}, "hook_errors": [], "output_dir": str(folder)}
            (folder / "summary.json").write_text(json.dumps(summary))
    read, _ = read_runs([tmp_path], lambda name: True, "step")
    picture = seeds_picture(read, [CURVE], overlay=False)
    compared = compare_runs([inspect_run(run.folder) for run in read], [CURVE])["tests"]
    test = next(row for row in compared if row["number"] == f"last {CURVE}")
    assert test["p"] == pytest.approx(stats.ttest_rel(VALUES["a"][:, -1], VALUES["b"][:, -1]).pvalue)
    remark = f"last a − b: {test['difference']:.3g} ({test['low']:.3g} to {test['high']:.3g}), p {test['p']:.2g} "
    assert picture.panels[0].remark == remark + "(paired t, Holm over 1)"
    assert picture.sentences == [f"{CURVE}: {picture.panels[0].remark}."]


def test_omitted_runs_and_steps_are_reported(runs):
    """Duplicate runs, shortened curves and groups with too few seeds are listed."""
    shutil.copytree(runs / "a/seed-1", runs / "again")
    seeded(runs, "c", 0, [1.0, 2.0])
    read, _ = read_runs([runs, runs / "again"], lambda name: True, None)
    sentences = seeds_picture(read, [CURVE], overlay=False).sentences
    assert f"a is drawn to the end of its shortest run: {CURVE}." in sentences
    assert "One seed is not enough for a significance test: c." in sentences
    assert any(
        sentence.startswith("Omitted, since another run has the same options and seed") for sentence in sentences
    )
    assert f"{CURVE}: last a − c: too few seeds." in sentences


def test_non_finite_means_leave_marked_gaps(tmp_path):
    for seed, values in enumerate(([1.0, 2.0, 3.0], [1.0, float("nan"), 4.0])):
        seeded(tmp_path, "a", seed, values)
    line, mark = loopscope.plot(tmp_path, CURVE, seeds=True).axes[0].lines
    assert np.isnan(line.get_ydata()).tolist() == [False, True, False]
    assert mark.get_xdata().tolist() == [2]


def test_log_axis_clips_nonpositive_intervals(tmp_path):
    """An interval that reaches zero ends at half of the lowest mean."""
    for seed, values in enumerate(([1.0, 1.0, 0.2], [1.1, 3.0, 0.6])):
        seeded(tmp_path, "a", seed, values)
    (band,) = loopscope.plot(tmp_path, CURVE, seeds=True, log_y=True).axes[0].collections
    assert band.get_paths()[0].vertices[:, 1].min() == pytest.approx(0.2)
    assert len(band.get_paths()) == 1


def test_runs_without_a_seed_are_refused(tmp_path):
    folder = curve_record(tmp_path, [1.0, 2.0])
    with pytest.raises(UsageError, match=r"runs with a recorded seed; .* has none"):
        loopscope.plot(folder, CURVE, seeds=True)
    with pytest.raises(UsageError, match=r"needs metrics: loopscope\.plot"):
        loopscope.plot(folder)


def test_metric_of_some_seeds_is_averaged(runs):
    """The mean covers the seeds that have the metric, and an unknown metric raises an error with its name."""
    for seed in (2, 3):
        path = runs / f"a/seed-{seed}/a.jsonl"
        path.write_text(path.read_text().replace(CURVE, "m/other"))
    read, _ = read_runs([runs / "a"], lambda name: True, None)
    picture = seeds_picture(read, ["m/*"], overlay=False)
    drawn = {panel.title: panel.traces[0][0].values for panel in picture.panels}
    assert drawn[CURVE] == pytest.approx(VALUES["a"][:2].mean(axis=0))
    assert drawn["m/other"] == pytest.approx(VALUES["a"][2:, :5].mean(axis=0))
    assert f"Only some seeds of a have: {CURVE}, m/other." in picture.sentences
    with pytest.raises(UsageError, match=f"No metric matches 'm/los'; .*{CURVE}"):
        seeds_picture(read, ["m/los"], overlay=False)
