"""Checkpoint files: atomic writes, refusal of damaged files, no code execution, retention of a few checkpoints."""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from loopscope.checkpoints import (
    MANIFEST,
    Checkpoint,
    CheckpointWriter,
    checkpoint_folders,
    newest_intact,
    open_checkpoint,
)
from loopscope.checkpoints.format import (
    FORMAT,
    STATE,
    DamagedCheckpointError,
    checkpoint_name,
    set_aside,
    write_checkpoint,
)
from loopscope.checkpoints.writer import RetainedCheckpoints, Staging
from loopscope.errors import LoopscopeError


def written(folder: Path, step: int = 3, score: float | None = None, value: float = 1.0) -> Checkpoint:
    content = {"weights": torch.full((50,), value), "plain": {"rate": 0.1, "names": ["a"], "none": None}}
    return write_checkpoint(folder / checkpoint_name(step), content, {"step": step, "score": score})


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_written_checkpoint_reads_back(tmp_path: Path) -> None:
    """Tensors, plain values and the recorded file size survive the round trip."""
    written(tmp_path)
    found = open_checkpoint(tmp_path / "step_000000003")
    content = found.content()
    assert torch.equal(content["weights"], torch.ones(50))
    assert content["plain"] == {"rate": 0.1, "names": ["a"], "none": None}
    assert found.manifest["files"][STATE]["bytes"] == (found.folder / STATE).stat().st_size


@pytest.mark.guarantee("damage-is-detected")
@pytest.mark.parametrize("name", [STATE, MANIFEST])
def test_any_flipped_bit_is_detected(name: str, tmp_path: Path) -> None:
    """A checkpoint with any flipped bit is never used."""
    folder = written(tmp_path).folder
    whole = (folder / name).read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 60)):
        (folder / name).write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(DamagedCheckpointError, match=r"damaged|format"):
            open_checkpoint(folder).content()
    (folder / name).write_bytes(whole)
    open_checkpoint(folder).content()


