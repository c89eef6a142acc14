"""Checkpoints on the disk: whole or not at all, refused when damaged, never executed, a few of them kept."""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from loopscope.checkpoints import MANIFEST, Checkpoint, CheckpointWriter, checkpoints_in, newest_intact, open_checkpoint
from loopscope.checkpoints.format import (
    FORMAT,
    STATE,
    DamagedCheckpointError,
    checkpoint_name,
    set_aside,
    write_checkpoint,
)
from loopscope.checkpoints.writer import Kept, Staging
from loopscope.errors import LoopscopeError


def written(folder: Path, step: int = 3, score: float | None = None, value: float = 1.0) -> Checkpoint:
    content = {"weights": torch.full((50,), value), "plain": {"rate": 0.1, "names": ["a"], "none": None}}
    return write_checkpoint(folder / checkpoint_name(step), content, {"step": step, "score": score})


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    written(tmp_path)
    found = open_checkpoint(tmp_path / "step_000000003")
    content = found.content()
    assert torch.equal(content["weights"], torch.ones(50))
    assert content["plain"] == {"rate": 0.1, "names": ["a"], "none": None}
    assert found.manifest["files"][STATE]["bytes"] == (found.folder / STATE).stat().st_size


@pytest.mark.parametrize("name", [STATE, MANIFEST])
def test_a_flipped_bit_anywhere_is_noticed(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path).folder
    whole = (folder / name).read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 60)):
        (folder / name).write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(DamagedCheckpointError, match=r"damaged|format"):
            open_checkpoint(folder).content()
    (folder / name).write_bytes(whole)
    open_checkpoint(folder).content()


@pytest.mark.parametrize("name", [STATE, MANIFEST])
def test_a_file_that_is_cut_off_empty_or_missing_is_noticed(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path).folder
    whole = (folder / name).read_bytes()
    for rest in (whole[: len(whole) // 2], b""):
        (folder / name).write_bytes(rest)
        with pytest.raises(DamagedCheckpointError):
            open_checkpoint(folder).content()
    (folder / name).unlink()
    with pytest.raises(DamagedCheckpointError):
        open_checkpoint(folder).content()


def test_a_checkpoint_of_a_newer_format_is_named_as_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopscope.checkpoints.format.FORMAT", FORMAT + 1)
    folder = written(tmp_path).folder
    monkeypatch.undo()
    with pytest.raises(DamagedCheckpointError, match=r"of format 5, .* newer loopscope; this one reads format 4"):
        open_checkpoint(folder)


def test_a_checkpoint_of_the_format_before_is_named_as_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopscope.checkpoints.format.FORMAT", 2)
    folder = written(tmp_path).folder
    monkeypatch.undo()
    with pytest.raises(DamagedCheckpointError, match=r"of format 2, .* older loopscope; this one reads format 4"):
        open_checkpoint(folder)


class Exploit:
    """Makes a folder when it is unpickled by a careless reader."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


@pytest.mark.parametrize("write", ["torch.save", "pickle"])
def test_a_crafted_file_is_refused_without_executing_what_it_holds(write: str, tmp_path: Path) -> None:
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


def test_the_newest_intact_one_is_used_and_the_damaged_ones_are_named(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        written(tmp_path, step)
    (tmp_path / checkpoint_name(4) / MANIFEST).unlink()
    (tmp_path / checkpoint_name(3) / STATE).write_bytes(b"short")
    told: list[str] = []
    found = newest_intact(tmp_path, told.append)
    assert found is not None
    assert found.step == 2
    assert [checkpoint_name(4) in told[0], checkpoint_name(3) in told[1], len(told)] == [True, True, 2]


def test_nothing_that_was_intact_is_lost_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_a_crash_left_half_written_or_half_removed_is_no_checkpoint(tmp_path: Path) -> None:
    written(tmp_path, 1)
    for name in ("step_000000002.partial", "step_000000000.removed"):
        shutil.copytree(tmp_path / checkpoint_name(1), tmp_path / name)
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step_000000001"]
    Kept.of(tmp_path, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000000001"]


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    kept = Kept(2)
    scores = {1: 5.0, 2: 1.0, 3: None, 4: float("nan"), 5: 3.0, 6: 0.5, 7: 2.0, 8: 2.0}
    alive: set[int] = set()
    expected = {1: {1}, 2: {1, 2}, 3: {2, 3}, 4: {2, 3, 4}, 5: {2, 4, 5}, 6: {5, 6}, 7: {6, 7}, 8: {6, 7, 8}}
    for step, score in scores.items():
        alive.add(step)
        gone = kept.add(Checkpoint(tmp_path / checkpoint_name(step), {"step": step, "score": score}))
        alive -= {int(path.name.removeprefix("step_")) for path in gone}
        assert alive == expected[step], step


def test_the_writer_keeps_but_a_few_also_after_a_restart(tmp_path: Path) -> None:
    for steps in ((1, 2, 3), (4, 5)):
        writer = CheckpointWriter(tmp_path, keep=2)
        for step in steps:
            writer.wait()
            writer.write(step, writer_content(step), {"step": step, "score": 10.0 - step if step < 3 else 20.0}, ())
        writer.wait()
        assert writer.failures() == []
    assert sorted(path.name for path in checkpoints_in(tmp_path)) == [checkpoint_name(step) for step in (2, 4, 5)]


def test_a_checkpoint_written_over_a_longer_one_that_was_set_aside_is_whole(tmp_path: Path) -> None:
    spare = set_aside(written(tmp_path, 1).folder)
    content = {"weights": torch.zeros(2)}
    found = write_checkpoint(tmp_path / checkpoint_name(2), content, {"step": 2, "score": None}, (), spare)
    assert torch.equal(open_checkpoint(found.folder).content()["weights"], torch.zeros(2))
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint_name(2)]


def test_the_writer_leaves_nothing_but_checkpoints_when_it_has_finished(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, keep=1)
    for step in (1, 2, 3):
        writer.wait()
        writer.write(step, writer_content(step), {"step": step, "score": None}, ())
    writer.finish()
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint_name(3)]


def writer_content(step: int) -> dict[str, Any]:
    return {"weights": torch.full((10,), float(step))}


def test_a_staged_copy_shares_nothing_with_what_it_was_made_from() -> None:
    staging = Staging()
    weights = torch.arange(6.0).reshape(2, 3).t()
    content = {"a": [weights, (weights, "text")], "b": {"c": None, "d": {1, 2}}}
    first = staging.copy(content)
    weights.zero_()
    content["a"].append(1)
    assert torch.equal(first["a"][0], torch.arange(6.0).reshape(2, 3).t())
    assert (len(first["a"]), first["b"]) == (2, {"c": None, "d": {1, 2}})


def test_a_staging_area_uses_its_memory_again_where_it_fits() -> None:
    staging = Staging()
    first = staging.copy({"a": torch.ones(3), "b": torch.ones(3)})
    again = staging.copy({"b": torch.zeros(3), "c": torch.zeros(4)})
    assert again["b"].data_ptr() in {first["a"].data_ptr(), first["b"].data_ptr()}
    assert torch.equal(again["c"], torch.zeros(4))
