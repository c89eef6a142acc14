"""Damaged files of runs: every command that reads them prints an error message without a traceback."""

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loopscope import sinks, training_hooks
from loopscope.cli import main
from loopscope.errors import RunNotice
from loopscope.runs import RunRecord, differences

from tests.framework.runs.small_experiment import Small, registered, session

FILLED = (sinks, training_hooks)
CONFIG, SUMMARY, RECORD = "experiment_config.json", "summary.json", "plain.jsonl"
RUN = ["run", "small", "--strategy", "plain", "--epochs", "1", "--no-console-output", "--hooks", "norms"]
MEASURING = [*RUN, "gradient_projection", "--on-hook-error", "skip"]
COMMANDS = {
    "diff": ["diff", "{whole}", "{run}"],
    "diff the other way round": ["diff", "{run}", "{whole}"],
    "replay": ["replay", "{run}", "--to", "tensorboard"],
    "plot": ["plot", "{run}", "--metrics", "norms/total_grad_norm", "--out", "{output}/picture.svg"],
    "resume": ["resume", "{run}"],
    "--resume": [*RUN, "--resume", "--output-dir", "{output}"],
    "--overwrite": [*MEASURING, "--overwrite", "--output-dir", "{output}"],
    "neither": [*RUN, "--output-dir", "{output}"],
    "--reference": [*MEASURING, "--reference", "{run}", "--output-dir", "{output}/again"],
    "verify": ["verify", "{run}"],
}
READING = ["diff", "diff the other way round", "replay", "plot", "resume", "--resume", "neither"]


@pytest.fixture(scope="module", autouse=True)
def entries():
    with registered(Small):
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train once, and return the folder of the run."""
    folder = tmp_path_factory.mktemp("whole")
    assert main([*RUN, "--hook-jsonl", "--save-checkpoints", "--output-dir", str(folder)]) == 0
    return folder / "small/plain"


def said_by(command: str, whole: Path, damage: Callable[[Path], None], capfd: Any) -> tuple[int, str]:
    """Damage a copy of a run, and return the exit status and the standard error of a command that reads it."""
    with tempfile.TemporaryDirectory() as output:
        run = Path(output) / "small/plain"
        shutil.copytree(whole, run)
        damage(run)
        capfd.readouterr()
        status = main([word.format(whole=whole, run=run, output=output) for word in COMMANDS[command]])
        return status, capfd.readouterr().err.replace(output, "OUTPUT")


def written(name: str, content: str | bytes) -> Callable[[Path], None]:
    """Return a damage that replaces a file by ``content``."""

    def damage(run: Path) -> None:
        (run / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return damage


def a_folder(name: str) -> Callable[[Path], None]:
    """Return a damage that replaces a file by a folder."""

    def damage(run: Path) -> None:
        (run / name).unlink()
        (run / name).mkdir()

    return damage


def without(name: str, field: str) -> Callable[[Path], None]:
    """Return a damage that removes a field from a file."""
    return changed(name, lambda content: content.pop(field))


def changed(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Return a damage that changes the object in a file."""

    def damage(run: Path) -> None:
        content = json.loads((run / name).read_text())
        change(content)
        (run / name).write_text(json.dumps(content))

    return damage


WRONG = {
    "no JSON": (lambda name: written(name, "{no json"), "cannot be read: it is not JSON"),
    "no object": (lambda name: written(name, "[1]"), "cannot be read: it is JSON, but not an object"),
    "too deep to parse": (lambda name: written(name, "[" * 100_000 + "]" * 100_000), "it is not JSON"),
    "no UTF-8": (lambda name: written(name, b'{"a": "\xff"}'), "cannot be read: it is not JSON"),
    "a folder": (a_folder, "cannot be read: it is not a regular file"),
    "empty": (lambda name: written(name, ""), "cannot be read: it is not JSON"),
    "a number too long": (lambda name: written(name, "1" * 5000), "cannot be read: it is not JSON"),
}
OF_CONFIG = {
    "no strategy": (without(CONFIG, "strategy"), "it has no field 'strategy'"),
    "no config": (without(CONFIG, "config"), "it has no field 'config'"),
    "a strategy that is a number": (changed(CONFIG, lambda to: to.update(strategy=3)), "'strategy' must be text"),
    "a strategy that leads elsewhere": (changed(CONFIG, lambda to: to.update(strategy="../x")), "cannot be a name"),
    "a long strategy": (changed(CONFIG, lambda to: to.update(strategy="x" * 300)), "cannot be a name"),
    "options that are a list": (changed(CONFIG, lambda to: to.update(options=[])), "must be an object"),
    "treatments of a number": (
        changed(CONFIG, lambda to: to.update(treatments={"a": 1})),
        "'treatments' must be an object (each value a list (each item text))",
    ),
}
OF_SUMMARY = {
    "no status": (without(SUMMARY, "status"), "it has no field 'status'"),
    "a status that is a list": (changed(SUMMARY, lambda to: to.update(status=[])), "must be text"),
    "no results": (without(SUMMARY, "final"), "it has no field 'final'"),
    "results that are text": (
        changed(SUMMARY, lambda to: to.update(final={"a": "b"})),
        "must be an object (each value a number)",
    ),
    "no hook in an error": (
        changed(SUMMARY, lambda to: to.update(hook_errors=[{}])),
        "must be a list (each item an object with hook)",
    ),
    "no time": (changed(SUMMARY, lambda to: to.update(seconds={})), "must be an object with training"),
}


