"""Damage to one file or folder of a run: every command works correctly or names the damage in a sentence."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from loopscope import sinks, training_hooks
from loopscope.checkpoints import Checkpointing, checkpoint_folders, differing_entries
from loopscope.cli import main
from loopscope.training_hooks.averaging.weight_average import KINDS, average_name

from tests.framework.checkpoints.crash_runs import patiently
from tests.framework.runs.small_experiment import Small, contents, registered
from tests.sinks.event_files import values

pytestmark = pytest.mark.filterwarnings("always")  # the tests read the output of the commands
FILLED = (sinks, training_hooks)
SINKS = ["--hook-jsonl", "--hook-csv", "--hook-tensorboard"]
HOOKS = ["norms", "weight_average", "gradient_overflow"]
RUN = ["run", "small", "--strategy", "plain", "--epochs", "2", "--silent", "--hooks", *HOOKS, *SINKS]
SAVING = [*RUN, "--save-checkpoints", "--output-dir", "{output}"]
RESUMING = {"resume": ["resume", "{run}"], "--resume": [*SAVING, "--resume"]}
COMMANDS = {
    **RESUMING,
    "neither": SAVING,
    "--overwrite": [*SAVING, "--overwrite"],
    "verify": ["verify", "{run}"],
    "diff": ["diff", "{whole}", "{run}"],
    "replay": ["replay", "{run}", "--to", "tensorboard"],
    "plot": ["plot", "{run}", "--metrics", "norms/total_grad_norm", "--out", "{elsewhere}/picture.svg"],
    "--reference": [*RUN, "--hooks", "gradient_projection", "--reference", "{run}", "--output-dir", "{elsewhere}"],
}
AVERAGES = [average_name("plain", kind) for kind in KINDS]
EVENTS = "tensorboard/events.out.tfevents.plain"
ANNOUNCEMENTS = ["No active sink continues", "These hooks differ from those"]
"""Messages of a resumed run that announce other rows."""
Damage = Callable[[Path], None]
MISSING = object()
VALUES = [MISSING, None, -1, float("inf"), float("nan"), "x", "\x1b[31m", [], {}, [1], {"a": 1}, True, 2**70]


@pytest.fixture(scope="module", autouse=True)
def entries():
    with registered(Small):
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train, and return the folder of the run."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpointing, "take", patiently(Checkpointing.take))
        assert main([word.format(output=folder) for word in SAVING]) == 0
    return folder / "small/plain"


def killed(run: Path) -> None:
    """Turn a completed run into one that was killed after its first checkpoint."""
    shutil.rmtree(next(checkpoint_folders(run / "checkpoints")))
    for name in ("summary.json", "plain_final.pt", "files.json", *AVERAGES):
        (run / name).unlink(missing_ok=True)
    for name in ("plain.csv", "plain.jsonl", EVENTS):
        with (run / name).open("a") as file:
            file.write("what the resumed run does not write")
    (run / "run.lock").write_text('{"pid": 1, "host": "elsewhere", "since": "yesterday"}')


def results(run: Path) -> dict[str, Any]:
    """Return the results of a run: its weights and the rows of all its sinks, without times."""
    weights = {name: torch.load(run / name) for name in ("plain_final.pt", *AVERAGES) if (run / name).is_file()}
    rows = {name: (run / name).read_bytes() for name in ("plain.csv", "plain.jsonl")}
    events = [(step, value.SerializeToString()) for step, value in values(run / EVENTS) if "_hparams_" not in value.tag]
    config = [(step, value.tag) for step, value in values(run / EVENTS) if "_hparams_" in value.tag]
    # The options contain the path of the run.
    events = [found for found in events if b"output_dir" not in found[1]]
    return {"state": {"weights": weights, "rows": rows, "events": events, "config": config}}


@st.composite
def damages(draw: Any, run: Path) -> tuple[str, Damage]:
    """Draw a file or folder of a run and a damage to it."""
    found = sorted(run.rglob("*"))
    read = [path for path in found if path.suffix == ".json"]
    path = draw(st.sampled_from(found) | st.sampled_from(read), label="what is damaged")
    kinds = {"removed": gone, "a folder": a_folder, "a file": a_file, "a link to nothing": nothing, "a link": a_link}
    suffix = path.suffix if path.is_file() and path.stat().st_size else "nothing in it"
    kinds |= dict.fromkeys(["a byte", "cut off", "empty"], None) if suffix != "nothing in it" else {}
    kinds |= dict.fromkeys(["a line removed", "a line doubled"], None) if suffix in (".csv", ".jsonl") else {}
    kinds |= dict.fromkeys(["a field removed", "a field"], None) if suffix in (".json", ".jsonl") else {}
    fields = [kind for kind in kinds if "field" in kind] or sorted(kinds)
    kind = draw(st.sampled_from(sorted(kinds)) | st.sampled_from(fields), label="how")
    name, write = str(path.relative_to(run)), kinds[kind]
    if write is None:
        data = changed(draw, kind, path.read_bytes())
        return name, lambda folder: bool((folder / name).write_bytes(data)) and None
    return name, lambda folder: write(folder / name)


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all entries of nested values."""
    if path:
        yield path
    keys = value if isinstance(value, Mapping) else range(min(3, len(value))) if type(value) in (list, tuple) else ()
    for key in keys:
        yield from paths(value[key], (*path, key))


