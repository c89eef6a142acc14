"""``loopscope replay`` sends what the sink would have written, and refuses an impossible replay before it sends."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from loopscope import experiments, sinks, training_hooks
from loopscope.cli import main
from loopscope.errors import UsageError
from loopscope.runs import RunRecord, read_status
from loopscope.sinks import JSONLSink, TensorBoardSink
from loopscope.sinks.jsonl import recorded_run

from tests.framework.runs.small_experiment import contents, session
from tests.sinks.event_files import accumulated, scalars
from tests.sinks.trackio_files import rows_of
from tests.sinks.wandb_files import config_of, history, log_of, only

assert experiments.__all__
assert sinks.__all__
assert training_hooks.__all__


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two strategies with the record and TensorBoard, and return the folder of the experiment."""
    folder = tmp_path_factory.mktemp("finished")
    run = session(folder, strategies=["plain", "clipped"], hooks=["norms"])
    run.make_sinks = lambda: [JSONLSink(), TensorBoardSink()]
    run.run()
    return folder / "small"


@pytest.fixture
def recorded(finished: Path, tmp_path: Path) -> Path:
    """Return the same runs without their TensorBoard files."""
    folder = tmp_path / "small"
    shutil.copytree(finished, folder, ignore=shutil.ignore_patterns("tensorboard"))
    return folder


