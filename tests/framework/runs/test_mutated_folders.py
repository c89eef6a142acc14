"""Any bytes in any file of a run's folder: every command that reads runs ends with a sentence, not a traceback."""

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loopscope import sinks, training_hooks
from loopscope.cli import main
from loopscope.errors import UsageError
from loopscope.report import read_run

from tests.framework.runs.small_experiment import Small, registered
from tests.framework.runs.test_damaged_runs import JSON

FILLED = (sinks, training_hooks)
RUN = ["run", "small", "--strategy", "plain", "--epochs", "2", "--no-console-output", "--hooks", "norms", "batch_rows"]
READERS = {
    "show": ["show", "{run}", "--all"],
    "show --json": ["show", "{run}", "--json", "--all"],
    "show --metrics": ["show", "{run}", "--metrics", "training_metrics/*"],
    "doctor": ["doctor", "{run}"],
    "doctor --json": ["doctor", "{run}", "--json"],
    "ls": ["ls", "{output}"],
    "ls --json": ["ls", "{output}", "--json"],
    "alerts": ["alerts", "{run}"],
    "alerts --json": ["alerts", "{run}", "--json"],
    "compare": ["compare", "{run}", "{whole}"],
    "compare --json": ["compare", "{whole}", "{run}", "--json", "--metrics", "training_metrics/*"],
    "diff": ["diff", "{run}", "{whole}"],
    "diff --json": ["diff", "{whole}", "{run}", "--json"],
    "plot": ["plot", "{run}", "--metrics", "training_metrics/loss", "--out", "{output}/picture.svg"],
    "report": ["report", "{run}", "-o", "{output}/page.html", "--overwrite"],
}
ALERT = {"epoch": 0, "step": 2, "hook": "norms", "metric": "x", "severity": "warning", "sentence": "A value is high."}
FINDING = {"id": "a-b", "severity": "warning", "step": 2, "evidence": [], "why": "a", "next": "b", "confidence": 0.5}
LINES = [
    '{"epoch":0,"step":4,"hook_point":"POST_STEP","norms/x":{"steps":[1,2],"values":[1]}}',
    '{"epoch":0,"step":4,"hook_point":"POST_STEP","norms/x":{"steps":5,"values":5}}',
    '{"epoch":0,"step":4,"hook_point":"POST_STEP","norms/x":{"steps":[null],"values":[{"steps":[],"values":3}]}}',
    '{"epoch":0,"step":' + "9" * 400 + ',"hook_point":"POST_EPOCH","training_metrics/loss":1}',
    '{"epoch":-1,"step":1,"hook_point":"POST_EPOCH","training_metrics/loss":"\\ud800"}',
    '{"epoch":0,"step":true,"hook_point":"POST_EPOCH","training_metrics/loss":[1e999]}',
    "[" * 200_000,
    json.dumps(ALERT | {"step": 9 * 10**400}),
    json.dumps(ALERT | {"id": {}, "value": "x", "limit": [], "rows": {}, "severity": []}),
]
SPECIAL = {"pipe": os.mkfifo, "folder": os.mkdir, "socket": lambda path: bound(path), "link": lambda path: linked(path)}


def bound(path: str) -> None:
    """Create a socket, from within its folder, since the length of its path is limited."""
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(Path(path).parent)
        server.bind(Path(path).name)
        os.chdir(here)


def linked(path: str) -> None:
    Path(path).symlink_to("/dev/zero")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory):
    """Train once with every kind of file, and return the folder of the run."""
    folder = tmp_path_factory.mktemp("whole") / "small/plain"
    with registered(Small):
        assert main([*RUN, "--save-checkpoints", "--hook-csv", "--output-dir", str(folder.parent.parent)]) == 0
        assert main(["rewind", str(folder), "--step", "2"]) == 0
        (folder / "alerts.jsonl").write_text(json.dumps(ALERT) + "\n")
        summary = json.loads((folder / "summary.json").read_text())
        (folder / "summary.json").write_text(json.dumps(summary | {"findings": [FINDING]}))
        yield folder


def files(whole: Path) -> list[str]:
    return sorted(str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file())


def read(whole: Path, damage: Callable[[Path], Any], reader: str, capfd: Any) -> str:
    """Damage a copy of a run, let a command read it, and check its status and what it writes."""
    with tempfile.TemporaryDirectory() as output:
        run = Path(output) / "small/plain"
        shutil.copytree(whole, run)
        damage(run)
        capfd.readouterr()
        status = main([word.format(run=run, whole=whole, output=output) for word in READERS[reader]])
        shown, said = capfd.readouterr()
        assert status in (0, 1, 2), said
        assert all(line.startswith("loopscope: ") for line in said.splitlines()), said
        assert status == 0 or said
        return shown + said


