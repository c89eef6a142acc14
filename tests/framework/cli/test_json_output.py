"""The JSON of the commands that read runs: it fits the schema and its limit, and says what was cut."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from loopscope import experiments, sinks, training_hooks
from loopscope.cli import main
from loopscope.cli.output import Output
from loopscope.durable_files import plain_json
from loopscope.errors import UsageError
from loopscope.hooks import ALERTS, Alert

from tests.docs.markdown import ROOT
from tests.framework.runs.small_experiment import Small, registered

assert experiments.__all__
assert sinks.__all__
assert training_hooks.__all__
SCHEMA = json.loads((ROOT / "docs/schemas/commands.json").read_text(encoding="utf-8"))
RUN, OTHER = "out/small/plain", "out/small/other-order"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two runs with checkpoints and some alerts, and return the folder that contains ``out``."""
    folder = tmp_path_factory.mktemp("json")
    words = ["--strategy", "plain", "other-order", "--hooks", "norms", "--save-checkpoints", "1", "--epochs", "2"]
    with registered(Small):
        assert main(["run", "small", *words, "--no-console-output", "--output-dir", str(folder / "out")]) == 0
    alerts = [
        Alert(f"Spike {step}.", metric="loss", step=step, severity="info" if step % 2 else "warning")
        for step in range(40)
    ]
    for step, alert in enumerate(alerts):
        alert.hook, alert.rows = "loss_spikes", list(range(step, step + 20))
    (folder / RUN / ALERTS).write_text("".join(f"{json.dumps(alert.record())}\n" for alert in alerts))
    return folder


