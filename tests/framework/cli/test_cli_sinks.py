"""Sinks selected by a command: with a value, included in another sink, or missing."""

import json
import sys
from pathlib import Path

import pytest
from loopscope import experiments, sinks, training_hooks
from loopscope.cli import main
from loopscope.cli.options import parse_run, wanted_sinks
from loopscope.errors import UsageError
from loopscope.runs import RunOptions, Session

from tests.framework.runs.small_experiment import Small, SmallConfig, contents, registered

assert experiments.__all__
assert sinks.__all__
assert training_hooks.__all__
RUN = ["run", "small", "--strategy", "plain", "--with-hooks", "minimal", "--no-console-output"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with registered(Small):
        yield


def sink_names(*words):
    return [sink.name for sink in wanted_sinks(parse_run(Small, words))()]


def test_only_requested_sinks_are_created():
    """The default is jsonl, and the last option for a sink wins."""
    assert sink_names() == ["jsonl"]
    assert (
        sink_names("--no-hook-jsonl")
        == sink_names("--hook-jsonl=false")
        == sink_names("--hook-jsonl", "--no_hook_jsonl")
        == []
    )
    assert sink_names("--no-hook-jsonl", "--hook-jsonl") == ["jsonl"]
    assert sink_names("--hook-csv", "--hook-tensorboard", "--no-hook-jsonl") == ["csv", "tensorboard"]


def test_sink_included_in_another_is_omitted():
    """Wandb writes the file of the jsonl sink too."""
    assert sink_names("--hook-wandb", "demo", "--hook-jsonl", "--hook-csv") == ["csv", "wandb"]


@pytest.mark.longer
def test_sink_receives_value_of_its_option(tmp_path):
    assert main([*RUN, "--output-dir", str(tmp_path), "--hook-wandb=demo"]) == 0
    lines = (tmp_path / "small/plain/plain.jsonl").read_text().splitlines()
    assert [json.loads(line)["hook_point"] for line in lines] == ["POST_EPOCH", "POST_EPOCH"]
    (sink,) = wanted_sinks(parse_run(Small, ["--hook-wandb", "demo"]))()
    assert sink._project == "demo"


def test_config_file_can_select_sinks(tmp_path):
    (tmp_path / "a.yaml").write_text("hook_wandb: demo\nhook_tensorboard: true\n")
    assert sink_names("--config", str(tmp_path / "a.yaml")) == ["tensorboard", "wandb"]
    assert sink_names("--config", str(tmp_path / "a.yaml"), "--hook-wandb", "null", "--hook-tensorboard=false") == [
        "jsonl"
    ]
    (tmp_path / "none.yaml").write_text("hook_jsonl: false\n")
    assert sink_names("--config", str(tmp_path / "none.yaml")) == []
    assert sink_names("--config", str(tmp_path / "none.yaml"), "--hook-jsonl") == ["jsonl"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--hook-wandb"], "--hook-wandb needs a value."),
        (["--no-hook-jsonl=1"], "--no-hook-jsonl takes no value."),
        (["--no-hook-csv"], "Unknown option '--no-hook-csv'. Did you mean '--"),
        (["--hook-wandb", "a/b"], "'a/b' is not a valid W&B project"),
        (["--hook-wandb="], "'' is not a valid W&B project"),
        (["--hook-tensorboard=perhaps"], "--hook-tensorboard is 'perhaps'; it must be true or false."),
    ],
)
def test_bad_sink_value_is_refused_before_any_output(words, sentence, tmp_path, capfd):
    assert main([*RUN, "--output-dir", str(tmp_path / "out"), *words]) == 2
    assert sentence in capfd.readouterr().err
    assert contents(tmp_path) == {}


@pytest.mark.longer
@pytest.mark.parametrize("words", [["--hook-wandb", "demo"], ["--hook-tensorboard"]])
def test_missing_package_is_refused_before_any_output(words, tmp_path: Path, monkeypatch, capfd):
    """The message names the sink and its package, and other sinks are not affected."""
    package = words[0].removeprefix("--hook-")
    monkeypatch.setitem(sys.modules, package, None)
    assert main([*RUN, "--output-dir", str(tmp_path / "out"), *words]) == 2
    assert f"loopscope: Sink {package!r} needs the package {package}" in capfd.readouterr().err
    assert contents(tmp_path) == {}
    assert main([*RUN, "--output-dir", str(tmp_path / "out"), "--hook-csv"]) == 0


def test_experiments_accept_names_of_sinks(tmp_path):
    """The Python API takes names and objects together, and refuses an unknown name before any output."""
    runner = Small(SmallConfig(output_dir=tmp_path / "out"))
    options = RunOptions(strategies=["plain"], hooks=["norms"])
    with pytest.raises(UsageError, match=r"Unknown sink 'jsonel'. Did you mean 'jsonl'"):
        Session(runner, options, make_sinks=lambda: ["jsonel"]).run()
    assert contents(tmp_path) == {}
    Session(runner, options, make_sinks=lambda: ["jsonl", sinks.CSVSink()]).run()
    assert {"plain.jsonl", "plain.csv"} <= {path.name for path in (tmp_path / "out/small/plain").iterdir()}


@pytest.mark.longer
def test_overwriting_removes_files_of_sinks(tmp_path):
    words = [*RUN, "--output-dir", str(tmp_path), "--overwrite"]
    assert main([*words, "--hook-wandb", "demo", "--hook-tensorboard"]) == 0
    folder = tmp_path / "small/plain"
    (folder / "wandb").mkdir()
    assert main([*words, "--no-hook-jsonl"]) == 0
    left = {"experiment_config.json", "summary.json", "plain_final.pt", "files.json"}
    assert {path.name for path in folder.iterdir()} == left
