"""``loopscope resume``: resumed runs from their folder, also after it has moved."""

import json
import shutil
from pathlib import Path

import pytest
from loopscope import training_hooks  # noqa: F401 - registers the hooks
from loopscope.cli import main, training_commands
from loopscope.cli.options import parse_recorded
from loopscope.errors import UsageError

from tests.framework.runs.small_experiment import Small, contents, registered, train


@pytest.fixture(autouse=True)
def small():
    with registered(Small):
        yield


def interrupted(folder: Path, *strategies: str) -> Path:
    """Run strategies, and reset the last one to its first checkpoint."""
    words = ["run", "small", "--strategy", *strategies, "--hook-jsonl", "--hooks", "norms", "--save-checkpoints"]
    assert main([*words, "--output-dir", str(folder), "--no-console-output"]) == 0
    run = folder / "small" / strategies[-1]
    for name in ("summary.json", f"{strategies[-1]}_final.pt"):
        (run / name).unlink()
    for path in sorted((run / "checkpoints").iterdir())[1:]:
        shutil.rmtree(path)
    return run


def rows_and_weights(run: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(run).items() if name.endswith((".jsonl", "_final.pt"))}


@pytest.mark.longer
def test_moved_run_resumes_at_its_new_location(tmp_path: Path) -> None:
    """Rows and weights match those of the uninterrupted run."""
    assert main(["run", "small", "--strategy", "plain", "--hook-jsonl", "--hooks", "norms", "--output-dir",
                 str(tmp_path / "uninterrupted"), "--no-console-output"]) == 0  # fmt: skip
    interrupted(tmp_path / "before", "plain")
    (tmp_path / "before").rename(tmp_path / "after")
    assert main(["resume", str(tmp_path / "after/small/plain")]) == 0
    assert rows_and_weights(tmp_path / "after/small/plain") == rows_and_weights(tmp_path / "uninterrupted/small/plain")


@pytest.mark.longer
def test_experiment_folder_resumes_every_strategy(tmp_path: Path) -> None:
    """Strategies that have not started are trained, and finished ones stay unchanged."""
    run = interrupted(tmp_path, "plain", "other-order")
    done = contents(tmp_path / "small/plain")
    shutil.rmtree(run)
    assert main(["resume", str(tmp_path / "small")]) == 0
    assert (run / "other-order_final.pt").exists()
    assert contents(tmp_path / "small/plain") == done


@pytest.mark.longer
def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    """Neither --resume nor the resume command changes a file."""
    words = ["run", "small", "--strategy", "plain", "--output-dir", str(tmp_path), "--no-console-output"]
    assert main(words) == 0
    before = contents(tmp_path)
    assert main([*words, "--resume"]) == 0
    assert main(["resume", str(tmp_path / "small/plain")]) == 0
    assert contents(tmp_path) == before


def test_unresumable_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command exits with status 2 and one line for a bad folder, a damaged config or wrong arguments."""
    train(tmp_path)
    for folder, words in (
        (tmp_path / "small/plain", "was not started by loopscope run"),
        (tmp_path, "is not the folder"),
    ):
        with pytest.raises(UsageError, match=words):
            parse_recorded(folder)
    (tmp_path / "small/plain/experiment_config.json").write_text("{")
    for words in (["resume"], ["resume", str(tmp_path / "small/plain")], ["resume", "a", "b"]):
        assert main(words) == 2
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.longer
def test_unknown_recorded_options_are_refused(tmp_path: Path, capsys) -> None:
    """The message names an unknown key or an invalid value of the recorded options."""
    interrupted(tmp_path, "plain")
    path = tmp_path / "small/plain/experiment_config.json"
    recorded = json.loads(path.read_text())
    for name, value, sentence in (
        ("epoch", 3, "Unknown key 'epoch' in the recorded options. Did you mean 'epochs'?"),
        ("seed", "one", "--seed in the recorded options is 'one'; it must be an integer."),
    ):
        path.write_text(json.dumps({**recorded, "options": {**recorded["options"], name: value}}))
        capsys.readouterr()
        assert main(["resume", str(path.parent)]) == 2
        assert sentence in capsys.readouterr().err


DISPLAYS = ("live", "silent", "no_console_output")


@pytest.mark.parametrize("given", ["", *DISPLAYS])
@pytest.mark.parametrize("before", ["", *DISPLAYS])
def test_display_option_overrides_the_recorded_display(before, given, tmp_path, monkeypatch) -> None:
    """Without an option, the display of the original command is used."""
    started: list[dict[str, bool]] = []
    monkeypatch.setattr(training_commands, "_start", lambda experiment, options: started.append(options))
    monkeypatch.setattr(
        training_commands, "parse_recorded", lambda path: (Small, {name: name == before for name in DISPLAYS})
    )
    assert main(["resume", str(tmp_path), *([f"--{given.replace('_', '-')}"] if given else [])]) == 0
    assert [name for name in DISPLAYS if started[0][name]] == [name for name in [given or before] if name]


@pytest.mark.longer
def test_display_choice_does_not_change_resumed_run(tmp_path: Path, capsys) -> None:
    """Two display options at once are refused; with one, the final weights match the uninterrupted run."""
    run = interrupted(tmp_path, "plain")
    assert main(["resume", str(run), "--live", "--silent"]) == 2
    assert "--live and --silent exclude each other" in capsys.readouterr().err
    assert main(["resume", str(run), "--silent"]) == 0
    assert "plain: 100%" in capsys.readouterr().out
    train(tmp_path / "uninterrupted")
    weights = "small/plain/plain_final.pt"
    assert (tmp_path / weights).read_bytes() == (tmp_path / "uninterrupted" / weights).read_bytes()