@pytest.mark.some_rows(3)
@pytest.mark.guarantee("damage-is-detected")
@pytest.mark.parametrize("command", ["diff", "replay", "plot", "resume", "--resume", "verify"])
@pytest.mark.parametrize("wrong", [*WRONG, *OF_CONFIG])
def test_damaged_config_is_reported(wrong, command, whole, capfd) -> None:
    """Each command prints one line with the path of the configuration and the reason."""
    damage, sentence = OF_CONFIG.get(wrong) or (WRONG[wrong][0](CONFIG), WRONG[wrong][1])
    status, said = said_by(command, whole, damage, capfd)
    assert (status, said.count("\n")) == (2, 1), said
    assert f"loopscope: OUTPUT/small/plain/{CONFIG} " in said
    assert sentence in said


@pytest.mark.some_rows(3)
@pytest.mark.guarantee("damage-is-detected")
@pytest.mark.parametrize("command", ["--resume", "resume"])
@pytest.mark.parametrize("wrong", [*WRONG, *OF_SUMMARY])
def test_damaged_summary_is_reported(wrong, command, whole, capfd) -> None:
    """Resuming prints one line with the path of the summary and the reason."""
    damage, sentence = OF_SUMMARY.get(wrong) or (WRONG[wrong][0](SUMMARY), WRONG[wrong][1])
    status, said = said_by(command, whole, damage, capfd)
    assert (status, said.count("\n"), sentence in said) == (2, 1, True), said
    assert f"loopscope: OUTPUT/small/plain/{SUMMARY} " in said


@pytest.mark.some_rows(3)
@pytest.mark.parametrize("command", ["diff", "--resume", "verify"])
@pytest.mark.parametrize("wrong", WRONG)
def test_checkpoint_with_damaged_manifest_is_skipped(wrong, command, whole, capfd) -> None:
    """The run starts without that checkpoint, and only verify fails."""

    def damage(run: Path) -> None:
        for name in ("summary.json", "plain_final.pt", "digests.jsonl", "files.json"):
            (run / name).unlink()
        for folder in (run / "checkpoints").iterdir():
            WRONG[wrong][0](f"checkpoints/{folder.name}/manifest.json")(run)

    status, said = said_by(command, whole, damage, capfd)
    assert status == (2 if command == "verify" else 0), said
    assert "no intact checkpoints or digests to compare with" in said or not said


@pytest.mark.some_rows(3)
@pytest.mark.parametrize("wrong", WRONG)
def test_damaged_run_is_overwritten_only_on_request(wrong, whole, capfd) -> None:
    """The command fails with one line, and --overwrite replaces the run."""
    damage = WRONG[wrong][0](SUMMARY)
    status, said = said_by("neither", whole, damage, capfd)
    assert (status, said.count("\n")) == (2, 1)
    assert "already holds a run whose summary.json cannot be read, which is left unchanged" in said
    assert said_by("--overwrite", whole, damage, capfd)[0] == 0


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.parametrize("wrong", WRONG)
def test_damaged_reference_config_causes_warning(wrong, whole, tmp_path) -> None:
    """The warning reports that the reference may come from a different run and why."""
    make, sentence = WRONG[wrong]
    shutil.copytree(whole, tmp_path / "run")
    make(CONFIG)(tmp_path / "run")
    again = session(tmp_path, strategies=["plain"], epochs=1, hooks=["hessian"], reference=tmp_path / "run")
    with pytest.warns(RunNotice, match=r"comes from a run that may differ: .*/experiment_config\.json ") as said:
        again.run()
    assert any(sentence in str(warning.message) for warning in said)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.just("\ud800")),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=5,
)