@pytest.mark.parametrize("name", [STATE, MANIFEST])
def test_truncated_empty_or_missing_file_is_detected(name: str, tmp_path: Path) -> None:
    """Reading a damaged state file or manifest raises DamagedCheckpointError."""
    folder = written(tmp_path).folder
    whole = (folder / name).read_bytes()
    for rest in (whole[: len(whole) // 2], b""):
        (folder / name).write_bytes(rest)
        with pytest.raises(DamagedCheckpointError):
            open_checkpoint(folder).content()
    (folder / name).unlink()
    with pytest.raises(DamagedCheckpointError):
        open_checkpoint(folder).content()


def test_newer_checkpoint_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names both format versions and blames a newer loopscope."""
    monkeypatch.setattr("loopscope.checkpoints.format.FORMAT", FORMAT + 1)
    folder = written(tmp_path).folder
    monkeypatch.undo()
    with pytest.raises(DamagedCheckpointError, match=r"of format 6, .* newer loopscope; this version reads format 5"):
        open_checkpoint(folder)


def test_older_checkpoint_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names both format versions and blames an older loopscope."""
    monkeypatch.setattr("loopscope.checkpoints.format.FORMAT", 2)
    folder = written(tmp_path).folder
    monkeypatch.undo()
    with pytest.raises(DamagedCheckpointError, match=r"of format 2, .* older loopscope; this version reads format 5"):
        open_checkpoint(folder)


class Exploit:
    """Creates a folder when a careless reader unpickles it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


@pytest.mark.guarantee("damage-is-detected")
@pytest.mark.parametrize("write", ["torch.save", "pickle"])
def test_crafted_file_is_refused_without_execution(write: str, tmp_path: Path) -> None:
    """The reader never executes a malicious object, whether torch.save or pickle wrote it."""
    content = {"weights": Exploit(tmp_path / "executed")}
    folder = write_checkpoint(tmp_path / checkpoint_name(1), content, {"step": 1, "score": None}).folder
    if write == "pickle":
        (folder / STATE).write_bytes(pickle.dumps(content))
        manifest = json.loads((folder / MANIFEST).read_text())
        digested = Checkpoint(folder, manifest)
        with pytest.raises(DamagedCheckpointError):
            digested.content()
    with pytest.raises(DamagedCheckpointError):
        open_checkpoint(folder).content()
    assert not (tmp_path / "executed").exists()


def test_newest_intact_checkpoint_is_used(tmp_path: Path) -> None:
    """The search reports each damaged checkpoint that it skips by name."""
    for step in (1, 2, 3, 4):
        written(tmp_path, step)
    (tmp_path / checkpoint_name(4) / MANIFEST).unlink()
    (tmp_path / checkpoint_name(3) / STATE).write_bytes(b"short")
    told: list[str] = []
    found = newest_intact(tmp_path, told.append)
    assert found is not None
    assert found.step == 2
    assert [checkpoint_name(4) in told[0], checkpoint_name(3) in told[1], len(told)] == [True, True, 2]


def test_failed_write_keeps_intact_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If fsync or rename fails, the earlier checkpoint of the same step remains alone in the folder."""
    before = written(tmp_path, 3, value=1.0)
    for name in ("fsync", "rename"):
        with monkeypatch.context() as broken:
            target = Path if name == "rename" else os
            broken.setattr(target, name, refuse)
            with pytest.raises(LoopscopeError, match=r"step_000000003 could not be written: No space left"):
                written(tmp_path, 3, value=2.0)
    assert torch.equal(before.content()["weights"], torch.ones(50))
    assert [path.name for path in tmp_path.iterdir()] == ["step_000000003"]


def refuse(*arguments: Any) -> None:
    raise OSError(28, "No space left on device")


def test_crash_leftovers_are_not_checkpoints(tmp_path: Path) -> None:
    """The listing ignores partial and removed folders, and the next writer deletes them."""
    written(tmp_path, 1)
    for name in ("step_000000002.partial", "step_000000000.removed"):
        shutil.copytree(tmp_path / checkpoint_name(1), tmp_path / name)
    assert [path.name for path in checkpoint_folders(tmp_path)] == ["step_000000001"]
    RetainedCheckpoints.of(tmp_path, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000000001"]


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    kept = RetainedCheckpoints(2)
    scores = {1: 5.0, 2: 1.0, 3: None, 4: float("nan"), 5: 3.0, 6: 0.5, 7: 2.0, 8: 2.0}
    alive: set[int] = set()
    expected = {1: {1}, 2: {1, 2}, 3: {2, 3}, 4: {2, 3, 4}, 5: {2, 4, 5}, 6: {5, 6}, 7: {6, 7}, 8: {6, 7, 8}}
    for step, score in scores.items():
        alive.add(step)
        gone = kept.add(Checkpoint(tmp_path / checkpoint_name(step), {"step": step, "score": score}))
        alive -= {int(path.name.removeprefix("step_")) for path in gone}
        assert alive == expected[step], step


def test_writer_keeps_few_checkpoints_across_restarts(tmp_path: Path) -> None:
    """With keep=2, the two newest checkpoints and the best one remain after a restart."""
    for steps in ((1, 2, 3), (4, 5)):
        writer = CheckpointWriter(tmp_path, keep=2)
        for step in steps:
            writer.wait()
            writer.write(step, writer_content(step), {"step": step, "score": 10.0 - step if step < 3 else 20.0}, ())
        writer.wait()
        assert writer.failures() == []
    assert sorted(path.name for path in checkpoint_folders(tmp_path)) == [checkpoint_name(step) for step in (2, 4, 5)]


def test_checkpoint_over_longer_one_is_complete(tmp_path: Path) -> None:
    """A checkpoint that reuses the files of a longer, set-aside one reads back complete."""
    spare = set_aside(written(tmp_path, 1).folder)
    content = {"weights": torch.zeros(2)}
    found = write_checkpoint(tmp_path / checkpoint_name(2), content, {"step": 2, "score": None}, (), spare)
    assert torch.equal(open_checkpoint(found.folder).content()["weights"], torch.zeros(2))
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint_name(2)]


def test_finished_writer_leaves_only_checkpoints(tmp_path: Path) -> None:
    """With keep=1, only the newest checkpoint folder remains."""
    writer = CheckpointWriter(tmp_path, keep=1)
    for step in (1, 2, 3):
        writer.wait()
        writer.write(step, writer_content(step), {"step": step, "score": None}, ())
    writer.finish()
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint_name(3)]


def writer_content(step: int) -> dict[str, Any]:
    return {"weights": torch.full((10,), float(step))}


def test_staged_copy_shares_nothing_with_its_source() -> None:
    """Later changes of the source tensors and containers do not reach the copy."""
    staging = Staging()
    weights = torch.arange(6.0).reshape(2, 3).t()
    content = {"a": [weights, (weights, "text")], "b": {"c": None, "d": {1, 2}}}
    first = staging.copy(content)
    weights.zero_()
    content["a"].append(1)
    assert torch.equal(first["a"][0], torch.arange(6.0).reshape(2, 3).t())
    assert (len(first["a"]), first["b"]) == (2, {"c": None, "d": {1, 2}})


def test_staging_area_reuses_fitting_memory() -> None:
    """A tensor of an earlier size reuses its buffer, and a tensor of another size gets a new one."""
    staging = Staging()
    first = staging.copy({"a": torch.ones(3), "b": torch.ones(3)})
    again = staging.copy({"b": torch.zeros(3), "c": torch.zeros(4)})
    assert again["b"].data_ptr() in {first["a"].data_ptr(), first["b"].data_ptr()}
    assert torch.equal(again["c"], torch.zeros(4))
