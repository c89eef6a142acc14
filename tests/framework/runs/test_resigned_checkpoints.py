"""Checkpoints with valid digests and one wrong field in their manifest or state."""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loopscope import sinks, training_hooks
from loopscope.checkpoints import Checkpointing, checkpoint_folders, open_checkpoint
from loopscope.cli import main
from loopscope.file_digests import sealed

from tests.framework.checkpoints.crash_runs import patiently
from tests.framework.runs.small_experiment import Small, read_json, registered

pytestmark = pytest.mark.filterwarnings("always")  # the tests read the output of the commands
FILLED = (sinks, training_hooks)
HOOKS = ["norms", "consecutive", "gradient_overflow", "weight_updates"]
RUN = ["run", "small", "--strategy", "plain", "--epochs", "2", "--no-console-output", "--hooks", *HOOKS]
COMMANDS = {
    "resume": ["resume", "{run}"],
    "--resume": [*RUN, "--resume", "--save-checkpoints", "--output-dir", "{output}"],
    "diff": ["diff", "{whole}", "{run}"],
    "verify": ["verify", "{run}"],
}
MISSING = object()
Path_ = tuple[Any, ...]


@pytest.fixture(scope="module", autouse=True)
def entries():
    with registered(Small):
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train, and return the folder of the run with its first checkpoint alone, as if it had been killed."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpointing, "take", patiently(Checkpointing.take))
        words = [*RUN, "--hook-jsonl", "--hook-csv", "--save-checkpoints", "--output-dir", str(folder)]
        assert main(words) == 0
    run = folder / "small/plain"
    shutil.rmtree(next(checkpoint_folders(run / "checkpoints")))
    for name in ("summary.json", "plain_final.pt"):
        (run / name).unlink()
    return run


