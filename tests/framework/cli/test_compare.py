"""``loopscope compare``: results, and comparison of the readable parts of unusual runs."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from loopscope import experiments, sinks, training_hooks
from loopscope.checkpoints import run_lock
from loopscope.cli import main
from loopscope.durable_files import write_json
from loopscope.runs import CONFIG, SUMMARY
from rich.cells import cell_len
from scipy import stats

from tests.docs.markdown import ROOT, code, table_with
from tests.framework.runs.small_experiment import Small, read_json, registered

assert experiments.__all__
assert sinks.__all__
assert training_hooks.__all__

PAGE = ROOT / "docs/comparing.md"
LOSS, ACC = "training_metrics/evaluation/val_loss", "training_metrics/val_acc"
Emits = list[tuple[int, str, dict[str, Any]]]


def series(name: str, values: list[float], first: int = 1) -> dict[str, Any]:
    return {name: {"steps": list(range(first, first + len(values))), "values": values}}


def run(name: str, losses: list[float], seed: int = 0, *, emits: Emits = (), **fields: Any) -> Path:
    """Write a run with a loss at the end of each epoch of ten steps, and return its folder."""
    folder, strategy = Path("runs", name), fields.pop("strategy", "a")
    experiment, final = fields.pop("experiment", "exp"), {"val_loss": losses[-1] if losses else 0.0}
    config = {"experiment": experiment, "strategy": strategy, "config": {"seed": seed, **fields.pop("config", {})}}
    write_json(folder / CONFIG, {**config, **fields})
    state = {"strategy": strategy, "status": "completed", "error": None, "epochs": len(losses), "output_dir": ""}
    results = {"steps": 10 * len(losses), "training_loss": None, "initial": {}, "final": final, "metrics": {}}
    empty = {"target_reached": None, "treatments": {}, "hook_errors": [], "seconds": {"training": 1.0}}
    write_json(folder / SUMMARY, {**state, **results, **empty})
    rows = [(10 * epoch, "POST_EPOCH", {LOSS: loss}) for epoch, loss in enumerate(losses, 1)]
    lines = [
        json.dumps({"epoch": step // 10, "step": step, "hook_point": point, **metrics})
        for step, point, metrics in emits or rows
    ]
    (folder / f"{strategy}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")


def comparison(capsys, *words: str | Path) -> dict[str, Any]:
    text = output(capsys, *words, "--json", "--all")
    assert text.isascii()
    return json.loads(text)


def output(capsys, *words: str | Path) -> str:
    assert main(["compare", *map(str, words)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def first_difference(capsys, *words: str | Path) -> tuple[Any, ...]:
    (entry,) = comparison(capsys, *(words or ["runs"]))["first_differences"]
    return entry["step"], entry["metrics"], entry["points"], entry["problem"]


@pytest.mark.longer
def test_real_multi_seed_runs_are_compared(capsys, tmp_path) -> None:
    """Final and best values, spreads, tests, differences and divergence match the summaries of the runs."""
    words = ["run", "small", "--strategy", "plain", "clipped", "--no-console-output", "--max-epochs", "2"]
    with registered(Small):
        for seed in "012":
            assert main([*words, "--seed", seed, "--output-dir", f"out/seed-{seed}"]) == 0
    compared = comparison(capsys, "out")
    finals = {(row["strategy"], row["seed"]): row["final"]["val_acc"] for row in compared["runs"]}
    for row in compared["runs"]:
        assert row["final"] == read_json(Path(row["path"]) / SUMMARY)["final"]
        assert row["metrics"][ACC]["best"] >= row["final"]["val_acc"] == row["metrics"][ACC]["last"]
    plain, clipped = ([finals[strategy, seed] for seed in range(3)] for strategy in ("plain", "clipped"))
    (spread,) = [row for row in compared["spreads"] if (row["number"], row["group"][:5]) == ("final val_acc", "plain")]
    assert spread["mean"] == pytest.approx(sum(plain) / 3)
    (test,) = [row for row in compared["tests"] if row["number"] == "final val_acc"]
    sign = 1 if test["a"].startswith("plain") else -1
    assert test["difference"] == pytest.approx(sign * (sum(plain) - sum(clipped)) / 3)
    assert {row["name"] for row in compared["differences"]} >= {"seed", "grad_clip"}
    (pair,) = comparison(capsys, "out/seed-0")["first_differences"]
    assert 1 <= pair["step"] <= 6


def test_row_shows_length_target_and_values(capsys) -> None:
    """A row has epochs, steps, target epoch, treatments, and the last, best and final values of metrics."""
    run("low", [3.0, 1.0, 2.0], treatments={"grad_clip": ["gradients"]})
    accuracies = [(10, "POST_EPOCH", {ACC: 0.5}), (20, "POST_EPOCH", {ACC: 0.75}), (30, "POST_EPOCH", {ACC: 0.75})]
    run("high", [4.0], emits=accuracies, config={"lr": 0.1})
    summary = read_json(Path("runs/high", SUMMARY)) | {"target_reached": {"epoch": 2}}
    write_json(Path("runs/high", SUMMARY), summary)
    high, low = comparison(capsys, "runs")["runs"]
    best = {"best_is": "lowest", "points": 3, "not_finite": 0, "last": 2.0, "best": 1.0, "best_step": 20}
    assert (low["metrics"], low["treatments"], low["epochs"], low["steps"]) == ({LOSS: best}, ["grad_clip"], 3, 30)
    assert (high["metrics"][ACC]["best"], high["metrics"][ACC]["best_step"]) == (0.75, 20)
    assert (high["target_epoch"], high["final"]) == (2, {"val_loss": 4.0})
    text = output(capsys, "runs")
    assert "Best is the lowest: training_metrics/evaluation/val_loss." in text
    assert f"low: has no {ACC}" in text
    assert re.search(r"config lr +0.1 \(high\); none \(low\)", text)


def test_seeds_are_paired_and_all_tests_are_corrected(capsys) -> None:
    values = {"a": [1.0, 2.0, 3.5], "b": [1.5, 2.25, 4.5], "c": [0.5, 1.75, 1.0]}
    for strategy, losses in values.items():
        for seed, loss in enumerate(losses):
            run(f"{strategy}/seed-{seed}", [9.0, loss], seed, strategy=strategy)
    compared = comparison(capsys, "runs")
    assert [(row["a"], row["b"]) for row in compared["tests"][:3]] == [("a", "b"), ("a", "c"), ("b", "c")]
    for test in compared["tests"]:
        assert test["p"] == pytest.approx(stats.ttest_rel(values[test["a"]], values[test["b"]]).pvalue)
    smallest = min(compared["tests"], key=lambda test: test["p"])
    assert smallest["holm"] == pytest.approx(6 * smallest["p"])
    assert [row["number"] for row in comparison(capsys, "runs", "--metrics", LOSS)["tests"][::3]] == [
        f"last {LOSS}",
        f"best {LOSS}",
    ]
    assert "Do groups differ? 6 tests" in output(capsys, "runs")


def test_best_of_unequal_evaluations_is_not_tested(capsys) -> None:
    """The best of more evaluations is better by chance; final and last values are still tested."""
    for seed in range(3):
        run(f"few/seed-{seed}", [2.0, 1.0 + seed], seed, strategy="few")
        run(f"many/seed-{seed}", [2.0, 3.0, 0.5 + seed**2], seed, strategy="many")
    compared = comparison(capsys, "runs")
    tests = {test["number"]: test for test in compared["tests"]}
    assert tests.pop(f"best {LOSS}")["remark"] == "unequal numbers of evaluations"
    assert len(tests) == 1
    assert all(test["p"] is not None for test in tests.values())
    sentence = f"Runs with more evaluations find better values by chance, so not tested: best {LOSS}."
    assert sentence in compared["sentences"]


def test_docs_list_every_key(capsys) -> None:
    for seed in range(2):
        run(f"a{seed}", [1.0 + seed], seed)
        run(f"b{seed}", [2.0 - seed], seed, strategy="b")
    compared = comparison(capsys, "runs")
    rows = {row["list"].strip("`"): set(code(row["keys of its entries"])) for row in table_with(PAGE, "list")}
    assert rows.pop("sentences") == set()
    assert rows == {name: set(entries[0]) for name, entries in compared.items() if name not in ("schema", "sentences")}
    assert all(f"`{key}`" in PAGE.read_text() for key in compared["runs"][0]["metrics"][LOSS])


def test_single_seeds_give_no_statistics(capsys) -> None:
    """Spreads and tests are empty, and a sentence explains why."""
    run("a", [1.0])
    run("b", [2.0], strategy="b")
    compared = comparison(capsys, "runs")
    assert (compared["spreads"], compared["tests"]) == ([], [])
    assert "One seed is not enough for a significance test: a, b." in compared["sentences"]


def test_excluded_runs_are_reported_with_the_reason(capsys) -> None:
    """Runs without a seed, unfinished runs and duplicates do not count in the statistics."""
    for seed in range(3):
        run(f"seed-{seed}", [1.0 + seed], seed)
    run("again", [5.0], 1)
    run("none", [5.0], None)
    Path("runs/seed-2", SUMMARY).unlink()
    compared = comparison(capsys, "runs")
    assert compared["spreads"][0] | {"count": 2, "remark": "1 missing"} == compared["spreads"][0]
    text = " ".join(compared["sentences"])
    assert "seed-1: has the settings of again, and is not counted again" in text
    assert "none: has no seed, so it is in no group" in text
    assert "seed-2: killed, so only its recorded part is compared, and it is excluded from groups" in text


def test_divergence_is_at_first_differing_step(capsys) -> None:
    """Every metric that both records share is compared, and records without a common value are reported."""
    tail = [(10, "POST_EPOCH", {LOSS: 1.0})]
    run("a", [], emits=[(10, "POST_STEP", series("h/x", [1.0, 2.0, 3.0]) | series("h/own", [1.0])), *tail])
    run("b", [], emits=[(10, "POST_STEP", series("h/x", [1.0, 2.5, 4.0])), (10, "POST_EPOCH", {LOSS: 2.0})])
    assert first_difference(capsys) == (2, ["h/x"], 4, "")
    run("b", [], emits=[(10, "POST_STEP", series("h/x", [1.0, 2.0, 3.0])), *tail])
    assert first_difference(capsys) == (None, [], 4, "")
    assert "nowhere: 4 values of 2 metrics are equal" in output(capsys, "runs")
    run("b", [], emits=[(10, "POST_STEP", {"h/other": 1.0})])
    assert "no metric has a value at the same step in both" in output(capsys, "runs")


@pytest.mark.parametrize(("a", "b"), [(1, 1.0), (True, 1), (0.0, -0.0), ([1, [2]], [1, [3]]), ("x", "y"), (None, 0)])
def test_values_are_compared_bitwise(a, b, capsys) -> None:
    run("a", [], emits=[(1, "POST_EPOCH", {"h/nan": math.nan, "h/x": a})])
    run("b", [], emits=[(1, "POST_EPOCH", {"h/nan": math.nan, "h/x": b})])
    assert first_difference(capsys) == (1, ["h/x"], 2, "")


def test_divergence_ignores_how_values_were_written(capsys) -> None:
    """Series in other pieces are equal, and sparse values are compared at their steps."""
    values = [1 / step for step in range(1, 41)]
    halves = [(20, "POST_STEP", series("h/x", values[:20])), (40, "POST_STEP", series("h/x", values[20:]))]
    pieces = [(10 * n, "POST_STEP", series("h/x", values[10 * n - 10 : 10 * n], 10 * n - 9)) for n in (1, 2, 3, 4)]
    halves[1][2]["h/x"]["steps"] = list(range(21, 41))
    run("a", [], emits=halves)
    run("b", [], emits=pieces)
    assert first_difference(capsys) == (None, [], 40, "")
    sparse = [(step, "POST_EPOCH", {"h/x": values[step - 1] + (step == 30)}) for step in (10, 20, 30)]
    run("b", [], emits=sparse)
    assert first_difference(capsys) == (30, ["h/x"], 3, "")


def test_nonfinite_values_are_counted_and_never_best(capsys) -> None:
    run("a", [math.nan, 2.0, math.inf, -math.inf])
    run("b", [10**400, math.nan])
    a, b = comparison(capsys, "runs")["runs"]
    assert (a["metrics"][LOSS]["best"], a["metrics"][LOSS]["not_finite"]) == (2.0, 3)
    assert b["metrics"][LOSS]["best"] == 10**400
    assert f"a: not finite: 3 of {LOSS}" in output(capsys, "runs")
    assert "inf at 10" in output(capsys, "runs", "--markdown")


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        (SUMMARY, "{", "b: runs/b/summary.json cannot be read"),
        (CONFIG, "[]", "b: runs/b/experiment_config.json cannot be read: it is JSON, but not an object."),
        ("a.jsonl", "{}\n", "b: runs/b/a.jsonl cannot be read after 2 emits"),
        ("a.jsonl", None, "b: runs/b has neither a.jsonl"),
    ],
)
def test_readable_parts_of_damaged_runs_are_compared(file: str, content: str | None, sentence: str, capsys) -> None:
    """The damaged file is named, and the other runs are compared completely."""
    for name in "abc":
        run(name, [2.0, 1.0 + (name == "b")])
    path = Path("runs/b", file)
    prefix = path.read_text() if path.suffix == ".jsonl" else ""
    path.unlink() if content is None else path.write_text(prefix + content)
    compared = comparison(capsys, "runs")
    assert [row["run"] for row in compared["runs"]] == ["a", "b", "c"]
    assert any(text.startswith(sentence) for text in compared["sentences"])
    expected = {"c": None} if content in ("[]", None) else {"b": 20, "c": None}
    assert {entry["run"]: entry["step"] for entry in compared["first_differences"]} == expected


def test_unfinished_and_unrelated_runs_are_compared(capsys) -> None:
    """The state of each run is shown, and runs of different experiments are not tested."""
    for seed in range(2):
        run(f"a{seed}", [1.0 + seed], seed)
        run(f"b{seed}", [3.0 + seed], seed, experiment="other")
    Path("runs/a1", SUMMARY).unlink()
    with run_lock(Path("runs/a1")):
        compared = comparison(capsys, "runs")
    assert [row["state"] for row in compared["runs"]] == ["completed", "running", "completed", "completed"]
    assert (compared["runs"][1]["epochs"], compared["runs"][1]["steps"]) == (1, 10)
    assert compared["tests"] == []
    assert "Runs of different experiments are not tested against each other: exp, other." in compared["sentences"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["runs", "--metrics", "val_los"], "No metric matches 'val_los'; the nearest is " + LOSS),
        (["runs", "--metrics", "h/text"], "lists or texts"),
        (["runs/a"], "takes two or more runs, but could read 1."),
        (["runs/a", "runs/../runs/a"], "takes two or more runs, but could read 1."),
        (["runs", "empty"], "empty has no runs"),
        (["nowhere"], "nowhere does not exist"),
        ([], "loopscope compare needs RUN"),
        (["runs", "--json", "--markdown"], "--json and --markdown exclude each other."),
        (["runs", "--metric", "x"], "Did you mean '--metrics'?"),
    ],
)
def test_invalid_input_is_refused_in_a_sentence(words, sentence: str, capsys) -> None:
    run("a", [1.0], emits=[(10, "POST_EPOCH", {LOSS: 1.0, "h/text": "x"})])
    run("b", [2.0])
    Path("empty").mkdir()
    assert main(["compare", *words]) == 2
    printed = capsys.readouterr()
    assert (bool(printed.out), printed.err.count("\n")) == ("--json" in words, 1)
    assert sentence in printed.err


def test_oversized_summary_is_reported_as_damaged(capsys) -> None:
    """A summary of more than 64 MiB is not read."""
    for name in "abc":
        run(name, [1.0])
    with Path("runs/b", SUMMARY).open("ab") as file:
        file.truncate(2**26 + 1)
    assert "has more than 67,108,864 bytes" in comparison(capsys, "runs")["runs"][1]["problem"]


MARKUP = "<script>alert(1)</script>|`![x](http://y)\x1b[2J"


@pytest.mark.parametrize("form", [[], ["--markdown"]])
def test_special_characters_are_escaped(form: list[str], capsys) -> None:
    metrics = {f"h/{MARKUP}": 1.0, f"h/x/{MARKUP}": 2.0}
    run("a", [], emits=[(10, "POST_EPOCH", metrics)], strategy="a<b>|", config={MARKUP: MARKUP})
    run("b", [], emits=[(10, "POST_EPOCH", metrics)], environment={MARKUP: [MARKUP]})
    text = output(capsys, "runs", "--metrics", "**", *form)
    assert all(line.isprintable() for line in text.splitlines())
    if form:
        assert not re.search(r"(?<!\\)[<>`\[]", text)
        rows = [line for line in text.splitlines() if line.startswith("|")]
        assert all(re.match(r"\|.*(?<!\\)\|$", row) for row in rows)


@pytest.mark.parametrize("columns", [80, 120])
def test_lines_fit_and_pipe_has_complete_rows(columns: int, capsys, monkeypatch) -> None:
    metrics = {f"h/a_long_name_of_a_metric/{number}_loss": number / 3 for number in range(30)}
    for seed in range(2):
        for name in ("模型" * 8, "b" * 30):
            run(f"{name}/seed-{seed}", [1.0], seed, emits=[(10, "POST_EPOCH", metrics)], config={"text": name})
    monkeypatch.setenv("COLUMNS", str(columns))
    text = output(capsys, "runs", "--metrics", "h/**", "--all")
    assert [line for line in text.splitlines() if cell_len(line) > columns] == []
    assert "18 more metrics with --json --all" in text
    monkeypatch.delenv("COLUMNS")
    assert len([line for line in output(capsys, "runs").splitlines() if line.startswith("b" * 30 + "/seed-0")]) >= 1
