"""The top of the page: the verdict, the findings, the results and the order of the charts."""

import json
from pathlib import Path

import numpy as np
import pytest
from loopscope.doctor import Curve, Diagnosis, Finding, diagnose
from loopscope.hooks import ALERTS
from loopscope.report import FoundRun, ShownRun, ordered
from loopscope.report.relevance import finding_groups
from loopscope.report.run_reader import read_shown
from loopscope.report.sections import verdict_of
from loopscope.report.tables import COLOURS, RunStyle
from loopscope.runs import read_history

from tests.framework.report.faulty_runs import SPIKE, faulty_run, healthy_run
from tests.framework.report.pages import reported


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [faulty_run(tmp_path), healthy_run(tmp_path)]


@pytest.mark.longer
def test_verdict_comes_before_everything(runs: list[Path]) -> None:
    text = reported(*runs).text
    found = "parameters without optimizer (warning, faulty); loss spike (warning, faulty)"
    assert f"Problems in 1 of 2 runs: {found}." in text[:200]
    assert text.index("Diagnosis") < text.index("Results") < text.index("Curves") < text.index("More curves")
    assert "healthy ✔ No problem was found." in text


@pytest.mark.longer
def test_finding_has_all_its_parts(runs: list[Path]) -> None:
    """Severity, first step, confidence, why, next, and the measured value."""
    text = reported(*runs).text.partition("Diagnosis")[2]
    assert "1 Parameters without optimizer ▲ warning before the first step · 95% certain" in text
    assert "2 of 8 trainable parameters are in no optimizer" in text
    assert "Next Create the optimizer after the model is complete" in text
    assert "Measured facts/without_optimizer 2, limit 0 (usual: 0)" in text
    assert "2 Loss spike ▲ warning from step 5" in text


def test_page_and_doctor_have_equal_findings(runs: list[Path]) -> None:
    for folder in runs:
        assert read_shown(folder, "a", 2**20).diagnosis == diagnose(read_history(folder))


NAMES = [f"llama3-8b-sft-openhermes-2p5-packed-cosine-lr{rate}-s{seed}" for rate in (1, 3) for seed in range(6)]


def many_runs(root: Path) -> list[Path]:
    """Record 12 runs with long names, of which the last ones have findings."""
    return [(faulty_run if index > 7 else healthy_run)(root, name) for index, name in enumerate(NAMES)]


def test_long_names_are_cut_to_their_differences(tmp_path: Path) -> None:
    """The title is the folder, and the full names are titles of elements."""
    page = reported(*many_runs(tmp_path))
    assert page.text.startswith("exp: 12 runs")
    assert [run["label"] for run in page.data["runs"]] == [f"…{name[-6:]}" for name in NAMES]
    titles = [tag for tag, attributes in page.tags if attributes.get("title") == NAMES[0]]
    assert {"label", "th", "h3"} <= {*titles}


def test_equal_findings_of_runs_are_one(tmp_path: Path) -> None:
    """The verdict names each finding once, and so do the marks in the charts."""
    page = reported(*many_runs(tmp_path))
    verdict = "Problems in 4 of 12 runs: parameters without optimizer (warning, 4 runs); loss spike (warning, 4 runs)."
    assert verdict in page.text
    assert {mark["number"] for mark in page.data["findings"]} == {1, 2}
    items = [attributes for tag, attributes in page.tags if tag == "li" and "value" in attributes]
    assert [item["id"] for item in items] == ["finding-1", "finding-2"]
    assert page.text.index("…lr3-s5 ▲ 2 warnings") < page.text.index("…lr1-s0 ✔ No problem was found.")


def test_severe_findings_come_first(tmp_path: Path) -> None:
    """A critical finding of the last run precedes warnings of more runs, in the verdict and in the list."""
    runs = [
        shown_with("warning", "b"),
        shown_with("warning", "b"),
        shown_with("info", "c"),
        shown_with("critical", "a"),
    ]
    groups = finding_groups(runs)
    assert [(group.number, group.finding.id, len(group.members)) for group in groups] == [
        (1, "a", 1),
        (2, "b", 2),
        (3, "c", 1),
    ]
    assert verdict_of(runs) == ("critical", "Problems in 3 of 4 runs: a (critical, a); b (warning, 2 runs).")


def shown_with(severity: str, name: str) -> ShownRun:
    finding = Finding(name, severity, 1, "why", "next")  # type: ignore[arg-type]
    return ShownRun(name, FoundRun(Path(name), "completed"), diagnosis=Diagnosis([finding]))