@pytest.fixture
def runs(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(finished / "out", tmp_path / "out")
    monkeypatch.chdir(tmp_path)


def answer(capsys: pytest.CaptureFixture[str], words: str, status: int = 0) -> dict[str, Any]:
    """Run a command with --json, check its output against the definition of the command, and return it."""
    capsys.readouterr()
    with registered(Small):
        assert main([*shlex.split(words), "--json"]) == status, capsys.readouterr().err
    text = capsys.readouterr().out
    content = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    definition = "error" if "error" in content and status == 2 else words.split()[0]
    validator = Draft202012Validator({**SCHEMA, "anyOf": [{"$ref": f"#/$defs/{definition}"}]})
    assert [error.message for error in validator.iter_errors(content)] == []
    assert "--all" in words or "--max-bytes" in words or len(text.encode()) <= 4096
    return content


COMMANDS = [
    "ls out",
    f"show {RUN}",
    "show out/small",
    f"show {RUN} --metrics 'training_metrics/*' --points 2",
    "hooks",
    "hooks loss_spikes",
    f"alerts {RUN}",
    f"doctor {RUN}",
    "doctor out/small",
    "compare out",
    f"diff {RUN} {RUN}",
    f"rewind {RUN} --step 5",
]


@pytest.mark.some_rows(6)
@pytest.mark.parametrize("limit", ["", " --all", " --max-bytes 1500"])
@pytest.mark.parametrize("words", COMMANDS)
def test_output_of_each_command_fits_the_schema(runs: None, words: str, limit: str, capsys) -> None:
    content = answer(capsys, words + limit)
    assert ("truncated" in content) <= (limit != " --all")


@pytest.mark.longer
def test_verification_fits_the_schema(runs: None, capsys) -> None:
    """A digest of another run gives a difference and status 1."""
    assert answer(capsys, f"verify {RUN}")["identical"]
    shutil.rmtree(Path(RUN, "checkpoints"))
    shutil.copy(Path(OTHER, "digests.jsonl"), Path(RUN, "digests.jsonl"))
    content = answer(capsys, f"verify {RUN}", status=1)
    assert "step" in content["runs"][-1]["difference"]


def test_differing_runs_end_with_status_one(runs: None, capsys) -> None:
    content = answer(capsys, f"diff {RUN} {OTHER}", status=1)
    assert not content["identical"]
    assert "step" in content["difference"]


@pytest.mark.parametrize(
    "words", ["show nowhere", "ls nowhere", f"alerts {RUN} --since -1", "hooks lost_spikes", f"doctor {RUN} --odd"]
)
def test_bad_input_is_an_error_object(runs: None, words: str, capsys) -> None:
    content = answer(capsys, words, status=2)
    assert content.keys() == {"schema", "error", "status"}


def test_cut_output_names_the_command_for_the_rest(runs: None, capsys) -> None:
    """The omitted entries and the remaining ones are all entries."""
    whole = answer(capsys, f"show {RUN} --all")["metrics"]
    cut = answer(capsys, f"show {RUN} --max-bytes 1500")
    (note,) = [note for note in cut["truncated"] if note["field"] == "metrics"]
    assert len(cut["metrics"]) + note["omitted"] == len(whole)
    assert note["more"] == f"loopscope show {RUN} --json --all"
    assert len(json.dumps(cut)) <= 1500


def test_alerts_are_selected_and_the_newest_are_kept(runs: None, capsys) -> None:
    content = answer(capsys, f"alerts {RUN} --since 10 --severity warning --limit 4")
    assert [item["step"] for item in content["items"]] == [32, 34, 36, 38]
    assert content["older"] == 11
    assert content["items"][-1]["rows"] == list(range(38, 46))
    cut = answer(capsys, f"alerts {RUN} --max-bytes 900")
    assert cut["items"][-1]["step"] == 39
    assert cut["truncated"][0]["omitted"] == sum(cut["counts"].values()) - len(cut["items"])


def test_fail_on_leaves_one_object(runs: None, capsys) -> None:
    assert main(["doctor", RUN, "--json", "--fail-on", "info"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["schema"] == 1


def test_text_in_a_pipe_is_cut(runs: None, capsys) -> None:
    assert main(["hooks"]) == 0
    text = capsys.readouterr().out
    assert len(text.encode()) <= 4096
    assert text.splitlines()[-1].endswith("more lines: loopscope hooks --all")
    assert main(["alerts", RUN, "--max-bytes", "700"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "more lines: " in lines[1]
    assert lines[-1].startswith("step 39 ")


def test_show_prints_forty_lines(runs: None, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["show", RUN, "--max-bytes", "0"]) == 0
    assert len(capsys.readouterr().out.splitlines()) <= 40


def test_long_texts_are_cut_last() -> None:
    output = Output(["show"], True, 2000)
    bounded = output._bounded({"error": "x" * 5000, "metrics": [1, 2]}, {"metrics": "first"})
    assert bounded["metrics"] == []
    assert len(json.dumps(bounded)) < 2000


def test_numbers_without_json_become_text() -> None:
    values = [float("inf"), -float("inf"), {1: (Path("a"),)}]
    assert plain_json(values, finite=True) == ["Infinity", "-Infinity", {"1": ["a"]}]


def test_negative_limit_is_refused() -> None:
    with pytest.raises(UsageError, match="--max-bytes is -1; it must be a number of bytes"):
        Output.of("ls", [], {"json": True, "all": False, "max_bytes": -1})


def test_text_for_agents_is_short(capsys) -> None:
    assert main(["agents"]) == 0
    assert len(capsys.readouterr().out.encode()) <= 3072


READERS = """
import shlex, sys
from loopscope.__main__ import PACKAGES
from loopscope.cli import main

for words in sys.argv[1:]:
    assert main([*shlex.split(words), "--json"], packages=PACKAGES) == 0, words
sys.exit(f"{'torch' in sys.modules} {'numpy' in sys.modules}")
"""


@pytest.mark.process
def test_commands_that_read_import_no_torch(runs: None) -> None:
    """Its import takes most of the two seconds that such a command would otherwise take."""
    commands = ["ls out", f"show {RUN}", f"doctor {RUN}", f"alerts {RUN}", f"compare {RUN} {OTHER}"]
    done = subprocess.run([sys.executable, "-c", READERS, *commands], capture_output=True, text=True)
    assert done.stderr.split("\n")[-2:] == ["False True", ""]
