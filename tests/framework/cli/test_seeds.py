"""``--seed 0 1 2``: runs of every strategy and seed, each equal to a single run, and commands over all of them."""

import io
import shutil
from pathlib import Path

import pytest
from loopscope import sinks, training_hooks
from loopscope.cli import main
from loopscope.cli.options import parse_run, run_options
from loopscope.console import RunsLine
from loopscope.console.tables import comparison_rows
from loopscope.errors import UsageError
from loopscope.runs import run_folders
from rich.console import Console

from tests.framework.runs.small_experiment import Small, contents, read_json, registered, session

assert sinks.__all__
assert training_hooks.__all__
QUIET = "--no-console-output"


@pytest.fixture(autouse=True)
def small():
    with registered(Small):
        yield


def run(folder: Path, *words: str) -> Path:
    """Run the experiment ``small``, and return the folder of its runs."""
    assert main(["run", "small", "--hooks", "norms", *words, "--output-dir", str(folder)]) == 0
    return folder / "small"


def rows_and_weights(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(folder).items() if name.endswith((".jsonl", "_final.pt"))}


@pytest.mark.longer
def test_multi_seed_runs_match_single_seed_runs(tmp_path: Path) -> None:
    """Rows and weights of every strategy and seed are those of the run with that seed alone."""
    several = run(tmp_path / "several", "--strategy", "plain", "clipped", "--seed", "3", "1", QUIET)
    for seed in ("1",):  # the second, which must not depend on the first
        alone = run(tmp_path / seed, "--strategy", "plain", "clipped", "--seed", seed, QUIET)
        for strategy in ("plain", "clipped"):
            content = rows_and_weights(several / strategy / f"seed-{seed}")
            assert content.keys() >= {f"{strategy}.jsonl", f"{strategy}_final.pt"}
            assert content == rows_and_weights(alone / strategy)


@pytest.mark.longer
def test_python_run_options_accept_seeds(tmp_path: Path) -> None:
    """Each seed has its own folder and recorded configuration, and validation covers all of them."""
    summaries = session(tmp_path, strategies=["plain", "clipped"], seeds=[2, 0]).run()
    assert [(summary["strategy"], summary["seed"]) for summary in summaries] == [
        *[("plain", 2), ("clipped", 2), ("plain", 0), ("clipped", 0)]
    ]
    assert read_json(tmp_path / "small/plain/seed-2/experiment_config.json")["config"]["seed"] == 2
    validated = session(tmp_path / "checked", strategies=["plain"], seeds=[0, 1], save_checkpoints=1)
    validated.run()
    assert validated.validate() == {"plain seed-0": [3, 6], "plain seed-1": [3, 6]}


@pytest.mark.longer
def test_summary_compares_strategies_across_seeds(tmp_path: Path, capsys) -> None:
    """The final table shows mean and standard deviation; the result folders and the next command follow."""
    run(tmp_path, "--strategy", "plain", "clipped", "--seed", "0", "1", "2")
    output = capsys.readouterr().out
    assert "plain seed-1: stopped at the limit after 2 epochs" in output
    table = output[output.index("seeds") :]
    assert table.count(" ± ") >= 4
    assert f"Results: {tmp_path}/small/ with plain seed-0, clipped seed-0, plain seed-1, " in table
    assert f"Next: loopscope show {tmp_path}/small/plain/seed-0" in table


def summary(strategy: str, seed: int, loss: float, folder: str = "output/e") -> dict:
    return {
        **{"strategy": strategy, "output_dir": f"{folder}/{strategy}/seed-{seed}", "final": {"val_loss": loss}},
        **{
            "status": "completed",
            "training_loss": None,
            "metrics": {},
            "epochs": 5,
            "target_reached": None,
            "treatments": {},
        },
        **{"seconds": {"training": 2.0}, "hook_errors": []},
    }


def test_distances_pair_runs_of_equal_seeds() -> None:
    runs = [("fp32", 0, 1.0), ("fp4", 0, 1.5), ("fp32", 1, 3.0), ("fp4", 1, 3.5)]
    rows = comparison_rows([summary(*run) for run in runs], {"val_loss": "fp32"})
    assert [row["val_loss"] for row in rows] == ["2 ± 1.414", "2.5 ± 1.414"]
    assert (rows[1]["val_loss − fp32"], rows[1]["seeds"], rows[1]["epochs"]) == ("0.5 ± 0", "2", "5 ± 0")


