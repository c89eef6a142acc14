"""Checkpoints of several processes: bitwise resume on the same number, resume on any number, atomic writes."""

import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from loopscope.checkpoints import (
    DIGESTS,
    MANIFEST,
    checkpoint_folders,
    differing_entries,
    load_checkpoint,
    newest_intact,
    open_checkpoint,
    read_content,
    run_lock,
    save_checkpoint,
)
from loopscope.checkpoints.format import DamagedCheckpointError, PartialCheckpoint
from loopscope.engine import HookManager
from loopscope.errors import LoopscopeError, UsageError
from loopscope.file_digests import with_checksum
from loopscope.loops import epoch_loop
from loopscope.state import differing as differing_digests
from loopscope.state import without_on_demand

from tests.framework.checkpoints.killed_sessions import flipped
from tests.framework.checkpoints.shared_sessions import HOOKS, STOPPED_AT, resume, stop, train
from tests.framework.training.test_fully_sharded import build
from tests.support.ranks import on_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

RUN = "shared/plain"


def by_two(folder: Path) -> None:
    stop(folder / "begun by 2, fsdp", "fsdp")


def by_two_again(folder: Path) -> dict[str, str]:
    for kind in ("fsdp", "tp", "ddp"):
        resume(folder / "begun by 3, fsdp", folder / f"3, fsdp, then 2, {kind}", kind)
    return refusals(folder)


def refusals(folder: Path) -> dict[str, str]:
    """Return the refusals to start on this rank, with their messages."""
    second = torch.distributed.get_rank() == 1
    return {
        "one process": refused(lambda: resume(folder / "begun by one", folder / "no run 1", "ddp")),
        "exact": refused(lambda: resume(folder / "begun by 3, ddp", folder / "no run 2", "ddp", exact=True)),
        "rate": refused(lambda: train(folder / "no run 3", "ddp", lr=0.02 if second else 0.01)),
        "hooks": refused(lambda: train(folder / "no run 4", "ddp", HOOKS[: 3 if second else 4])),
        "locked": refused(lambda: train(folder / "locked", "ddp")),
        "unshared": refused(lambda: train(folder / "no run 5", "ddp"), without_access=second),
        "folder": refused(lambda: train(folder / "3, ddp", "ddp")),
    }


def refused(start: Callable[[], None], *, without_access: bool = False) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if without_access:
            patch.setattr(os, "access", lambda path, mode: "no run" not in str(path))
        with pytest.raises(UsageError) as caught:
            start()
    return str(caught.value)


def by_three(folder: Path) -> dict[str, Any]:
    for kind in ("fsdp", "ddp", "tp"):
        train(folder / f"3, {kind}", kind)
        stop(folder / f"begun by 3, {kind}", kind)
        resume(folder / f"begun by 3, {kind}", folder / f"3, {kind}, then 3, {kind}", kind, exact=True)
    resume(folder / "begun by 2, fsdp", folder / "2, fsdp, then 3, fsdp", "fsdp")
    resume(folder / "begun by 3, tp", folder / "3, tp, then 3, fsdp", "fsdp")
    return {"disk": with_a_full_disk(folder / "full disk"), "custom loop": in_a_custom_loop(folder / "custom loop")}


def in_a_custom_loop(folder: Path) -> list[list[str]]:
    """Save and load in a custom loop; return the differing parts before and after loading."""
    (task, state), (other, fresh) = build("fsdp"), build("fsdp", length=1)
    epoch_loop(task, HookManager((), task, state))
    epoch_loop(other, HookManager((), other, fresh))
    save_checkpoint(folder, state, {"a": {"n": 1}}, state.streams.save(), task.ranks)
    expected, before = without_on_demand(state.digest()), without_on_demand(fresh.digest())
    assert load_checkpoint(folder, fresh, other.ranks) == {"a": {"n": 1}}
    return [differing_digests(expected, found) for found in (before, without_on_demand(fresh.digest()))]