def refused(capfd: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """Run the command, require its refusal, and return the error line."""
    assert main(["replay", *map(str, words)]) == 2
    output, errors = capfd.readouterr()
    assert (output, errors.count("\n")) == ("", 1)
    return errors


def test_tensorboard_replay_matches_live_sink(finished, recorded, capfd):
    """The replayed scalars, tags and run text are those that the live sink wrote."""
    assert main(["replay", str(recorded / "plain"), "--to", "tensorboard"]) == 0
    assert f"to view it: tensorboard --logdir {recorded / 'plain'}" in capfd.readouterr().out
    found, live = recorded / "plain/tensorboard", finished / "plain/tensorboard"
    assert scalars(found) == scalars(live)
    assert accumulated(found).Tags() == accumulated(live).Tags()
    assert accumulated(found).Tensors("run")[0].tensor_proto == accumulated(live).Tensors("run")[0].tensor_proto


def test_experiment_folder_replays_all_strategies(finished, recorded):
    assert main(["replay", "--to=tensorboard", str(recorded)]) == 0
    for strategy in ("plain", "clipped"):
        assert scalars(recorded / strategy / "tensorboard") == scalars(finished / strategy / "tensorboard")


@pytest.mark.slow
@pytest.mark.process
def test_wandb_replay_contains_rows_and_config(recorded, monkeypatch, capfd):
    """The W&B run has all rows, the configuration, the treatments as tags and the exit code."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert main(["replay", str(recorded / "clipped"), "--to", "wandb", "--project", "again"]) == 0
    log = log_of(recorded / "clipped")
    assert f"wandb sync {log.parent}" in capfd.readouterr().out
    lines = [json.loads(line) for line in (recorded / "clipped/clipped.jsonl").read_text().splitlines()]
    norm = {line["step"]: line["norms/total_grad_norm"] for line in lines if "norms/total_grad_norm" in line}
    rows = history(log)
    assert {row["step"]: row["norms/total_grad_norm"] for row in rows if "norms/total_grad_norm" in row} == norm
    assert (only(log, "run").project, list(only(log, "run").tags)) == ("again", ["treatment:grad_clip"])
    assert (config_of(log)["treatments"], only(log, "exit").exit_code) == ({"grad_clip": ["gradients"]}, 0)


@pytest.mark.process
def test_trackio_replay_contains_every_row(recorded, monkeypatch, tmp_path, capfd):
    """The rows are those of the record, in the named project."""
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["replay", str(recorded / "clipped"), "--to", "trackio", "--project", "again"]) == 0
    assert "trackio show --project again" in capfd.readouterr().out
    lines = [json.loads(line) for line in (recorded / "clipped/clipped.jsonl").read_text().splitlines()]
    norm = {line["step"]: line["norms/total_grad_norm"] for line in lines if "norms/total_grad_norm" in line}
    rows = rows_of(tmp_path / "store", "again")
    found = {step: row["norms/total_grad_norm"] for _, step, row in rows if "norms/total_grad_norm" in row}
    assert found == pytest.approx(norm)


def test_truncated_last_line_is_not_replayed(finished, recorded):
    """All complete lines before it are sent."""
    record = recorded / "plain/plain.jsonl"
    *whole, last = record.read_text().splitlines(keepends=True)
    record.write_text("".join(whole) + last[: len(last) // 2])
    (recorded / "plain/summary.json").unlink()
    assert main(["replay", str(recorded / "plain"), "--to", "tensorboard"]) == 0
    live, end = scalars(finished / "plain/tensorboard"), json.loads(last)["step"]
    expected = {tag: [point for point in points if point[0] < end] for tag, points in live.items()}
    assert scalars(recorded / "plain/tensorboard") == expected != live


def test_existing_replay_is_left_unchanged(finished, capfd):
    """The command is refused if the target exists and changes no file."""
    before = contents(finished)
    assert "tensorboard already exists" in refused(capfd, finished, "--to", "tensorboard")
    assert contents(finished) == before


def test_replay_is_all_or_nothing(recorded, capfd):
    """If one strategy has no record, the command sends no run and changes no file."""
    (recorded / "plain/plain.jsonl").unlink()
    before = contents(recorded)
    assert "has no plain.jsonl" in refused(capfd, recorded, "--to", "tensorboard")
    assert contents(recorded) == before


def test_a_replay_that_fails_leaves_no_half_folder(recorded):
    (recorded / "plain/plain.jsonl").write_text(
        '{"epoch": 0, "step": 1, "hook_point": "POST_EPOCH", "a": 1}\nno json\n'
    )
    with pytest.raises(UsageError, match=r"plain\.jsonl cannot be read after 1 emits"):
        TensorBoardSink.replay(recorded / "plain")()
    assert not (recorded / "plain/tensorboard").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "takes one folder, RUN, but got none"),
        (["a", "b"], "but got 2: a, b"),
        (["a"], "needs --to SINK; choose one of mlflow, tensorboard, trackio, wandb"),
        (["a", "--to"], "--to needs a value"),
        (["a", "--to", "tensorbord"], "Did you mean 'tensorboard'?"),
        (["a", "--to", "csv"], "Known: mlflow, tensorboard, trackio, wandb"),
        (["a", "--too", "wandb"], "Unknown option '--too'. Did you mean '--to'?"),
        (["a", "--to", "tensorboard", "--project", "p"], "--project does not apply to --to tensorboard"),
        (["a", "--to", "mlflow", "--project", "p"], "--project does not apply to --to mlflow"),
        (["a", "--to", "trackio", "--experiment", "e"], "--experiment does not apply to --to trackio"),
        (["nowhere", "--to", "tensorboard"], "nowhere does not exist"),
        (["a-file", "--to", "wandb"], "a-file is not a folder"),
        (["empty", "--to", "wandb"], "empty is not the folder of a run"),
        (["broken", "--to", "wandb"], "it is JSON, but not an object"),
        (["bare", "--to", "wandb"], "has no s.jsonl"),
        (["bare", "--to", "wandb", "--project", "a/b"], "is not a valid W&B project"),
        (["bare", "--to", "mlflow", "--experiment", " "], "is not a valid MLflow experiment"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(words, sentence, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("a-file").touch()
    for folder, config in {"empty": None, "broken": "[]", "bare": '{"experiment": "e", "strategy": "s"}'}.items():
        Path(folder).mkdir()
        if config is not None:
            (Path(folder) / "experiment_config.json").write_text(
                config.replace("}", ', "config": {}, "treatments": {}}')
            )
    assert sentence in refused(capfd, *words)


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_missing_package_error_shows_install_command(package, recorded, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, package, None)
    assert f"pip install '{package}>=" in refused(capfd, recorded, "--to", package)


def test_a_disabled_client_is_no_destination(recorded, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert "WANDB_MODE is disabled" in refused(capfd, recorded, "--to", "wandb")


def test_help_names_targets_and_options(capfd):
    assert main(["replay", "--help"]) == 0
    text = capfd.readouterr().out
    assert all(word in text for word in ("RUN", "--to", "--to SINK", "--project NAME", "project of trackio or wandb"))


def test_run_record_matches_configuration(finished):
    """The record has the experiment, strategy, configuration and treatments of the run."""
    found = RunRecord.read(finished / "clipped")
    assert (found.experiment, found.strategy, found.config["epochs"]) == ("small", "clipped", 2)
    assert found.treatments == {"grad_clip": ["gradients"]}
    assert found.treatments_text == "grad_clip (gradients)"


def test_a_run_without_a_summary_counts_as_failed(finished, tmp_path):
    assert read_status(finished / "plain") == "completed"
    shutil.copytree(finished / "plain", tmp_path / "plain")
    (tmp_path / "plain/summary.json").unlink()
    assert read_status(tmp_path / "plain") is None
    assert recorded_run(tmp_path / "plain")[2] == "failed"