@st.composite
def damages(draw: Any, whole: Path) -> Callable[[Path], None]:
    """Draw changed bytes, a truncation or a field of another type, in any file of a run."""
    checkpoint = next((whole / "checkpoints").iterdir()).relative_to(whole)
    tensors = ["plain_final.pt", f"{checkpoint}/state.pt"]
    name = draw(st.sampled_from([CONFIG, SUMMARY, RECORD, f"{checkpoint}/manifest.json", *tensors]))
    data = (whole / name).read_bytes()
    begin, length, kind = draw(st.integers(0, len(data))), draw(st.integers(0, 8)), draw(st.integers(0, 3))
    if kind == 0:
        return written(name, data[:begin])
    if kind == 1 or name in tensors:
        return written(name, data[:begin] + draw(st.binary(max_size=8)) + data[begin + length :])
    lines = data.decode().splitlines() if name == RECORD else [data.decode()]
    at = draw(st.integers(0, len(lines) - 1))
    content = json.loads(lines[at])
    owner, key = content, draw(st.sampled_from(sorted(content)))
    while isinstance(owner[key], dict) and owner[key] and draw(st.booleans()):
        owner, key = owner[key], draw(st.sampled_from(sorted(owner[key])))
    owner[key] = draw(JSON)
    lines[at] = json.dumps(draw(JSON) if kind == 2 else content)
    return written(name, "\n".join(lines) + "\n")


REST = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}
TRAINING = sorted(COMMANDS.keys() - set(READING))


def check_reading(whole, capfd, data, command) -> None:
    """Damage a run at random and let a command read it: the command succeeds or prints an error message."""
    status, said = said_by(command, whole, data.draw(damages(whole)), capfd)
    assert status in (0, 1, 2), said
    assert all(line.startswith("loopscope: ") for line in said.splitlines()), said
    assert status == 0 or said


@pytest.mark.slow
@pytest.mark.guarantee("damage-is-detected")
@settings(max_examples=5, **REST)
@given(data=st.data(), command=st.sampled_from(READING))
def test_reading_commands_never_show_tracebacks(whole, capfd, data, command) -> None:
    """Any damage gives a known exit status and messages with the program name."""
    check_reading(whole, capfd, data, command)


@pytest.mark.slow
@settings(max_examples=500, **REST)
@given(data=st.data(), command=st.sampled_from(READING))
def test_many_damaged_runs_are_read_or_refused(whole, capfd, data, command) -> None:
    check_reading(whole, capfd, data, command)


def check_training(whole, capfd, data, command) -> None:
    """Damage a run at random and let a command train from it: the command starts or prints an error message."""
    status, said = said_by(command, whole, data.draw(damages(whole)), capfd)
    assert status in ((0, 1, 2) if command == "verify" else (0, 2)), said
    assert all(line.startswith("loopscope: ") for line in said.splitlines()), said


@pytest.mark.parametrize("name", ["x" * 300, "no/such/folder"])
@pytest.mark.parametrize("command", ["diff", "replay", "plot", "resume", "--reference"])
def test_impossible_path_is_refused(command, name, whole, tmp_path, capfd) -> None:
    words = [word.format(whole=whole, run=name, output=tmp_path) for word in COMMANDS[command]]
    assert main(words) == 2
    assert capfd.readouterr().err.count("\n") == 1


@pytest.mark.longer
@given(st.dictionaries(st.text(max_size=2), JSON, max_size=4), st.dictionaries(st.text(max_size=2), JSON, max_size=4))
def test_differences_list_changed_entries(before, now) -> None:
    """The result has every entry that is missing on one side or has another value, except ignored names."""
    found = {item.name: (item.before, item.now) for item in differences(before, now)}
    assert found == {
        name: (before.get(name), now.get(name)) for name in {**before, **now} if before.get(name) != now.get(name)
    }
    assert differences(before, now, {*before, *now}) == []


def test_older_run_record_is_readable(tmp_path: Path) -> None:
    """A configuration with only experiment, strategy and config gives a complete record."""
    (tmp_path / CONFIG).write_text('{"experiment": "e", "strategy": "s", "config": {"lr": 1}}')
    assert RunRecord.read(tmp_path) == RunRecord(experiment="e", strategy="s", config={"lr": 1})


@settings(max_examples=15, **REST)
@given(data=st.data(), command=st.sampled_from(TRAINING))
@pytest.mark.process
def test_running_commands_never_show_tracebacks(whole, capfd, data, command) -> None:
    """After any damage the run starts, or the command prints an error message."""
    check_training(whole, capfd, data, command)


@pytest.mark.slow
@settings(max_examples=200, **REST)
@given(data=st.data(), command=st.sampled_from(TRAINING))
def test_many_damaged_runs_start_or_are_refused(whole, capfd, data, command) -> None:
    check_training(whole, capfd, data, command)