@pytest.mark.longer
def test_findings_are_marked_in_charts(runs: list[Path]) -> None:
    """Each finding names its step, and the recorded metrics of its evidence with their limits."""
    first, second = reported(*runs).data["findings"]
    assert (first["number"], first["run"], first["step"], first["metrics"]) == (1, 0, 0, [])
    spike = [{"name": "loss_spikes/loss_deviation", "limit": 6.0}]
    assert (second["number"], second["severity"], second["step"], second["metrics"]) == (2, "warning", 5, spike)


@pytest.mark.longer
def test_relevant_metrics_are_shown_first(runs: list[Path]) -> None:
    """Loss, validation, evidence, accuracy, learning rate and gradient norm; then hooks in the order of the record."""
    data = reported(*runs).data
    assert data["first"] == [
        *("training_checks/loss", "training_metrics/evaluation/val_loss", "loss_spikes/loss_deviation"),
        *("training_metrics/val_acc", "training_metrics/lr", "training_checks/grad_norm"),
    ]
    assert data["lead"] == data["first"][:4]
    assert [metric["name"] for metric in data["metrics"]] == [*data["first"], "zeta/a", "alpha/b"]


def test_metrics_without_meaning_keep_their_order() -> None:
    order = ordered({"z/b": 3, "z/a": 3, "y/c": 3, "x/d": 3, "w/e": 3}, [])
    assert order.first == ["z/b", "z/a", "y/c", "x/d"]
    assert order.names == ["z/b", "z/a", "y/c", "x/d", "w/e"]


@pytest.mark.longer
def test_results_have_last_best_and_settings(runs: list[Path]) -> None:
    text = reported(*runs).text.partition("Results")[2].partition("Curves")[0]
    assert "run steps training loss val_loss val_acc rate" in text
    assert "faulty 8 1.2 1.7 0.8333 0.2" in text


@pytest.mark.longer
def test_sections_without_content_are_left_out(tmp_path: Path) -> None:
    text = reported(healthy_run(tmp_path)).text
    assert not [word for word in ("None.", "Alerts", "Phases", "Differences", "Environment", "Cost") if word in text]


@pytest.mark.longer
def test_alerts_are_grouped_and_explained(tmp_path: Path) -> None:
    """Alerts of old files are warnings, with an id of hook and metric; recoveries are not counted."""
    folder = faulty_run(tmp_path, id="loss-spike", severity="warning")
    more = [
        {**SPIKE, "step": 6, "metric": "other"},
        {**SPIKE, "step": 8, "metric": "other"},
        {**SPIKE, "is_over": True},
    ]
    with (folder / ALERTS).open("a") as file:
        file.writelines(json.dumps(alert) + "\n" for alert in more)
    text = reported(folder).text.partition("3 alerts of 2 kinds")[2]
    assert "Warning : it is probably worse than it could be." in text
    assert "▲ warning loss-spike faulty 5 5 1 The loss spiked at step 5." in text
    assert "▲ warning loss-spikes-other faulty 6 8 2 The loss spiked" in text


@pytest.mark.longer
def test_phases_are_listed_with_first_steps(tmp_path: Path) -> None:
    folder = healthy_run(tmp_path)
    lines = (folder / "healthy.jsonl").read_text().replace('"zeta/a"', '"phases/phase"')
    (folder / "healthy.jsonl").write_text(lines)
    text = reported(folder).text.partition("A dotted vertical line")[2]
    assert "phases/phase : 0 memorisation" in text
    assert "healthy phases/phase 1 1 healthy phases/phase 2 2" in text


@pytest.mark.parametrize("count", [0, 1, 4096, 4097, 20_001])
def test_curve_of_points_equals_added_points(count: int) -> None:
    steps, values = list(range(count)), np.random.default_rng(0).normal(size=count).tolist()
    values[count // 2 :: 977] = [float("nan")] * len(values[count // 2 :: 977])
    added = Curve()
    for step, value in zip(steps, values, strict=True):
        added.add(step, value)
    curve = Curve.of_points(steps, values)
    assert str(vars(curve)) == str(vars(added))


def test_styles_of_runs_are_unique() -> None:
    """Every colour comes back with other dashes."""
    styles = {RunStyle.numbered(place, is_treated=has).swatch for place in range(28) for has in (False, True)}
    assert len(styles) == 2 * 4 * len(COLOURS)