@pytest.mark.slow
def test_seed_runs_resume_individually_and_together(tmp_path: Path) -> None:
    """Resuming a seed, a strategy or the experiment gives the same files, rows and weights."""
    words = ("--strategy", "plain", "clipped", "--seed", "0", "10", "--save-checkpoints", QUIET)
    run(tmp_path / "before", *words)
    (tmp_path / "before").rename(tmp_path / "after")
    runs, finished = tmp_path / "after/small", contents(tmp_path / "after")
    trained = rows_and_weights(runs)
    for folder in (runs / "plain/seed-10", runs / "plain", runs):
        for path in run_folders(folder, "resume"):
            shutil.rmtree(path / "checkpoints/step_000000006")
            (path / "summary.json").unlink()
        assert main(["resume", str(folder)]) == 0
        assert contents(tmp_path / "after").keys() == finished.keys()
        assert rows_and_weights(runs) == trained


@pytest.mark.longer
def test_seed_runs_are_listed_in_order(tmp_path, monkeypatch, capsys) -> None:
    """The commands show, ls and diff find the runs of an experiment, with seeds in numeric order."""
    monkeypatch.setenv("COLUMNS", "400")
    runs = run(tmp_path, "--strategy", "plain", "--seed", "10", "9", "--epochs", "1", QUIET)
    shutil.copytree(runs / "plain/seed-9", runs / "alone")
    names = ["alone", "plain/seed-9", "plain/seed-10"]
    assert [str(path.relative_to(runs)) for path in run_folders(runs, "show")] == names
    assert run_folders(runs / "plain", "show") == [runs / "plain/seed-9", runs / "plain/seed-10"]
    assert main(["show", str(runs)]) == 0
    assert main(["diff", str(runs / "alone"), str(runs / "plain/seed-9")]) == 0
    capsys.readouterr()
    assert main(["show", str(runs / "plain/seed-9")]) == 0
    assert "seed 9, " in capsys.readouterr().out
    assert main(["ls", str(tmp_path)]) == 0
    output = capsys.readouterr().out.replace("\n", "")
    assert all(f"{runs / name}" in output for name in names)


REFUSALS = {
    "--seed 1 two": "--seed is 'two'; it must be an integer",
    "--seed 1 -1": "seed is -1; it must be in 0",
    "--seed 0 1 --jobs 0": "--jobs is 0; it must be at least 1",
    "--seed 0 1 --jobs 2 --hooks norm": "Did you mean 'norms'",
    "--seed 0 1 --jobs 2 --strategy plane": "Did you mean 'plain'",
    "--seed 0 7 --jobs 2": "seed-7 already holds",
    "--seed 0 7": "seed-7 already holds",
    "--seed": "--seed needs a value",
}


@pytest.mark.parametrize("words", REFUSALS)
def test_invalid_seed_options_are_refused_once(words: str, tmp_path: Path, capsys) -> None:
    """The command prints one line of error and changes no file."""
    (tmp_path / "small/plain/seed-7").mkdir(parents=True)
    (tmp_path / "small/plain/seed-7/summary.json").write_text("{}")
    before = contents(tmp_path)
    assert main(["run", "small", *words.split(), "--output-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert REFUSALS[words] in error
    assert error.count("\n") == 1
    assert contents(tmp_path) == before


def test_seed_option_accepts_number_or_list(tmp_path: Path) -> None:
    """One seed is recorded as a number and several as a list, while a list in a file keeps its seed folders."""
    (tmp_path / "one.yaml").write_text("seed: [4]")
    for words, seeds, recorded in (
        (["--seed", "4"], [], 4),
        (["--seed", "4", "4"], [], 4),
        (["--seed", "4", "5"], [4, 5], [4, 5]),
        (["--config", str(tmp_path / "one.yaml")], [4], [4]),
    ):
        options = run_options(parse_run(Small, words))
        assert (options.seeds, options.recorded["seed"], "jobs" in options.recorded) == (seeds, recorded, False)
    (tmp_path / "one.yaml").write_text("seed: []")
    with pytest.raises(UsageError, match="is an empty list"):
        parse_run(Small, ["--config", str(tmp_path / "one.yaml")])


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_line_covers_all_runs(terminal: bool) -> None:
    """A terminal updates one line every second, and a file receives a line every 30 seconds."""
    file, now = io.StringIO(), [0.0]
    console = Console(file=file, width=80, force_terminal=terminal, force_interactive=terminal)
    line = RunsLine(console, 3, clock=lambda: now[0])
    for second in range(100):
        now[0], line.running["a seed-1"] = float(second), f"epoch {second}/150"
        line.show()
    line.close()
    lines = [f"0 of 3 runs done, 1 running: a seed-1 epoch {second}/150" for second in range(100)]
    if terminal:
        assert all(text in file.getvalue() for text in lines)
    else:
        assert file.getvalue().splitlines() == lines[30:91:30]
