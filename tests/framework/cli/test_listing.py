"""``loopscope ls`` and ``loopscope show``: a line for every run, also with damaged files."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from loopscope import experiments, sinks, training_hooks
from loopscope.checkpoints import is_locked, run_lock
from loopscope.cli import main
from loopscope.runs import CONFIG, SUMMARY
from rich.cells import cell_len

from tests.framework.runs.small_experiment import Small, SmallSteps, read_json, registered

assert experiments.__all__
assert sinks.__all__
assert training_hooks.__all__


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """Train three runs and return their output directory."""
    folder = tmp_path_factory.mktemp("runs") / "output"
    words = ["--no-console-output", "--output-dir", str(folder), "--epochs", "2"]
    with registered(Small, SmallSteps):
        assert main(["run", "small", "--strategy", "plain", "clipped", "--hooks", "norms", *words]) == 0
        assert main(["run", "small_steps", *words]) == 0
    return folder


@pytest.fixture
def runs(finished: Path, tmp_path: Path, monkeypatch) -> Path:
    """Change to a folder with a copy of the runs in ``output``; lines have 120 columns."""
    shutil.copytree(finished, tmp_path / finished.name, symlinks=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return Path("output")


def output_lines(capsys, *words: str) -> list[str]:
    assert main(list(words)) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out.splitlines()


def row(lines: list[str], name: str) -> str:
    (matching,) = [line for line in lines if name in line.split("  ")[0]]
    return matching


def test_ls_lists_every_run(runs: Path, capsys) -> None:
    """Each line shows state, epochs or steps, treatments and final metrics; a folder argument limits the list."""
    lines = output_lines(capsys, "ls")
    assert lines[0].split() == ["run", "state", "ep/steps", "time", "began", "treatments", "final"]
    assert len(lines) == 4
    final = read_json(runs / "small/plain" / SUMMARY)["final"]
    plain = row(lines, "output/small/plain")
    assert [word in plain for word in ("completed", "2/6", f"val_acc {final['val_acc']:.4g}")] == [True] * 3
    assert "grad_clip" not in plain
    assert "grad_clip" in row(lines, "small/clipped")
    assert "/6 " in row(lines, "small_steps/plain")
    assert output_lines(capsys, "ls", "output/small_steps")[1:] == [
        row(output_lines(capsys, "ls", "output/small_steps"), "small_steps")
    ]


def test_ls_without_folder_lists_attached_runs(runs: Path, capsys) -> None:
    """Without a folder the runs in ``output`` and in ``loopscope-runs`` are listed, or a sentence names both."""
    shutil.copytree(runs / "small/plain", "loopscope-runs/run_0")
    names = [line.split()[0] for line in output_lines(capsys, "ls")[1:]]
    assert names == [*(line.split()[0] for line in output_lines(capsys, "ls", "output")[1:]), "loopscope-runs/run_0"]
    shutil.rmtree(runs)
    assert [line.split()[0] for line in output_lines(capsys, "ls")[1:]] == ["loopscope-runs/run_0"]
    shutil.rmtree("loopscope-runs")
    assert main(["ls"]) == 2
    assert "There are no runs in output and loopscope-runs" in capsys.readouterr().err


@pytest.mark.some_rows(2)
@pytest.mark.parametrize("columns", [20, 80, 120])
def test_lines_fit_and_pipe_has_full_names(runs: Path, columns: int, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    deep = runs / ("a" * 60) / ("模型" * 20) / "plain"
    deep.parent.mkdir(parents=True)
    (runs / "small/plain").rename(deep)
    for words in (["ls"], ["show", str(deep)]):
        assert [line for line in output_lines(capsys, *words) if cell_len(line) > columns] == []
    monkeypatch.delenv("COLUMNS")
    assert any(line.startswith(f"{deep}  completed  ") for line in output_lines(capsys, "ls"))


def broken_json(folder: Path) -> None:
    (folder / CONFIG).write_text("{\x1b[2J")


def no_summary(folder: Path) -> None:
    (folder / SUMMARY).unlink()


def odd_summary(folder: Path) -> None:
    (folder / SUMMARY).write_text('{"status": 3}')


def summary_is_a_folder(folder: Path) -> None:
    (folder / SUMMARY).unlink()
    (folder / SUMMARY).mkdir()


def config_is_a_pipe(folder: Path) -> None:
    (folder / CONFIG).unlink()
    os.mkfifo(folder / CONFIG)


def config_is_a_dangling_link(folder: Path) -> None:
    (folder / CONFIG).unlink()
    (folder / CONFIG).symlink_to("nowhere")


def extreme_numbers(folder: Path) -> None:
    content = read_json(folder / SUMMARY)
    content |= {"seconds": {"training": math.inf}, "final": {"loss": 10**400, "nan": math.nan, "word": "a"}}
    (folder / SUMMARY).write_text(json.dumps(content | {"status": "odd \x1b]0;title\x07"}))


def failed(folder: Path) -> None:
    content = read_json(folder / SUMMARY) | {"status": "failed", "error": "HookError: Hook 'norms' raised at \x1b[1m."}
    (folder / "files.json").unlink()
    (folder / SUMMARY).write_text(json.dumps(content))


def shortened_record(folder: Path) -> None:
    lines = (folder / "plain.jsonl").read_text("utf-8").splitlines(keepends=True)
    (folder / "plain.jsonl").write_text("".join(lines[:1]), "utf-8")


def no_record(folder: Path) -> None:
    (folder / "plain.jsonl").unlink()


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [(shortened_record, "bytes, so rows of the run are lost;"), (no_record, "is missing, so the rows of the run are")],
)
def test_lost_rows_of_finished_runs_are_reported(runs: Path, damage, sentence: str, capsys, monkeypatch) -> None:
    """A record that ends with a complete line can be read, but the summary has its size."""
    monkeypatch.setenv("COLUMNS", "300")
    reports = [("ls",), ("show", "output/small/plain"), ("doctor", "output/small/plain")]
    assert not any("lost" in line for words in reports for line in output_lines(capsys, *words))
    damage(runs / "small/plain")
    for words in reports:
        assert sentence in " ".join(" ".join(output_lines(capsys, *words)).split()), words


@pytest.mark.parametrize(
    ("damage", "state", "text"),
    [
        (broken_json, "damaged", "experiment_config.json cannot be read: it is not JSON"),
        (no_summary, "killed", ""),
        (odd_summary, "damaged", "summary.json cannot be used"),
        (summary_is_a_folder, "damaged", "summary.json cannot be read"),
        (config_is_a_pipe, "damaged", "it is not a regular file"),
        (config_is_a_dangling_link, "damaged", "it has no experiment_config.json"),
        (extreme_numbers, "odd ", "inf"),
        (failed, "failed", "val_acc"),
    ],
)
def test_damaged_record_is_reported_in_its_line(runs: Path, damage, state, text, capsys, monkeypatch) -> None:
    """ls still lists all other runs, show prints no traceback, and control characters never reach the terminal."""
    damage(runs / "small/plain")
    (runs.parent / "output/not/a/run").mkdir(parents=True)
    monkeypatch.setenv("COLUMNS", "300")
    lines = output_lines(capsys, "ls")
    assert len(lines) == 4
    assert f"  {state}" in row(lines, "small/plain")
    assert text in row(lines, "small/plain")
    assert all(line.isprintable() for line in lines)
    status = main(["show", "output/small/plain"])
    printed = capsys.readouterr()
    assert status == (2 if damage in (broken_json, config_is_a_pipe, config_is_a_dangling_link) else 0)
    assert all(line.isprintable() for line in (printed.out + printed.err).splitlines())
    assert "Traceback" not in printed.err
    assert len(output_lines(capsys, "show", "output/small")) >= 3 or damage is config_is_a_dangling_link


def test_locked_run_is_listed_as_running(runs: Path, capsys) -> None:
    """ls and show report a run with a held lock as running and ignore the stale lock file of a killed process."""
    folder = runs / "small/plain"
    assert not is_locked(folder)
    with run_lock(folder):
        assert is_locked(folder)
        assert "  running  " in row(output_lines(capsys, "ls"), "small/plain")
        shown = output_lines(capsys, "show", str(folder))
        assert shown[0] == "output/small/plain: running"
        assert "  so far       epoch 1, step 6" in shown
    (folder / "run.lock").write_text("{}")  # like after a kill
    assert not is_locked(folder)
    assert "  completed  " in row(output_lines(capsys, "ls"), "small/plain")


def test_links_are_left_out(runs: Path, tmp_path: Path, capsys) -> None:
    (runs / "latest").symlink_to("small/plain")
    (runs / "a_circle").symlink_to(".")
    (runs / "small/up").symlink_to("../..")
    (runs / "nowhere").symlink_to("nowhere")
    elsewhere = tmp_path / "elsewhere"
    (runs / "small_steps").rename(elsewhere)
    (runs / "linked").symlink_to(elsewhere)
    names = [line.split()[0] for line in output_lines(capsys, "ls")[1:]]
    assert names == ["output/small/clipped", "output/small/plain"]


@pytest.mark.process
def test_runs_are_found_at_any_depth(runs: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.delenv("COLUMNS")
    here = os.open(".", os.O_RDONLY)
    try:
        for _ in range(1200):  # deeper than Python's recursion limit
            os.mkdir("d")
            os.chdir("d")
        os.rename(tmp_path / "output/small_steps", "moved")
    finally:
        os.fchdir(here)
        os.close(here)
    try:
        assert len(output_lines(capsys, "ls", "d")) == 2
    finally:  # pytest could not remove so deep a folder
        subprocess.run(["rm", "-rf", "d"], check=True)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["ls", "empty"], "empty has no runs; loopscope ls FOLDER lists the runs in FOLDER."),
        (["ls", "nowhere"], "nowhere does not exist"),
        (["ls", "a_file"], "a_file is not a folder"),
        (["ls", "empty", "nowhere"], "loopscope ls takes one folder, but got 2: empty, nowhere."),
        (["ls", "--odd"], "Unknown option '--odd'"),
        (["show"], "loopscope show takes the folder of one run, but got 0: loopscope show FOLDER, with one"),
        (["show", "empty"], "contains none"),
        (["show", "output/small/plain", "--metrics", "norms/total_grad_nrm"], "the nearest: norms/total_grad_norm"),
        (["show", "output/small/plain", "--metrics"], "--metrics needs a value."),
        (["plot", "output/small/plain", "--metrics", "norms/total_grad_nrm"], "norms/total_grad_norm"),
    ],
)
def test_invalid_input_is_refused_in_a_sentence(runs: Path, words, sentence, capsys) -> None:
    Path("empty").mkdir()
    Path("a_file").touch()
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert sentence in printed.err
    assert printed.err.count("\n") == 1


def test_show_prints_options_and_metrics(runs: Path, capsys) -> None:
    """show prints the state, treatments, hooks, chosen options and every metric; --metrics selects by pattern."""
    with registered(Small):
        lines = output_lines(capsys, "show", "output/small/clipped")
    text = "\n".join(lines)
    assert lines[0].startswith("output/small/clipped: stopped at the limit after 2 epochs, 6 steps, ")
    assert "  treatments   grad_clip (gradients)" in lines
    assert "  hooks        training_metrics, norms, grad_clip" in lines
    (options,) = [line for line in lines if line.startswith("  options")]
    assert "hooks norms" in options
    assert "no_console_output True" in " ".join(text.split())
    assert "lr" not in options
    summary = read_json(runs / "small/clipped" / SUMMARY)
    assert f"  final        val_acc {summary['final']['val_acc']:.4g}" in text
    points = [line.split() for line in lines if line.startswith("    training_metrics/val_acc ")]
    assert points[0][1] == "2"
    assert points[0][-1] == f"{summary['final']['val_acc']:.4g}"
    grads = [line for line in lines if line.startswith("    norms/grad_norm/** ")]
    assert grads[0].split()[1:] == ["12", "in", "6", "metrics"]
    alone = output_lines(capsys, "show", "output/small/clipped", "--metrics", "norms/grad_norm/*")
    assert sum(line.startswith("    norms/grad_norm/") for line in alone) == 6
    assert not any("training_metrics/" in line for line in alone)


def test_experiment_shows_short_form_of_strategies(runs: Path, capsys) -> None:
    failed(runs / "small/plain")
    lines = output_lines(capsys, "show", "output/small")
    assert [line.split(":")[0] for line in lines if not line.startswith(" ")] == [
        "output/small/clipped",
        "output/small/plain",
    ]
    assert "  error        HookError: Hook 'norms' raised at ?[1m." in lines


def test_show_prints_options_of_unregistered_experiment(runs: Path, capsys) -> None:
    """The class of the experiment, with the default options, is not registered."""
    assert "  options      " in "\n".join(output_lines(capsys, "show", "output/small_steps/plain"))


def test_show_reports_missing_metrics(runs: Path, capsys) -> None:
    """After the JSONL file is deleted, show exits with status 0 and its last line reports the missing record."""
    (runs / "small/plain/plain.jsonl").unlink()
    assert output_lines(capsys, "show", "output/small/plain")[-1].startswith(
        "  metrics      output/small/plain has neither"
    )


@pytest.mark.slow
@pytest.mark.process
def test_broken_pipe_is_not_an_error(runs: Path) -> None:
    """ls and show exit with status 0 and write nothing to stderr when head closes the pipe after one line."""
    for command in ("ls", "show output/small/plain"):
        line = f"{sys.executable} -m loopscope {command} | head -1"
        done = subprocess.run(["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True)
        assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)


def test_folder_above_several_experiments_is_named(runs: Path, capsys) -> None:
    """OUTPUT_DIR has no runs itself, but its subfolders have."""
    assert main(["show", str(runs)]) == 2
    assert "has runs in deeper folders, such as " in capsys.readouterr().err.replace("\n", " ")