def with_a_full_disk(folder: Path) -> list[str]:
    """Train while the second rank cannot write its first file; return the writer's failures on this rank."""
    write, told = PartialCheckpoint.write, list[str]()

    def full(self: PartialCheckpoint, *arguments: Any) -> Any:
        patch.setattr(PartialCheckpoint, "write", write)
        raise LoopscopeError(f"{self.folder} could not be written: No space left on device.")

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.distributed.get_rank() == 1:
            patch.setattr(PartialCheckpoint, "write", full)
        train(folder, "fsdp")
    told += [str(each.message) for each in caught if "No space" in str(each.message)]
    return told


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train in all modes, and return the folder of the runs."""
    folder = tmp_path_factory.mktemp("runs")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(folder / "one", None)
        stop(folder / "begun by one", None)
        (folder / "locked" / RUN).mkdir(parents=True)
        for compute, count in ((by_two, 2), (by_three, 3), (by_two_again, 2)):
            meeting = folder / f"said {compute.__name__}"
            meeting.mkdir()
            with run_lock(folder / "locked" / RUN):
                on_ranks(partial(compute, folder), meeting, count)
        for kind in ("fsdp", "ddp", "tp"):
            resume(folder / f"begun by 3, {kind}", folder / f"3, {kind}, then alone", None)
    return folder


def weights(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(run / RUN / "plain_final.pt")


def rows(run: Path) -> list[str]:
    return (run / RUN / "plain.jsonl").read_text().splitlines()


def numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from numbers(part, f"{name}/{key}")
    if isinstance(value, (int, float)):
        yield name, value


@pytest.mark.guarantee("ranks-agree", "resumed-runs-are-identical")
@pytest.mark.parametrize("kind", ["fsdp", "ddp", "tp"])
def test_resume_on_same_world_size_is_bitwise_identical(kind, runs):
    """Records, digests, weights and the last checkpoint are the same under FSDP, DDP and tensor parallelism."""
    whole, resumed = runs / f"3, {kind}", runs / f"3, {kind}, then 3, {kind}"
    assert rows(resumed) == rows(whole)
    assert len(rows(whole)) > STOPPED_AT
    digests = [(run / RUN / DIGESTS).read_bytes() for run in (whole, resumed)]
    assert digests[0] == digests[1] != b""
    for name, value in weights(whole).items():
        assert torch.equal(weights(resumed)[name], value), name
    ends = [next(checkpoint_folders(run / RUN / "checkpoints")) for run in (whole, resumed)]
    contents = [read_content(open_checkpoint(end)) for end in ends]
    assert ends[0].name == ends[1].name
    assert differing_entries(*contents) == []
    assert differing_entries(contents[0], {"state": {}}) != []


@pytest.mark.guarantee("ranks-agree", "resumed-runs-are-identical")
@pytest.mark.parametrize(
    "resumed",
    [
        *(f"3, fsdp, then 2, {kind}" for kind in ("fsdp", "tp", "ddp")),
        *("2, fsdp, then 3, fsdp", "3, tp, then 3, fsdp"),
        *(f"3, {kind}, then alone" for kind in ("fsdp", "ddp", "tp")),
    ],
)
def test_resume_on_another_world_size_matches_within_rounding(resumed, runs):
    """Weights and records agree with those of one process up to the order of summation."""
    for name, value in weights(runs / "one").items():
        torch.testing.assert_close(weights(runs / resumed)[name], value, rtol=1e-12, atol=1e-12, msg=name)
    assert len(rows(runs / resumed)) == len(rows(runs / "one"))
    for ours, expected in zip(rows(runs / resumed), rows(runs / "one"), strict=True):
        found, wanted = (dict(numbers(json.loads(line))) for line in (ours, expected))
        assert found == pytest.approx(wanted, rel=1e-9, abs=1e-10, nan_ok=True)


def test_custom_training_loop_saves_and_loads_shards(runs):
    """After save_checkpoint and load_checkpoint the state of every rank is the saved one."""
    for rank in range(3):
        before, after = torch.load(runs / "said by_three" / f"{rank}.pt")["custom loop"]
        assert len(before) > 20
        assert after == []


# Damage


@pytest.fixture
def begun(runs: Path, tmp_path: Path) -> Path:
    """Return a copy of the folder of the checkpoints of a run of three processes that was stopped."""
    return Path(shutil.copytree(runs / "begun by 3, fsdp" / RUN / "checkpoints", tmp_path / "checkpoints"))


FILES = (MANIFEST, "rank_0.pt", "rank_1.pt", "rank_2.pt")


@pytest.mark.guarantee("damage-is-detected")
@pytest.mark.parametrize("name", FILES)
def test_damaged_file_is_reported_and_previous_checkpoint_used(name, begun):
    """Files are flipped, truncated, emptied, exchanged and deleted; the warning names the newest checkpoint."""
    newest, before = [*checkpoint_folders(begun)][:2]
    whole, told = (newest / name).read_bytes(), list[str]()
    other = FILES[FILES.index(name) % 3 + 1] if name != MANIFEST else "rank_0.pt"
    damages = {
        "flipped": flipped(0.5)(whole),
        "truncated": whole[: len(whole) // 2],
        "empty": b"",
        "another rank's": (newest / other).read_bytes(),
        "of another step": (before / name).read_bytes(),
        "missing": None,
    }
    for damage, content in damages.items():
        if content is None:
            (newest / name).unlink()
        else:
            (newest / name).write_bytes(content)
        found = newest_intact(begun, told.append)
        assert found is not None, damage
        if (damage, name) == ("of another step", MANIFEST):
            assert any("rank_" in sentence for sentence in told)
        assert found.folder == before, damage
        assert str(newest) in told[-1], damage
        (newest / name).write_bytes(whole)
    found = newest_intact(begun, told.append)
    assert found is not None
    assert found.folder == newest


class Planted:
    """An object whose unpickling executes code."""

    ran: list[str] = []

    def __reduce__(self) -> Any:
        return eval, ("__import__('tests.framework.checkpoints.test_shared_checkpoints', fromlist=['x']).ran()",)


def ran() -> None:
    Planted.ran.append("executed")


@pytest.mark.guarantee("damage-is-detected")
@pytest.mark.parametrize("name", FILES[1:])
def test_planted_pickle_is_never_executed(name, begun):
    """Loading raises DamagedCheckpointError, even if the manifest has the digests of the planted file."""
    newest = next(checkpoint_folders(begun))
    for data in (pickle.dumps(Planted()), as_torch_file(begun / "planted.pt")):
        (newest / name).write_bytes(data)
        with pytest.raises(DamagedCheckpointError, match=name):
            read_content(open_checkpoint(newest))
        sign(newest, name)  # even with the right digests
        with pytest.raises(DamagedCheckpointError, match=f"{name} cannot be loaded"):
            read_content(open_checkpoint(newest))
    pickle.loads(pickle.dumps(Planted()))
    assert Planted.ran.pop() == "executed"
    assert not Planted.ran


def as_torch_file(path: Path) -> bytes:
    torch.save({"plain": Planted(), "own": [], "pieces": {}}, path)
    return path.read_bytes()


def sign(folder: Path, name: str) -> None:
    """Write the digest of a file's current content into the manifest."""
    import xxhash

    manifest = json.loads((folder / MANIFEST).read_text())
    data = (folder / name).read_bytes()
    manifest["files"][name] = {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
    del manifest["digest"]
    (folder / MANIFEST).write_text(json.dumps(with_checksum(manifest)))


# Refusals


def test_exact_resume_rejects_another_world_size(runs, tmp_path):
    """The error gives both numbers of processes, and no final weights are written."""
    with pytest.raises(UsageError, match=r"exact: .* processes: 3 before, 1 now"):
        resume(runs / "begun by 3, ddp", tmp_path / "run", None, exact=True)
    assert not list((tmp_path / "run" / RUN).glob("*_final.pt"))


REFUSALS = {
    "one process": "was written by one process; resume it with one, without torchrun",
    "exact": "exact: .* processes: 3 before, 2 now",
    "rate": "lr differs between the ranks: 0.01 on rank 0, 0.02 on rank 1; start all ranks with the same settings",
    "hooks": "The configuration of the hooks differs between the ranks",
    "locked": "another process|is written by process|locked",
    "unshared": "Process 1 cannot write to .*; checkpoints of several processes need an output folder that all of them",
    "folder": "already holds a finished run, which is left unchanged",
}


@pytest.mark.guarantee("ranks-agree")
def test_refusals_are_identical_on_all_ranks(runs):
    """Every rank raises the same message, and nothing is written."""
    told = [torch.load(runs / "said by_two_again" / f"{rank}.pt") for rank in range(2)]
    assert told[0] == told[1]
    for name, sentence in REFUSALS.items():
        assert re.search(sentence, told[0][name]), (name, told[0][name])
    left = [path for path in runs.glob(f"no run */{RUN}/*") if "checkpoints" not in path.parts and "begun" in str(path)]
    assert not left
    assert not [*runs.glob("no run [345]/*/*/*"), *(runs / "locked" / RUN).glob("*.jsonl")]


@pytest.mark.guarantee("ranks-agree")
def test_full_disk_on_one_rank_skips_one_checkpoint(runs):
    """Every rank reports the error, training continues, and the record is unchanged."""
    sentence = r"step_000000002 could not be written: No space left on device. \[rank 1\] Training continues"
    for rank in range(3):
        (told,) = torch.load(runs / "said by_three" / f"{rank}.pt")["disk"]
        assert re.search(sentence, told)
    steps = [int(path.name[5:]) for path in checkpoint_folders(runs / "full disk" / RUN / "checkpoints")]
    assert min(steps) > 2
    assert rows(runs / "full disk") == rows(runs / "3, fsdp")
