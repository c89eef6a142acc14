"""Planted causes are named with their rows and parameters, and runs without a planted cause have none."""

import io
import json
import re
from collections import Counter
from contextlib import redirect_stdout

import pytest
from loopscope import sinks, training_hooks
from loopscope.cli import main
from loopscope.laboratory.questions import Explanation, explain, explanation
from loopscope.laboratory.questions.departures import Deviation

from tests.framework.laboratory.planted import (
    CAUSES,
    COPIES,
    FLIPPED,
    LAYER,
    OVERWRITTEN,
    PLANTS,
    Planted,
    PlantedConfig,
    PlantedLoader,
    explained_plant,
)
from tests.framework.runs.small_experiment import registered
from tests.support.processes import own_process

FILLED = (sinks, training_hooks)
RUNS = 40


@pytest.fixture(autouse=True)
def planted():
    with registered(Planted):
        yield


def rows_at(step: int, seed: int, plant: str) -> list[int]:
    """Return the row indices of a batch; a corrupted row has position 7."""
    config = PlantedConfig(seed=seed, plant=plant, plant_step=step)
    loader = PlantedLoader(config, Planted(config).data())
    epoch, start = divmod(step - 1, len(loader))
    return next(loader.row_indices(epoch, start)).tolist()


def names_planted_cause(found: Explanation, plant: str, step: int, seed: int) -> bool:
    """Return whether step, row, layer or parameter are those that were planted."""
    rows = rows_at(step, seed, plant)
    out = {row.index for row in found.outlier_rows}
    where = found.where
    named = {
        "corrupted_row": out == {rows[7]},
        "repeated_row": out == {rows[0]} and sum(row.stands_out for row in found.rows) == COPIES - 1,
        "overflow": where is not None and (where.quantity, where.name) == ("output", LAYER),
        "bit": FLIPPED in found.verdict,
        "overwritten": where is not None and (where.quantity, where.name) == ("update", OVERWRITTEN),
        "rate": where is not None and where.quantity == "lr",
        "second_moment": where is not None and where.quantity == "state" and "exp_avg_sq" in where.name,
    }
    return where is not None and where.step == step and named[plant]


@pytest.mark.parametrize("plant", ["corrupted_row", "bit"])
@pytest.mark.slow
def test_planted_cause_is_identified(plant, tmp_path):
    """The explanation and its JSON file contain the planted cause, step and location."""
    step, found = explained_plant(tmp_path, plant, seed=3)
    assert found.cause == CAUSES[plant], found.verdict
    assert names_planted_cause(found, plant, step, 3), found.where
    written = json.loads((found.folder / "explanation.json").read_text())
    assert written["cause"] == found.cause
    assert written["where"]["step"] == step


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS)
def test_most_planted_causes_are_identified(plant, tmp_path):
    """In 40 runs, 90% of the causes are right, and 95% of the runs without a cause report none."""
    causes, named = Counter(), 0
    for seed in range(RUNS):
        step, found = explained_plant(tmp_path / str(seed), plant, seed)
        causes[found.cause] += 1
        named += plant == "none" or names_planted_cause(found, plant, step, seed)
    assert causes[CAUSES[plant]] >= (0.95 if plant == "none" else 0.9) * RUNS, causes
    assert named >= 0.9 * RUNS


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS)
def test_early_causes_are_right_or_unknown(plant, tmp_path):
    """In 20 runs whose loss still falls, at most one verdict names a cause that was not planted."""
    causes = Counter(
        explained_plant(tmp_path / str(seed), plant, seed, early=True)[1].cause for seed in range(RUNS // 2)
    )
    assert sum(count for cause, count in causes.items() if cause not in (None, CAUSES[plant])) <= 1, causes


@pytest.mark.parametrize(
    ("causes", "step"), [((None, None, None), 4), ((None, "data", None), 5), (("fault", "data"), 4)]
)
def test_first_departure_is_reported_without_cause(causes, step, monkeypatch, tmp_path):
    """If no departure has a cause, the first one is explained, not the last one that was tried."""
    found = [Deviation(4 + place, "loss", "", 9.0, 1.0, 0.01, 2, []) for place in range(len(causes))]
    judged = {where.step: Explanation(where.step, cause, "", where) for where, cause in zip(found, causes, strict=True)}
    monkeypatch.setattr(explanation, "departures", lambda history, step: (found, ""))
    monkeypatch.setattr(explanation, "read_history", lambda run, hook: {})
    monkeypatch.setattr(explanation, "inspect_run", lambda folder: None)
    monkeypatch.setattr(explanation, "_judge", lambda again, stretch, where, *others: judged[where.step])
    explained = explain(lambda *arguments: tmp_path, tmp_path, 9, describe=str, left_out=(), last=None)
    assert (explained.step, explained.where.step) == (9, step)


def printed_by(*words: str) -> str:
    """Return the output of a successful command."""
    with redirect_stdout(io.StringIO()) as out:
        assert main(list(words)) == 0
    return out.getvalue()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .* spiked")
@own_process
def test_command_explains_recorded_spike(tmp_path):
    """The command rewind --spike explains the step of the alert, and a quiet step has no explanation."""
    with registered(Planted):  # fixtures stay in the process of pytest
        words = ["run", "planted", "--steps", "140", "--plant", "rate", "--plant-step", "130"]
        spikes = ["--hooks", "loss_spikes", "--loss_spikes.window", "60", "--loss_spikes.threshold", "20"]
        assert main([*words, *spikes, "--output-dir", str(tmp_path), "--no-console-output"]) == 0
        run = tmp_path / "planted/plain"
        out = printed_by("rewind", str(run), "--spike")
        assert "Step 131: The " in out
        assert "Where: step 130: the learning rate was 0.3, its earlier median 0.003" in out
        assert re.search(r"the usual learning rate +\S+ +\S+ +\S+ +\d+%", out)
        assert "Step size: the losses of the next batches rise by " in out
        assert json.loads((run / "rewinds/explained_step_131/explanation.json").read_text())["cause"] == "step size"
        quiet = printed_by("rewind", str(run), "--step", "60", "--explain")
        assert "Inconclusive: found nothing to explain." in quiet


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--spike"], "has no alerts; name the step with --step N --explain"),
        (["--step", "99", "--explain"], "--step is 99, but the last step of the run"),
        (["--step", "2", "--explain", "--hooks", "norms"], "--explain chooses its own hooks"),
        (["--explain"], "loopscope rewind needs one of --step N"),
        (["--step", "2", "--spike"], "loopscope rewind needs one of --step N"),
        (["--step", "2", "--until", "3", "--explain"], "--explain applies to one step"),
        (["--step", "2", "--explain"], "the test needs at least"),
    ],
)
def test_unexplainable_requests_are_reported(words, sentence, tmp_path, capfd):
    """Missing alerts, wrong steps and conflicting options each print a sentence."""
    run = ["run", "planted", "--steps", "4", "--output-dir", str(tmp_path), "--no-console-output"]
    assert main(run) == 0
    status = 0 if "the test needs" in sentence else 2
    assert main(["rewind", str(tmp_path / "planted/plain"), *words]) == status
    output = capfd.readouterr()
    assert sentence in " ".join((output.out + output.err).split())
