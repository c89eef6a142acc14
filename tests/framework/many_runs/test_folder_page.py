"""``loopscope report`` of a folder of many runs: bands over seeds, settings, and findings by group."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopscope.cli import main
from loopscope.durable_files import write_json
from loopscope.hooks import HookPoint, Series
from loopscope.many_runs import NAME, run_index
from loopscope.report import MetricCurve, folder_page
from loopscope.report.folder_curves import MOST_BINS, Band, BinnedCurve
from loopscope.report.folder_settings import settings_picture
from loopscope.runs import CONFIG, SUMMARY

from tests.framework.many_runs.sweeps import damage
from tests.framework.report.pages import ReadPage, ended_run, reported
from tests.framework.report.plotted import record

STEPS = list(range(1, 1001))
RATES = (0.001, 0.01, 0.1)
VALUES = st.lists(st.floats(width=32), min_size=1, max_size=900)


@pytest.fixture(autouse=True)
def _two_runs_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_index, "FEWEST", 2)
    monkeypatch.setattr(run_index, "SETTLED", 0.0)
    monkeypatch.setattr("loopscope.cli.report.MOST_RUNS", 4)


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Record three learning rates with four seeds; the highest one ends with NaN."""
    for rate in RATES:
        for seed in range(4):
            losses = [rate + seed + 1 / step for step in STEPS]
            losses[500:] = [math.nan] * 500 if rate == 0.1 else losses[500:]
            metrics = {"training_metrics/loss": Series(STEPS, losses), "training_metrics/val_loss": rate * (1 + seed)}
            root = tmp_path / "sweep" / f"rate-{rate}"
            folder = record(root / f"seed-{seed}", [(1000, metrics)], point=HookPoint.POST_STEP)
            config = {"seed": seed, "rate": rate, "same": 1}
            write_json(folder / CONFIG, {"experiment": "exp", "strategy": "only", "config": config})
            ended = ended_run(tmp_path / "other" / f"{rate}", "only", seed, [])
            (folder / SUMMARY).write_bytes((ended / SUMMARY).read_bytes())
    return tmp_path / "sweep"


@pytest.fixture
def page(sweep: Path) -> ReadPage:
    return reported(sweep)


def test_page_has_a_band_for_each_group(page: ReadPage) -> None:
    """The middle is the median over the seeds, and the band reaches from the lowest to the highest value."""
    labels = [run["label"] for run in page.data["runs"]]
    assert labels == [f"only, rate {rate}" for rate in RATES]
    (loss,) = [metric for metric in page.data["metrics"] if metric["name"] == "training_metrics/loss"]
    curve = loss["curves"][0]
    assert (curve["run"], curve["of"], curve["steps"][-1]) == (0, 4, 1000)
    assert curve["values"][-1] == pytest.approx(0.001 + 1.5 + 1 / 1000, rel=1e-4)
    assert curve["low"][0] == pytest.approx(0.001 + 1 / 7, rel=1e-4)  # a bin has 8 steps, of which the first has 7
    assert curve["high"][0] == pytest.approx(0.001 + 4, rel=1e-4)
    assert loss["curves"][2]["values"][-1] == "nan"


def test_page_orders_groups_and_names_what_decides(page: ReadPage) -> None:
    assert "best training_metrics/val_loss first" in page.text
    assert "In 4 of 12 runs" in page.text or "In 12 of 12 runs" in page.text
    assert page.text.index("only, rate 0.001") < page.text.index("only, rate 0.1")


def test_settings_are_drawn_with_a_line_per_run(page: ReadPage) -> None:
    """The equal setting has no axis, and the seed is a name."""
    lines = [attributes for tag, attributes in page.tags if tag == "polyline"]
    assert len(lines) == 12
    assert [len(line["points"].split()) for line in lines] == [2] * 12
    assert "explains by itself: rate " in page.text


def test_page_is_equal_with_and_without_an_index(sweep: Path) -> None:
    path = sweep.parent / "page.html"
    damage(sweep)
    pages = []
    for kind in ("none", "new", "used"):
        if kind == "none":
            (sweep / NAME).mkdir()
        assert main(["report", str(sweep), "-o", str(path), "--overwrite"]) == 0
        pages.append(path.read_bytes())
        if kind == "none":
            (sweep / NAME).rmdir()
    assert pages[0] == pages[1] == pages[2]


def refuse(*arguments: object, **options: object) -> None:
    raise AssertionError("a run was read")


def test_used_index_reads_no_record(sweep: Path, monkeypatch) -> None:
    first = reported(sweep)
    for name in ("read_curves", "read_history", "scan", "inspect_run", "explained"):
        monkeypatch.setattr(f"loopscope.many_runs.run_values.{name}", refuse)
    assert reported(sweep).data == first.data


