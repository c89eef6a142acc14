"""Rewinds of a run: on the page of ``loopscope report`` and in lists of runs."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import loopscope.sinks
import loopscope.training_hooks  # noqa: F401  (fills the registries)
import pytest
from loopscope.cli import main
from loopscope.durable_files import write_json
from loopscope.hooks import ALERTS
from loopscope.laboratory.questions import Explanation, explanation_lines
from loopscope.many_runs import find_runs
from loopscope.runs import EXPLANATION, REWINDS, SUMMARY, StepRange

from tests.framework.laboratory.planted import explanation_of, session
from tests.framework.report.pages import ReadPage, reported
from tests.framework.report.plotted import curve_record

pytestmark = pytest.mark.slow  # a run is trained, and a step of it explained
BAD = "</script><script>alert(1)</script><b>"
OPTIONS: dict[str, Any] = {"plant": "corrupted_row", "plant_step": 60, "steps": 62}


@pytest.fixture(scope="module")
def explanation(tmp_path_factory: pytest.TempPathFactory) -> Explanation:
    """Train a run, explain a step of it, and train a stretch again with other hooks."""
    folder = tmp_path_factory.mktemp("rewound")
    explanation = explanation_of(folder, 60, **OPTIONS)
    session(folder, {"variance": {"window": 2, "every": 10}}, **OPTIONS).rewind(StepRange(55, 58))
    return explanation


@pytest.fixture
def run(explanation: Explanation, tmp_path: Path) -> Path:
    assert explanation.folder
    return shutil.copytree(explanation.folder.parents[1], tmp_path / "planted/plain")


def section(page: ReadPage) -> str:
    return page.text.partition("Rewinds of")[2].partition("Time of a step")[0].partition("Environment of any run")[0]


def test_page_lists_rewinds_by_first_step(explanation: Explanation, run: Path) -> None:
    """A repeated stretch and an explained step are shown with cause, branches and outlier rows."""
    page = reported(run)
    stretch, _, step = section(page).partition("Step 60, explained")
    assert "steps 55 to 58 again State: completed. Added hooks, or hooks with other options: variance." in stretch
    explanation_text = " ".join(explanation_lines(explanation, 10_000)).split("Written to")[0]
    assert explanation.cause == "data"
    for words in (f"Cause: data {explanation.verdict}", f"Where: {explanation.where}.", "the same step again 5 "):
        assert words in step
    (row,) = explanation.outlier_rows
    assert f"{row.index} {row.loss:.4g} {row.gradient_norm:.4g} the row {row.index}" in step
    assert all(f"{branch.effect:.4g}" in step for branch in explanation.branches)
    assert "without the outlier rows" in step
    assert "without the outlier rows" in explanation_text


def test_rewind_curves_show_only_added_hooks(run: Path) -> None:
    """The stretch is a separate entry in the list of runs."""
    page = reported(run)
    labels = [entry["label"] for entry in page.data["runs"]]
    assert labels == ["plain", "plain, steps 55 to 58 again"]
    hooks = {
        index: {metric["name"].split("/")[0] for metric in page.data["metrics"] if index in _runs(metric)}
        for index in (0, 1)
    }
    assert hooks == {0: {"training_metrics"}, 1: {"variance"}}
    assert page.curve("variance/mean_norm", 1).keys() == {*range(2, 59, 10)}
    assert ("button", "1") in [(tag, attributes.get("data-run")) for tag, attributes in page.tags]


def _runs(metric: dict[str, Any]) -> list[int]:
    return [curve["run"] for curve in metric["curves"]]


def test_page_without_rewinds_is_otherwise_equal(run: Path) -> None:
    page_with_rewinds = reported(run)
    shutil.rmtree(run / REWINDS)
    page = reported(run)
    assert page.data["runs"] == page_with_rewinds.data["runs"][:1]
    assert page.data["metrics"] == [metric for metric in page_with_rewinds.data["metrics"] if 0 in _runs(metric)]
    assert "Rewinds" not in page.text
    text = page_with_rewinds.text.replace(f"Rewinds of{section(page_with_rewinds)}", "")
    assert page.text == text.replace(" plain, steps 55 to 58 again", "")  # in the legend


def test_diverged_rewind_is_reported(run: Path) -> None:
    """The error of the stretch is shown as text."""
    folder = run / REWINDS / "steps_55_to_58"
    summary = json.loads((folder / SUMMARY).read_text())
    write_json(folder / SUMMARY, {**summary, "status": "failed", "error": f"This run parts {BAD}"})
    assert f"State: failed (This run parts {BAD}). Added hooks" in section(reported(run))


ROW = {"index": 1, "place": 1, "loss": 1.0, "gradient_norm": 1, "stands_out": True, "description": None}
DAMAGE: dict[str, tuple[Any, str]] = {
    "not JSON": ("{]", "it is not JSON"),
    "no object": ("[]", "it is JSON, but not an object"),
    "without a verdict": ({"verdict": ...}, "it has no field 'verdict'"),
    "a verdict of numbers": ({"verdict": [1]}, "its field 'verdict' must be text"),
    "no step": ({"step": True}, "its field 'step' must be an integer"),
    "a huge loss": ({"rows": [{**ROW, "loss": 10**400}]}, "it has a number too large for a loss or a step"),
    "odd rows": ({"rows": [{"place": "1"}]}, "its field 'rows' must be a list"),
    "odd branches": ({"branches": {"run": 1}}, "its field 'branches' must be a list"),
    "odd where": ({"where": {"step": 1}}, "its field 'where' must be an object"),
    "deep": ('{"rows": ' + "[" * 5000 + "]" * 5000 + "}", "it is not JSON"),
}


def test_damaged_explanation_is_reported(run: Path) -> None:
    intact = json.loads((run / REWINDS / "explained_step_60" / EXPLANATION).read_text())
    for step, (content, _) in enumerate(DAMAGE.values(), 100):
        if isinstance(content, dict):
            changed = {name: value for name, value in {**intact, **content}.items() if value is not ...}
            content = json.dumps(changed)
        path = run / REWINDS / f"explained_step_{step}" / EXPLANATION
        path.parent.mkdir()
        path.write_text(content)
    page = reported(run)
    problems = page.text.partition("Rewinds of")[0]
    for step, (_, sentence) in enumerate(DAMAGE.values(), 100):
        assert re.search(f"explained_step_{step}/{EXPLANATION} cannot be (used|read): {re.escape(sentence)}", problems)
    assert page.text.count(", explained") == 1


def test_unreadable_explanations_are_reported(run: Path) -> None:
    """A missing, an oversized and an endless file are each named, and the others are shown."""
    for step, name in enumerate(("huge", "endless", "missing")):
        path = run / REWINDS / f"explained_step_{step}" / EXPLANATION
        path.parent.mkdir()
        if name == "huge":
            with path.open("wb") as file:
                file.truncate(2**30)  # without bytes on the disk
        elif name == "endless":
            path.symlink_to("/dev/zero")
    (run / REWINDS / "steps_9_to_10").write_text("no folder")
    text = reported(run).text
    for sentence in ("has more than 67,108,864 bytes", "it is not a regular file", "No such file or directory"):
        assert sentence in text
    assert "steps_9_to_10 is not the folder of a run" in text
    assert "Step 60, explained" in text


def test_odd_explanation_texts_and_numbers_are_shown_safely(run: Path) -> None:
    """HTML is escaped, and rows with non-finite losses are sorted."""
    path = run / REWINDS / "explained_step_60" / EXPLANATION
    content = json.loads(path.read_text())
    described = [BAD, {"label": 3, "text": "a\nb"}, [[0.5] * 999], None]
    rows = [
        {**ROW, "index": index, "place": index, "loss": loss, "gradient_norm": math.inf, "description": description}
        for index, (loss, description) in enumerate(zip((1.0, math.inf, math.nan, -math.inf), described, strict=True))
    ]
    content |= {"rows": [*rows, *rows, {**rows[0], "index": None}], "verdict": BAD, "left_out": [BAD], "cause": None}
    content["branches"][0] |= {"name": BAD, "later": math.nan, "removed": -math.inf}
    content["where"] |= {"name": BAD, "value": math.nan, "usual": math.inf}
    write_json(path, content)
    page = reported(run)
    assert [tag for tag, _ in page.tags].count("script") == 3
    assert "b" not in {tag for tag, _ in page.tags}
    text = section(page)
    assert text.count(BAD) == 6
    assert "Cause: unknown" in text
    in_order = ["1 inf inf {'label': 3, 'text': 'a\\nb'}", "2 nan inf [[0.5, 0.5,", f"0 1 inf {BAD}", "3 -inf inf"]
    places = [text.index(words) for words in in_order]
    assert places == sorted(places)
    assert f"place 0 1 inf {BAD}" in text


def test_alerts_name_their_rows(tmp_path: Path) -> None:
    folder = curve_record(tmp_path, [1.0, 2.0])
    row_lists = [[17, 2600, 44, *range(29)], [5], [], "17", [1.5], None]
    alert = {"epoch": 0, "step": 1, "hook": "m", "metric": "loss", "sentence": "It rises."}
    lines = [json.dumps({**alert, "rows": rows}) for rows in row_lists]
    (folder / ALERTS).write_text("\n".join([json.dumps(alert), *lines]))
    alerts = reported(folder).data["runs"][0]["alerts"]
    assert [shown_alert.get("rows") for shown_alert in alerts] == [
        None,
        "rows 17, 2600, 44 and 29 more",
        "rows 5",
        *[None] * 4,
    ]


def test_lists_omit_repeated_stretches(run: Path, capsys) -> None:
    """ls and compare omit them, but show accepts the folder of a rewind."""
    assert [found_run.path for found_run in find_runs(run.parent)] == [run]
    assert main(["ls", str(run.parent)]) == 0
    assert REWINDS not in capsys.readouterr().out
    assert main(["compare", str(run.parent)]) == 2
    assert "could read 1." in capsys.readouterr().err
    folders = [f"explained_step_60/{name}" for name in ("branches", "history")] + ["steps_55_to_58"]
    assert [found_run.path for found_run in find_runs(run / REWINDS)] == [run / REWINDS / name for name in folders]
    assert main(["show", str(run / REWINDS / "steps_55_to_58")]) == 0
    assert "variance" in capsys.readouterr().out
