"""Runs of several processes with randomly killed ranks end with the bytes and rows of the uninterrupted run."""

import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from loopscope.checkpoints import checkpoint_folders, differing_entries, open_checkpoint, read_content

from tests.framework.cli.test_torchrun import SMALL, torchrun, trained, weights_in

LONG = (*SMALL, "--max-epochs", "8", "--optimizer", "adamw", "--snapshot-every", "3", "--checkpoint-every-steps", "4")
FEW = ("--with-hooks", "none", "--hook-csv", "--hooks", "variance", "path_length", "weight_average", "counterfactual")
MANY = ("--with-hooks", "full", "--hook-csv", "--hooks", "lr_probe", "model_smoothing")
RESTARTS = ("--standalone", "--monitor-interval", "0.1", "--max-restarts")


def workers(agent: int) -> list[int]:
    """Return the processes that torchrun has started."""
    try:
        return [int(child) for child in Path(f"/proc/{agent}/task/{agent}/children").read_text().split()]
    except FileNotFoundError:
        return []


def newest(folder: Path) -> str:
    return max((path.name for path in folder.glob("*/*/checkpoints/step_*")), default="")


def killed(folder: Path, count: int, words: Sequence[str], kills: int, chance: random.Random) -> int:
    """Train while random processes are killed, each some time after the first checkpoint of an attempt."""
    process = torchrun(folder, count, *words, launcher=(*RESTARTS, str(kills)))
    done = 0
    while done < kills and process.poll() is None:
        before, began = newest(folder), workers(process.pid)
        while process.poll() is None and newest(folder) <= before:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.5))
        if len(running := workers(process.pid)) == count:
            os.kill(chance.choice(running), signal.SIGKILL)
            done += 1
            while process.poll() is None and set(workers(process.pid)) & set(began):
                time.sleep(0.01)
    trained(process)
    return done


def assert_same(ours: Path, expected: Path) -> None:
    for name, value in weights_in(expected).items():
        assert torch.equal(weights_in(ours)[name], value), name
    for kind in ("jsonl", "csv"):
        (path,) = expected.glob(f"*/*/stride.{kind}")
        assert (ours / path.relative_to(expected)).read_bytes() == path.read_bytes(), kind
    contents = [read_content(open_checkpoint(find_checkpoint(folder))) for folder in (ours, expected)]
    for part in ("state", "hooks", "metrics"):
        assert differing_entries(*({"state": content[part]} for content in contents)) == []


def find_checkpoint(folder: Path) -> Path:
    (checkpoints,) = folder.glob("*/*/checkpoints")
    return next(checkpoint_folders(checkpoints))


def crash(folder: Path, kind: str, count: int, kills: int, hooks: Any) -> None:
    chance, words = random.Random(f"{kind} {kills}"), (*LONG, *hooks, "--parallel", kind)
    trained(torchrun(folder / "whole", count, *words))
    assert killed(folder / "killed", count, words, kills, chance) == kills
    assert_same(folder / "killed", folder / "whole")


@pytest.mark.guarantee("resumed-runs-are-identical")
@pytest.mark.ranks
@pytest.mark.slow
def test_killed_rank_leaves_no_trace(tmp_path):
    """After one kill and restart, weights, rows and checkpoint match those of the uninterrupted run."""
    crash(tmp_path, "ddp", 2, 1, FEW)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("ddp", 2), ("fsdp", 3), ("tp", 2), ("fsdp+tp", 4)])
def test_twenty_kills_leave_no_trace_with_interventions(kind, count, tmp_path):
    crash(tmp_path, kind, count, 20 if kind == "fsdp" else 5, MANY)