@pytest.mark.process
def test_page_from_an_index_needs_no_torch(sweep: Path) -> None:
    """Its import takes most of the three seconds that a page of 1,000 runs may take."""
    words = ["report", str(sweep), "-o", str(sweep.parent / "page.html"), "--overwrite"]
    assert main(words) == 0
    code = "import sys; from loopscope.cli import main, report; from loopscope.many_runs import run_index"
    code += "; report.MOST_RUNS, run_index.FEWEST, run_index.SETTLED = 4, 2, 0"
    code += f"; main({words!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).returncode == 0


def test_descriptions_of_metrics_are_shown(page: ReadPage) -> None:
    by_name = {metric["name"]: metric for metric in page.data["metrics"]}
    assert by_name["training_metrics/loss"]["formula"].startswith("loss of the step")


def test_large_records_are_not_read(sweep: Path) -> None:
    path = next(sweep.rglob("only.jsonl"))
    with path.open("ab") as file:
        file.truncate(2**21)
    page = reported(sweep, "--most-mib", "1")
    assert "and the limit is 1,048,576" in page.text
    assert len(page.data["metrics"]) == 2


def test_full_page_leaves_out_metrics(sweep: Path, monkeypatch) -> None:
    monkeypatch.setattr(folder_page, "LARGEST_PAGE", 2_000_000)
    page = reported(sweep)
    assert (page.data["metrics"], page.data["leftOut"]) == ([], 2)


def test_groups_beyond_the_limit_have_no_curves(sweep: Path, monkeypatch) -> None:
    monkeypatch.setattr(folder_page, "BEST_GROUPS", 1)
    monkeypatch.setattr(folder_page, "WORST_GROUPS", 1)
    page = reported(sweep)
    assert [run["label"] for run in page.data["runs"]] == ["only, rate 0.001", "only, rate 0.1"]
    assert "1 group without a curve" in page.text


@given(VALUES, st.integers(1, 50))
def test_bins_keep_ends_and_extremes(values: list[float], distance: int) -> None:
    curve = MetricCurve.of_points([distance * place for place in range(len(values))], values)
    binned = BinnedCurve.of(curve)
    assert len(binned.steps) <= MOST_BINS
    assert binned.steps[-1] == curve.steps[-1]
    finite = np.clip(curve.values[curve.finite], -(2.0**127), 2.0**127)
    if len(finite):
        ends = np.nanmin(binned.values[1]), np.nanmax(binned.values[2])
        assert np.clip(ends, -(2.0**127), 2.0**127).tolist() == [finite.min(), finite.max()]
    read = BinnedCurve.of_bytes(binned.as_bytes())
    assert (read.shift, read.steps.tolist()) == (binned.shift, binned.steps.tolist())
    assert np.array_equal(read.values, binned.values, equal_nan=True)


@given(st.lists(st.lists(st.floats(-1e6, 1e6, width=32), min_size=300, max_size=300), min_size=1, max_size=5))
def test_bands_are_medians_of_bins(rows: list[list[float]]) -> None:
    """The last bin has the medians of the last values; each extreme is that of some curve."""
    band = Band.over([BinnedCurve.of(MetricCurve.of_points(range(300), row)) for row in rows])
    values = np.array(rows)
    assert band.values[-1] == np.median(values[:, -1])
    assert (band.low.min(), band.high.max()) == (values.min(), values.max())


def test_bands_of_runs_of_different_lengths() -> None:
    """Bins of the shorter run are joined, and the band ends where less than half of the runs have points."""
    curves = [BinnedCurve.of(MetricCurve.of_points(range(count), [height] * count)) for count, height in
              ((100, 1.0), (1000, 2.0), (1000, 3.0), (5000, 4.0))]  # fmt: skip
    band = Band.over(curves)
    assert band.steps[-1] <= 1023
    assert (band.values[0], band.low[0], band.high[0]) == (2.5, 1.0, 4.0)


@pytest.mark.parametrize("content", [b"", b"12345678", b"1234567890", b"\xff" * 28])
def test_other_bytes_are_no_curve(content: bytes) -> None:
    if content == b"12345678":
        content = b"\xff" * 8
    with pytest.raises(ValueError, match="not a curve"):
        BinnedCurve.of_bytes(content)


def test_settings_that_explain_are_named_first() -> None:
    settings = [{"lr": 10.0 ** -(run % 4), "width": run // 4, "seed": run} for run in range(40)]
    results = [float(run % 4) for run in range(40)]
    picture = settings_picture([*map(str, range(40))], settings, "val_loss", results, 1)
    assert "explains by itself: lr 100%, width 0%" in picture
    assert picture.count("<polyline") == 40


def test_texts_of_settings_are_escaped() -> None:
    settings = [{"<b>": "<script>"}, {"<b>": "</svg>"}]
    picture = settings_picture(["<i>", "b"], settings, "<u>/loss", [1.0, math.nan], 1)
    assert not any(tag in picture for tag in ("<b>", "<script>", "<i>", "<u>"))
    assert json.dumps(picture)


def test_equal_settings_have_no_picture() -> None:
    assert settings_picture(["a", "b"], [{"lr": 1}, {"lr": 1}], "loss", [1.0, 2.0], 1) == ""