def other(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return nested values with one entry replaced or removed."""
    if not path:
        return new
    items = dict(value) if isinstance(value, Mapping) else dict(enumerate(value))
    if len(path) == 1 and new is MISSING:
        del items[path[0]]
    else:
        items[path[0]] = other(items[path[0]], path[1:], new)
    return items if isinstance(value, Mapping) else type(value)(items.values())


def gone(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def a_folder(path: Path) -> None:
    gone(path)
    path.mkdir()


def a_file(path: Path) -> None:
    gone(path)
    path.write_text("something else\n")


def nothing(path: Path) -> None:
    gone(path)
    path.symlink_to("nowhere")


def a_link(path: Path) -> None:
    elsewhere = next(parent for parent in path.parents if parent.name == "output").parent / f"moved {path.name}"
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)


def changed(draw: Any, kind: str, data: bytes) -> bytes:
    """Return the damaged bytes of a file."""
    at = draw(st.integers(0, max(0, len(data) - 1)), label="byte")
    if kind == "empty":
        return b""
    if kind == "cut off":
        return data[:at]
    if kind == "a byte":
        return data[:at] + bytes([data[at] ^ draw(st.integers(1, 255))]) + data[at + 1 :]
    lines = data.splitlines(keepends=True) if kind.startswith("a line") or data.count(b"\n{") else [data]
    whole = len(lines) - (len(lines) > 1 and not data.endswith(b"\n"))  # the last line of a killed run is torn
    number = draw(st.integers(0, whole - 1), label="line")
    if kind == "a line removed":
        return b"".join(lines[:number] + lines[number + 1 :])
    if kind == "a line doubled":
        return b"".join(lines[: number + 1] + lines[number:])
    content = json.loads(lines[number])
    path = draw(st.sampled_from([*paths(content)]), label="field")
    content = other(content, path, MISSING if kind == "a field removed" else draw(st.sampled_from(VALUES)))
    return b"".join([*lines[:number], json.dumps(content).encode() + b"\n", *lines[number + 1 :]])


def check(whole: Path, capfd: Any, data: Any) -> None:
    """Damage a copy of a run, run a command, and check its output and the files."""
    command = data.draw(st.sampled_from(sorted(COMMANDS)), label="command")
    with tempfile.TemporaryDirectory() as scratch:
        output, elsewhere = Path(scratch) / "output", Path(scratch) / "elsewhere"
        run = output / "small/plain"
        shutil.copytree(whole, run)
        elsewhere.mkdir()
        was_killed = data.draw(st.booleans(), label="killed")
        if was_killed:
            killed(run)
        if command == "replay":
            shutil.rmtree(run / "tensorboard")
        name, damage = data.draw(damages(run))
        damage(run)
        before = contents(run)
        capfd.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Checkpointing, "take", patiently(Checkpointing.take))
            places = {"whole": whole, "run": run, "output": output, "elsewhere": elsewhere}
            status = main([word.format(**places) for word in COMMANDS[command]])
        shown, said = capfd.readouterr()
        event(f"{command}: {status}")
        assert status in ((0, 1, 2) if command in ("diff", "verify") else (0, 2)), said
        assert all(line.startswith("loopscope: ") and line.isprintable() for line in said.splitlines()), said
        if status:
            assert [line for line in said.splitlines() if "note:" not in line], said
            assert {key: value for key, value in contents(run).items() if key != "run.lock"} == {
                key: value for key, value in before.items() if key != "run.lock"
            }, said
            refused = command == "neither" or (was_killed and command in ("--reference", "verify"))
            assert refused or status == 1 or Path(name).name in said or Path(name).parent.name in said, said
        elif command == "--overwrite" or (command in RESUMING and (was_killed or contents(run) != before)):
            is_announced = any(sentence in shown for sentence in ANNOUNCEMENTS)
            assert is_announced or differing_entries(results(whole), results(run)) == [], said


REST: Mapping[str, Any] = {
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    "deadline": None,
}


@pytest.mark.guarantee("damage-is-detected")
@settings(max_examples=6, **REST)
@given(data=st.data())
@pytest.mark.process
def test_single_damage_is_reported_or_harmless(whole: Path, capfd: Any, data: Any) -> None:
    """Forty random damages to a file or folder of a run."""
    check(whole, capfd, data)


@pytest.mark.slow
@settings(max_examples=1500, **REST)
@given(data=st.data())
def test_many_single_damages_are_reported_or_harmless(whole: Path, capfd: Any, data: Any) -> None:
    """The same check with 1,500 random damages."""
    check(whole, capfd, data)


def test_damaged_run_has_every_kind_of_file(whole: Path) -> None:
    """The run of these tests has config, summary, weights, sink files and checkpoints."""
    found = {str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file()}
    steps = {f"checkpoints/step_{step:09d}/{name}" for step in (3, 6) for name in ("manifest.json", "state.pt")}
    files = {"experiment_config.json", "summary.json", "plain_final.pt", "plain.csv", "plain.jsonl", EVENTS}
    assert found >= files | steps, found


@pytest.mark.longer
@pytest.mark.guarantee("damage-is-detected")
def test_refused_resume_leaves_other_files_unchanged(whole: Path, tmp_path: Path, capfd: Any):
    """If one sink file is missing, the others keep the rows after the checkpoint."""
    run = tmp_path / "small/plain"
    shutil.copytree(whole, run)
    killed(run)
    (run / "tensorboard").rename(run / "moved")
    before = contents(run)
    assert main(["resume", str(run)]) == 2
    assert "events.out.tfevents.plain is missing; it had" in capfd.readouterr().err
    assert contents(run) == {name: data for name, data in before.items() if name != "run.lock"}


@pytest.mark.longer
@pytest.mark.guarantee("damage-is-detected")
def test_resume_without_a_sink_names_its_file(whole: Path, tmp_path: Path, capfd: Any) -> None:
    """The file of the sink stays as it is."""
    run = tmp_path / "small/plain"
    shutil.copytree(whole, run)
    killed(run)
    assert main([word.format(output=tmp_path) for word in RESUMING["--resume"] if word != "--hook-csv"]) == 0
    assert f"No active sink continues {run}/plain.csv; the file is left unchanged." in capfd.readouterr().out
    assert (run / "plain.csv").read_bytes() > (whole / "plain.csv").read_bytes()


def test_invalid_unicode_is_replayed_as_question_marks(whole: Path, tmp_path: Path) -> None:
    """Lone surrogates in the config do not stop a replay to TensorBoard."""
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/tensorboard")
    record = json.loads((tmp_path / "run/experiment_config.json").read_text())
    record["config"] |= {"label": "a\ud800b", "\udfff": [1, "\ud800"]}
    (tmp_path / "run/experiment_config.json").write_text(json.dumps(record))
    assert main(["replay", str(tmp_path / "run"), "--to", "tensorboard"]) == 0
    assert any(b"a?b" in value.SerializeToString() for _, value in values(tmp_path / "run" / EVENTS))