def paths(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Yield the paths of all entries of nested values."""
    if path:
        yield path
    keys = value if isinstance(value, Mapping) else range(min(3, len(value))) if type(value) in (list, tuple) else ()
    for key in keys:
        yield from paths(value[key], (*path, key))


def changed(value: Any, path: Path_, new: Any) -> Any:
    """Return nested values with one entry replaced or removed."""
    if not path:
        return new
    items = dict(value) if isinstance(value, Mapping) else dict(enumerate(value))
    if len(path) == 1 and new is MISSING:
        del items[path[0]]
    else:
        items[path[0]] = changed(items[path[0]], path[1:], new)
    return items if isinstance(value, Mapping) else type(value)(items.values())


def signed(folder: Path, manifest: dict[str, Any]) -> None:
    (folder / "manifest.json").write_text(json.dumps(sealed(manifest)))


def manifest_of(folder: Path) -> dict[str, Any]:
    return {key: value for key, value in read_json(folder / "manifest.json").items() if key != "digest"}


def with_state(folder: Path, content: Any) -> None:
    torch.save(content, folder / "state.pt")
    data = (folder / "state.pt").read_bytes()
    files = {"state.pt": {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}}
    signed(folder, {**manifest_of(folder), "files": files})


def deep(levels: int) -> Any:
    return [deep(levels - 1)] if levels else 1


VALUES = [MISSING, None, -1, 10**400, float("inf"), float("nan"), "x", "\x1b[31m", [], {}, [1], {"a": 1}, True, 2**70]
OF_MANIFEST = [*VALUES, deep(200), "\ud800"]
OF_STATE = [value for value in VALUES if value != 10**400] + [torch.zeros(3), torch.zeros(0), torch.tensor(1.5)]


def refused_or_done(command: str, whole: Path, capfd: Any, damage: Any) -> None:
    with tempfile.TemporaryDirectory() as output:
        run = Path(output) / "small/plain"
        shutil.copytree(whole, run)
        damage(next(checkpoint_folders(run / "checkpoints")))
        capfd.readouterr()
        status = main([word.format(whole=whole, run=run, output=output) for word in COMMANDS[command]])
        said = capfd.readouterr().err
        assert status in (0, 1, 2), said
        assert all(line.startswith("loopscope: ") and line.isprintable() for line in said.splitlines()), said
        assert status == 0 or said
        assert status == 0 or command in ("diff", "verify") or run.joinpath("checkpoints").is_dir()


REST = {"suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow], "deadline": None}


def check_manifest(whole: Path, capfd: Any, data: Any, command: str) -> None:
    manifest = manifest_of(next(checkpoint_folders(whole / "checkpoints")))
    path, value = data.draw(st.sampled_from([*paths(manifest)])), data.draw(st.sampled_from(OF_MANIFEST))
    refused_or_done(command, whole, capfd, lambda folder: signed(folder, changed(manifest, path, value)))


def check_state(whole: Path, capfd: Any, data: Any, command: str) -> None:
    content = open_checkpoint(next(checkpoint_folders(whole / "checkpoints"))).content()
    path, value = data.draw(st.sampled_from([*paths(content)])), data.draw(st.sampled_from(OF_STATE))
    refused_or_done(command, whole, capfd, lambda folder: with_state(folder, changed(content, path, value)))


@pytest.mark.longer
@pytest.mark.guarantee("damage-is-detected")
@settings(max_examples=5, **REST)
@given(data=st.data(), command=st.sampled_from(sorted(COMMANDS)))
def test_signed_manifest_is_used_or_refused(whole, capfd, data, command) -> None:
    """A manifest with one changed field and a valid digest is used or refused in one sentence."""
    check_manifest(whole, capfd, data, command)


@pytest.mark.longer
@pytest.mark.guarantee("damage-is-detected")
@settings(max_examples=5, **REST)
@given(data=st.data(), command=st.sampled_from(sorted(COMMANDS)))
def test_signed_state_is_used_or_refused(whole, capfd, data, command) -> None:
    """A state with one changed field and a valid digest is used or refused in one sentence."""
    check_state(whole, capfd, data, command)


@pytest.mark.slow
@settings(max_examples=1500, **REST)
@given(data=st.data(), command=st.sampled_from(sorted(COMMANDS)), of_state=st.booleans())
def test_any_signed_checkpoint_is_used_or_refused(whole, capfd, data, command, of_state) -> None:
    (check_state if of_state else check_manifest)(whole, capfd, data, command)


KNOWN = {
    "state/optimizer/state/0.weight/exp_avg": (torch.tensor(1.5), "exp_avg of 0.weight has the wrong shape"),
    "state/optimizer/state/0.bias/exp_avg": (MISSING, "could not resume from .*: KeyError"),
    "state/loop/epoch": (None, "its field 'epoch' must be an integer"),
    "state/loop/step": (5, "its epoch and step are not those in manifest.json"),
    "state/loop/accumulated_grads": ({"0.weight": -1}, "its field 'accumulated_grads' must be"),
    "state/parameters/0.bias": (2**70, "could not resume from .*: OverflowError"),
    "state/modules/1._non_persistent_buffers_set": (MISSING, r"its modules differ \(1._non_persistent_buffers_set\)"),
    "state/scheduler/last_epoch": (None, "last_epoch of the scheduler is not a number"),
    "hooks/consecutive/memory/vectors/before": ("x", "'consecutive' cannot be restored"),
    "samples": ("x", "its field 'samples' must be an object"),
    "left_out": ("x", "its field 'left_out' must be an object"),
}


@pytest.mark.some_rows(3)
@pytest.mark.guarantee("damage-is-detected")
@pytest.mark.parametrize("path", KNOWN)
def test_impossible_state_is_refused_with_reason(path: str, whole: Path, tmp_path: Path, capfd) -> None:
    """The error of resume names the checkpoint or hook and the reason."""
    value, sentence = KNOWN[path]
    keys = [int(key) if key.isdigit() else key for key in path.split("/")]
    shutil.copytree(whole, tmp_path / "small/plain")
    folder = next(checkpoint_folders(tmp_path / "small/plain/checkpoints"))
    with_state(folder, changed(open_checkpoint(folder).content(), tuple(keys), value))
    assert main(["resume", str(tmp_path / "small/plain")]) == 2
    said = capfd.readouterr().err
    assert said.startswith(f"loopscope: {folder}") or "could not resume" in said or path.startswith("hooks/")
    assert re.search(sentence, said), said


class Enormous(Small):
    """Evaluates to an integer beyond the range of floats."""

    name = "enormous"

    def evaluate(self, model: Any) -> dict[str, float]:
        return {"val_loss": NUMBERS[0], "val_acc": -NUMBERS[0]}


NUMBERS = [1]


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.guarantee("resumed-runs-are-identical")
@pytest.mark.parametrize("display", ["--silent", "--no-console-output", "--live"])
@pytest.mark.parametrize("digits", [400, 5000])
def test_score_beyond_floats_does_not_end_run(digits: int, display: str, tmp_path: Path, capfd) -> None:
    """An evaluation metric that exceeds the range of floats ends neither the run nor its checkpoints."""
    NUMBERS[0] = 10**digits
    words = ["run", "enormous", "--strategy", "plain", "--epochs", "4", "--save-checkpoints", "1", "--hooks", "norms"]
    with registered(Enormous):
        status = main([*words, "--hook-jsonl", "--hook-csv", display, "--output-dir", str(tmp_path)])
    is_recorded = digits < 4300  # Python converts longer numbers to no text, so the rows of the sinks are lost
    assert status == (0 if is_recorded else 1), capfd.readouterr().err
    *_, oldest = checkpoint_folders(tmp_path / "enormous/plain/checkpoints")
    assert open_checkpoint(oldest).score > 1e300
    expected = "completed" if is_recorded else "incomplete"
    assert read_json(tmp_path / "enormous/plain/summary.json")["status"] == expected