def inserted(name: str, line: str) -> Callable[[Path], None]:
    """Return a damage that inserts a second line into a file."""

    def damage(run: Path) -> None:
        first, *rest = (run / name).read_text().splitlines(keepends=True)
        (run / name).write_text("".join([first, line + "\n", *rest]))

    return damage


@pytest.mark.some_rows(12)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", ["plain.jsonl", "alerts.jsonl", "digests.jsonl"])
def test_inserted_lines_never_show_tracebacks(name: str, reader: str, whole: Path, capfd) -> None:
    for line in LINES:
        read(whole, inserted(name, line), reader, capfd)


@pytest.mark.some_rows(12)
@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("reader", READERS)
def test_special_files_never_block(kind: str, reader: str, whole: Path, capfd) -> None:
    """All files but the settings are replaced by pipes, folders, sockets or links to a device."""
    replaced = [name for name in files(whole) if name != "experiment_config.json"]
    read(whole, partial(made_special, names=replaced, kind=kind), reader, capfd)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("reader", READERS)
def test_each_special_file_never_blocks(kind: str, reader: str, whole: Path, capfd) -> None:
    for name in files(whole):
        read(whole, partial(made_special, names=[name], kind=kind), reader, capfd)


def made_special(run: Path, names: Sequence[str], kind: str) -> None:
    for name in names:
        (run / name).unlink()
        SPECIAL[kind](str(run / name))


@st.composite
def mutations(draw: Any, whole: Path) -> Callable[[Path], None]:
    """Draw other bytes, a truncation, a doubled part, or another JSON value in any file of a run."""
    name = draw(st.sampled_from(files(whole)))
    data = (whole / name).read_bytes()
    begin, length, kind = draw(st.integers(0, len(data))), draw(st.integers(0, 8)), draw(st.integers(0, 4))
    if kind == 0:
        data = data[:begin]
    elif kind == 1:
        data = data[:begin] + data[max(0, begin - 50) :]
    elif kind == 2 or not name.endswith(("json", "jsonl")) or not data:
        data = data[:begin] + draw(st.binary(max_size=8)) + data[begin + length :]
    else:
        data = with_other_value(draw, data, is_lines=name.endswith("jsonl"))
    return lambda run: (run / name).write_bytes(data)


def with_other_value(draw: Any, data: bytes, *, is_lines: bool) -> bytes:
    """Replace a value at any depth of an object in JSON."""
    lines = data.decode().splitlines() if is_lines else [data.decode()]
    at = draw(st.integers(0, len(lines) - 1))
    content = json.loads(lines[at])
    owner, key = content, draw(st.sampled_from(sorted(content)))
    while isinstance(owner[key], (dict, list)) and owner[key] and draw(st.booleans()):
        owner = owner[key]
        key = draw(st.sampled_from(sorted(owner) if isinstance(owner, dict) else range(len(owner))))
    owner[key] = draw(JSON)
    lines[at] = json.dumps(content)
    return "\n".join(lines).encode() + b"\n"


def check(whole: Path, capfd: Any, data: Any) -> None:
    reader = data.draw(st.sampled_from(sorted(READERS)), label="command")
    read(whole, data.draw(mutations(whole), label="damage"), reader, capfd)


REST: Any = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}


@pytest.mark.guarantee("damage-is-detected")
@settings(max_examples=15, **REST)
@given(data=st.data())
def test_mutated_files_never_show_tracebacks(whole: Path, capfd, data) -> None:
    """Hypothesis damages a file; every command that reads the run reports it or reads the rest."""
    check(whole, capfd, data)


@pytest.mark.slow
@settings(max_examples=500, **REST)
@given(data=st.data())
def test_many_mutated_files_never_show_tracebacks(whole: Path, capfd, data) -> None:
    check(whole, capfd, data)


def test_damaged_line_is_named(whole: Path, capfd, tmp_path: Path) -> None:
    """The sentence has the file and the line, from commands and from Python."""
    shutil.copytree(whole, tmp_path / "run")
    inserted("plain.jsonl", LINES[0])(tmp_path / "run")
    assert main(["doctor", str(tmp_path / "run")]) == 2
    assert "plain.jsonl cannot be read" in (said := capfd.readouterr().err)
    assert "line 2" in said
    with pytest.warns(UserWarning, match="is damaged"):
        run = read_run(tmp_path / "run")
    with pytest.raises(UsageError, match="line 2"):
        _ = run.points
