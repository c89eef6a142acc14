"""``loopscope report``: the page has the content of any records."""

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopscope.cli import main
from loopscope.hooks import ALERTS, HookPoint, Series
from loopscope.report import inspect_run, page
from loopscope.report.curves import MetricCurve
from loopscope.report.page import LARGEST_PAGE, thinned
from loopscope.runs import SUMMARY
from scipy import stats

from tests.framework.report.pages import reported, seeded_runs
from tests.framework.report.plotted import curve_record, record
from tests.support.processes import own_process

BAD = "</script><script>alert(1)</script><b>"
NAN, INF = math.nan, math.inf


def test_page_has_every_recorded_number(finished: Path) -> None:
    both = reported(finished)
    for index, strategy in enumerate(("clipped", "plain")):
        points: dict[str, dict[int, float]] = {}
        for _, step, _, name, value in inspect_run(finished / strategy).points:
            points.setdefault(name, {})[step] = value
        metrics = both.data["metrics"]
        shown = {metric["name"] for metric in metrics if index in [curve["run"] for curve in metric["curves"]]}
        assert shown == points.keys()
        assert all(both.curve(name, index) == points[name] for name in points)


@pytest.mark.longer
def test_page_describes_runs_and_metrics(finished: Path) -> None:
    """Status, treatments, formulas and readings are shown, and the loss comes first."""
    both = reported(finished)
    assert "small/clipped: stopped at the limit after 5 epochs, 15 steps" in both.text
    assert "treatments: grad_clip (gradients)" in both.text
    assert [run["treatments"] for run in both.data["runs"]] == ["grad_clip (gradients)", ""]
    by_name = {metric["name"]: metric for metric in both.data["metrics"]}
    assert by_name["training_metrics/loss"]["formula"].startswith("loss of the step")
    assert "reading" in by_name["training_metrics/evaluation/val_loss"]
    assert all(metric["formula"] for name, metric in by_name.items() if name.startswith("norms/"))
    assert [by_name[name]["first"] for name in ("training_metrics/loss", "norms/total_grad_norm")] == [True, False]


@pytest.mark.longer
def test_page_loads_no_external_resources(finished: Path) -> None:
    """The content security policy forbids requests, and no element has a source or link."""
    both = reported(finished)
    attributes = [values for _, values in both.tags]
    (policy,) = [values["content"] for values in attributes if values.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'unsafe-inline'")
    assert not {"link", "img", "iframe", "object", "base"} & {tag for tag, _ in both.tags}
    assert not [values for values in attributes if {"src", "href", "action"} & values.keys()]
    assert [tag for tag, _ in both.tags].count("label") == [tag for tag, _ in both.tags].count("input") > 5


@pytest.mark.longer
def test_text_of_runs_is_escaped(tmp_path: Path) -> None:
    """Names, treatments and alerts with HTML or control codes add no tags."""
    folder = record(tmp_path, [(1, {f"{BAD}/loss": 1.0, "m/loss": 2.0})])
    names = {"experiment": "<script>", "strategy": "only", "config": {}, "treatments": {"<i>": ["<b>\x1b"]}}
    (folder / "experiment_config.json").write_text(json.dumps(names))
    (folder / ALERTS).write_text(json.dumps({"epoch": 0, "step": 1, "hook": "m", "metric": "loss", "sentence": BAD}))
    report = reported(folder)
    assert [tag for tag, _ in report.tags].count("script") == 3
    assert not {"b", "i"} & {tag for tag, _ in report.tags}
    assert "<script>/only: killed" in report.text
    assert "treatments: <i> (<b>?)" in report.text
    assert report.curve(f"{BAD}/loss") == {1: 1.0}
    assert report.data["runs"][0]["alerts"][0]["sentence"] == BAD


@pytest.mark.longer
def test_nonfinite_values_and_partial_metrics_are_shown(tmp_path: Path) -> None:
    """A metric that only one run has is shown too."""
    folders = [curve_record(tmp_path, [NAN] * 3), curve_record(tmp_path, [1.0, -INF, INF], strategy="other")]
    record(tmp_path, [(4, {"m/alone": 4})], strategy="third")
    report = reported(*folders, tmp_path / "exp/third")
    assert [math.isnan(value) for value in report.curve("m/loss").values()] == [True] * 3
    assert report.curve("m/loss", 1) == {1: 1.0, 2: -INF, 3: INF}
    assert report.curve("m/alone", 2) == {4: 4}


@given(st.lists(st.floats(width=32), min_size=1, max_size=200), st.integers(1, 20))
def test_thinning_keeps_ends_extremes_and_nonfinite_values(values: list[float], pixels: int) -> None:
    """The number of points is at most five per pixel plus two."""
    curve = MetricCurve.of_points(range(len(values)), values)
    kept = thinned(curve, pixels)
    assert {0, len(values) - 1} <= set(kept.tolist())
    assert len(kept) <= 5 * pixels + 2
    finite, kept_values = curve.values[curve.finite], curve.values[kept]
    if len(finite):
        assert (finite.min(), finite.max()) == (
            kept_values[np.isfinite(kept_values)].min(),
            kept_values[np.isfinite(kept_values)].max(),
        )
    for is_kind in (np.isnan, np.isposinf, np.isneginf):
        assert is_kind(curve.values).any() == is_kind(kept_values).any()


@pytest.mark.process
def test_long_run_page_is_small_and_keeps_spikes(tmp_path: Path) -> None:
    """A curve of 200,000 points is thinned, and its largest value stays."""
    values = np.random.default_rng(0).normal(size=200_000)
    values[123_456] = 99.0
    emits = [(200_000, {f"m/{name}": Series(list(range(1, 200_001)), values.tolist()) for name in "ab"})]
    report = reported(record(tmp_path, emits, point=HookPoint.POST_STEP))
    curve = report.curve("m/a")
    assert curve[123_457] == 99.0
    assert (len(curve) < 2500, report.data["metrics"][0]["curves"][0]["points"]) == (True, 200_000)
    assert report.size < LARGEST_PAGE


@pytest.mark.slow
@own_process
def test_page_fits_two_thousand_metrics(tmp_path: Path) -> None:
    """Metrics beyond the size limit are omitted and counted."""
    rows = np.random.default_rng(0).normal(size=(20, 2000))
    folder = record(
        tmp_path, [(step, {f"m/{at}": value for at, value in enumerate(row)}) for step, row in enumerate(rows)]
    )
    for largest, fits in ((LARGEST_PAGE, True), (2_100_000, False)):
        page.LARGEST_PAGE = largest
        report = reported(folder)
        assert (report.size < largest, report.data["leftOut"] == 0) == (True, fits)
        assert 0 < len(report.data["metrics"]) == 2000 - report.data["leftOut"]


@pytest.mark.longer
def test_damaged_and_empty_runs_are_partly_shown(tmp_path: Path, capsys) -> None:
    """The readable part is shown with a sentence about the damage."""
    folder, empty = curve_record(tmp_path, [1.0, 2.0]), record(tmp_path, [], strategy="empty")
    with (folder / "only.jsonl").open("a") as file:
        file.write("{]\n")
    (folder / "summary.json").write_text("[]")
    (folder / ALERTS).write_text('{"epoch": 0}\nnothing\n')
    broken = shutil.copytree(folder, tmp_path / "exp/broken")
    (broken / "experiment_config.json").write_text("{")
    report = reported(folder, empty, broken)
    assert report.curve("m/loss") == {1: 1.0, 2: 2.0}
    assert "only.jsonl cannot be read after 2 emits" in report.text
    assert "2 lines of" in report.text
    assert "exp/only: damaged, recorded up to step 2." in report.text
    assert "exp/empty: killed, or ended without a summary" in report.text
    assert "experiment_config.json cannot be read: it is not JSON" in capsys.readouterr().out


@pytest.mark.longer
def test_oversized_files_are_not_read(tmp_path: Path, monkeypatch) -> None:
    record(tmp_path, [(1, {"m/loss": 1.0})])
    folders = [shutil.copytree(tmp_path / "exp/only", tmp_path / "exp" / name) for name in ("large", "endless")]
    with (folders[0] / "only.jsonl").open("ab") as file:
        file.truncate(2**30)  # without bytes on the disk
    (folders[1] / "summary.json").symlink_to("/dev/zero")
    report = reported(*folders)
    assert "it has 1,073,741,824 bytes, and the limit is 268,435,456" in report.text
    assert "summary.json cannot be read: it is not a regular file" in report.text


@pytest.mark.longer
def test_lists_are_drawn_as_thinned_maps(tmp_path: Path) -> None:
    """A list metric with too many rows keeps every second one, repeatedly."""
    emits = [(step, {"m/spectrum": [float(step), 0.12345678, NAN] * 100, "m/odd": ["a"]}) for step in range(500)]
    metrics = reported(record(tmp_path, emits)).data["metrics"]
    (spectrum,) = metrics[0]["maps"]
    assert ([metric["name"] for metric in metrics], metrics[0]["curves"]) == (["m/spectrum"], [])
    assert (spectrum["steps"], spectrum["seen"], spectrum["longest"]) == (list(range(0, 500, 4)), 500, 300)
    assert [row[:3] for row in spectrum["rows"]] == [[step, 0.123457, "nan"] for step in spectrum["steps"]]


@pytest.mark.longer
def test_tables_show_differences_environment_and_costs(tmp_path: Path, finished: Path) -> None:
    folders = [shutil.copytree(finished / "plain", tmp_path / name) for name in "ab"]
    config, summary = (
        json.loads((folders[1] / name).read_text()) for name in ("experiment_config.json", "summary.json")
    )
    config["config"]["lr"], summary["hook_profile"] = 0.5, {"norms": {"calls": 7}}
    (folders[1] / "experiment_config.json").write_text(json.dumps(config))
    (folders[1] / "summary.json").write_text(json.dumps(summary))
    text = reported(*folders).text
    differences, costs, environment = re.split("Cost by hook, of runs with --profile-hooks|Environment", text)[:3]
    assert differences.rpartition("Differences between the runs")[2].split()[-3:] == ["lr", "0.01", "0.5"]
    assert costs.split()[-3:] == ["b", "norms", "7"]
    assert "torch" in environment


@pytest.mark.longer
def test_seeds_are_shown_as_mean_with_interval(tmp_path: Path) -> None:
    """Means and intervals match scipy, and tests between groups are corrected."""
    report = reported(*seeded_runs(tmp_path))
    loss = next(metric for metric in report.data["metrics"] if metric["name"] == "m/loss")
    assert [(mean["group"], mean["runs"], mean["steps"]) for mean in loss["means"]] == [
        ("a", [0, 1, 2], list(range(1, 8))),
        ("b", [3, 4, 5], list(range(1, 8))),
    ]
    low, high = stats.t.interval(0.95, 2, 20.0, stats.sem([10.0, 20.0, 30.0]))
    at_ten = [loss["means"][0][name][4] * 2 for name in ("low", "values", "high")]
    assert at_ten == pytest.approx([low, 20.0, high], rel=1e-5)
    spreads, tests = re.split("Do groups differ", report.text.partition("Over seeds")[2])
    assert "final loss a 3 1 1 -1.484 3.484" in spreads
    assert "1 tests; holm is p after Holm's correction" in tests
    expected = stats.ttest_rel([0.0, 1.0, 2.0], [0.0, 1.0, 4.0])
    assert "final loss a − b -0.6667" in tests
    assert f"paired t 3 of 3 {expected.statistic:.4g} {expected.pvalue:.4g} {expected.pvalue:.4g}" in tests


@pytest.mark.longer
def test_unfinished_and_duplicate_runs_are_excluded_from_means(tmp_path: Path) -> None:
    """The page names each of them with the reason."""
    folders = seeded_runs(tmp_path)[:3]
    (folders[0] / SUMMARY).unlink()
    again = shutil.copytree(folders[1], tmp_path / "again")
    report = reported(*folders, again)
    loss = next(metric for metric in report.data["metrics"] if metric["name"] == "m/loss")
    assert [mean["runs"] for mean in loss["means"]] == [[1, 2]]
    assert "again: has the settings of" in report.text
    assert "killed, so only its recorded part is compared, and it is excluded from groups" in report.text


REFUSED = {
    "": "loopscope report needs RUN",
    "{run} -o page.pdf": "it must end in .html",
    "{run} --most-mib 0": "--most-mib is 0",
    "{run} -o mine.html": "mine.html exists and is not a loopscope report; use --overwrite",
    "nowhere": "nowhere does not exist",
}


@pytest.mark.parametrize("words", REFUSED)
def test_invalid_report_is_refused(words: str, finished: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.html").write_text("mine")
    assert main(["report", *words.format(run=finished).split()]) == 2
    assert REFUSED[words] in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.html"]
