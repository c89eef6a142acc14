"""``torchrun -m loopscope run EXPERIMENT --parallel KIND``: several processes match one, and one of them writes."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from loopscope import experiments, sinks, training_hooks
from loopscope.cli import main
from loopscope.data import RowsOfRank, TensorLoader, fixed_order
from loopscope.errors import InvalidExperimentError, UsageError
from loopscope.runs import RunOptions
from loopscope.training import joined_process_group

from tests.framework.runs.test_rewinding import assert_the_same

FILLED = (experiments, sinks, training_hooks)  # the registries
SMALL = (
    *("mod_arithmetic", "--preset", "quick", "--strategy", "stride", "--max-epochs", "2", "--train-size", "325"),
    *("--test-size", "320", "--embed-dim", "16", "--ff-dim", "32", "--optimizer", "sgd", "--lr", "0.05"),
    *("--eval-every", "1"),
)
TEXT = (
    *("tied_lm", "--strategy", "baseline", "--steps", "3", "--vocabulary", "300", "--context", "16", "--width", "24"),
    *("--layers", "2", "--heads", "6", "--batch-size", "10", "--sample-tokens", "4"),
    *("--lr", "1e-4", "--min-lr", "1e-5", "--with-hooks", "none"),
)
NARROW = ("lowbit_lm", "--strategy", "fp32", *TEXT[3:])
CLOSE = {"rtol": 1e-4, "atol": 2e-6}  # tolerance of float32 weights after few steps


def loopscope(folder: Path, words: Sequence[str]) -> None:
    assert main(["run", *words, "--output-dir", str(folder), "--no-console-output"]) == 0


def torchrun(folder: Path, count: int, *words: str, launcher: tuple[str, ...] = ("--standalone",)) -> Any:
    return started(count, "run", *words, "--output-dir", str(folder), launcher=launcher)


def started(count: int, *words: str, launcher: tuple[str, ...] = ("--standalone",)) -> Any:
    """Start ``loopscope WORDS`` in several processes."""
    command = [sys.executable, "-m", "torch.distributed.run", *launcher, "--nproc-per-node", str(count)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "-m", "loopscope", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


def trained(process: Any) -> str:
    try:
        out, error = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # otherwise its ranks continue
        raise
    assert process.returncode == 0, error[-3000:]
    return str(out)


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    (path,) = folder.glob("*/*/*_final.pt")
    return torch.load(path)


def record_in(folder: Path) -> list[dict[str, Any]]:
    (path,) = [path for path in folder.glob("*/*/*.jsonl") if path.name not in ("alerts.jsonl", "digests.jsonl")]
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbers_in(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number of a line of the record, with its path."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from numbers_in(part, f"{name}/{key}")
    if isinstance(value, (int, float)):
        yield name, value


def assert_alike(alone: Path, together: Path) -> None:
    ours, expected = weights_in(together), weights_in(alone)
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, **CLOSE, msg=name)
    for line, expected_line in zip(record_in(together), record_in(alone), strict=True):
        numbers, expected_numbers = dict(numbers_in(line)), dict(numbers_in(expected_line))
        assert numbers == pytest.approx(expected_numbers, rel=1e-4, abs=1e-6, nan_ok=True)


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ddp_processes_match_one_process(tmp_path):
    """Weights and records agree within tolerance, the results are printed once, and the run folders hold the same
    files."""
    process = torchrun(tmp_path / "two", 2, *SMALL, "--parallel", "ddp")
    loopscope(tmp_path / "one", SMALL)
    out = trained(process)
    assert_alike(tmp_path / "one", tmp_path / "two")
    assert out.count("Results: ") == 1
    names = [sorted(path.name for path in (tmp_path / name).glob("*/*/*")) for name in ("one", "two")]
    assert names[0] == names[1]


@pytest.mark.slow
@pytest.mark.parametrize("words", [SMALL, TEXT, NARROW], ids=lambda words: words[0])
@pytest.mark.parametrize(("kind", "count"), [("ddp", 3), ("fsdp", 3), ("tp", 2), ("fsdp+tp", 4)])
def test_every_parallel_kind_matches_one_process(kind, count, words, tmp_path):
    """Weights and records of every experiment agree within tolerance; tied_lm is refused for kinds with fsdp."""
    if words is TEXT and "fsdp" in kind:
        process = torchrun(tmp_path / "run", count, *words, "--parallel", kind)
        _, error = process.communicate(timeout=240)
        assert error.count("Hook 'embedding_provenance'") == 1, error  # a part of the experiment
        assert "fully_shard" in error
        return
    loopscope(tmp_path / "one", words)
    trained(torchrun(tmp_path / "all", count, *words, "--parallel", kind))
    assert_alike(tmp_path / "one", tmp_path / "all")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_parallel_rewind_matches_run_bit_for_bit(kind, tmp_path):
    """Three ranks repeat the run from a checkpoint, and also from the start with other hooks."""
    hooks = ("--hooks", "norms", "path_length", "variance", "counterfactual", "--variance.window", "2")
    words = (*SMALL, "--parallel", kind, "--digest-every", "1", "--checkpoint-every-steps", "4", "--with-hooks", "none")
    for name, more in (("bare", ()), ("with hooks", hooks)):
        trained(torchrun(tmp_path / name, 3, *words, "--keep-checkpoints", "9", *more))
    bare, full = (tmp_path / name / "mod_arithmetic/stride" for name in ("bare", "with hooks"))
    last = json.loads((bare / "summary.json").read_text())["steps"]
    for begin, more in ((4, ()), (0, ("--from-start", *hooks))):
        stretch = ("--step", str(begin + 1), "--until", str(last))
        out = trained(started(3, "rewind", str(bare), *stretch, *more))
        assert f"Repeated the run from step {begin};" in out
        assert f"bit for bit, at steps {begin + 1}, {begin + 2}, {begin + 3}" in out
    assert_the_same(bare / f"rewinds/steps_1_to_{last}", full, 1, last)


@pytest.mark.slow
def test_two_nodes_train_together(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "7")
    words = (*SMALL, "--parallel", "ddp")
    nodes = [torchrun(tmp_path / "two", 1, *words, launcher=common) for _ in range(2)]
    outputs = [trained(node) for node in nodes]
    assert sorted(out.count("Results: ") for out in outputs) == [0, 1]
    loopscope(tmp_path / "one", SMALL)
    assert_alike(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_refused_launch_reports_once_and_writes_nothing(tmp_path):
    """The error appears once for both ranks, the ranks exit with status 2, and no run folder is left."""
    for words, sentence in (
        (SMALL, "torchrun started 2 processes, but --parallel is missing, which says how they share the model; choose"),
        (
            (*NARROW[:2], "fp8", *NARROW[3:], "--parallel", "tp"),
            "--parallel tp splits layers, but the experiment defines no plan for this model",
        ),
    ):
        process = torchrun(tmp_path / "run", 2, *words)
        _, error = process.communicate(timeout=240)
        assert process.returncode == 1, error  # the exit status of torchrun
        assert error.count(sentence) == 1, error
        assert "exitcode  : 2" in error, error
        assert not list((tmp_path / "run").glob("*/*/*"))


def test_unsuitable_kind_or_world_size_is_refused(monkeypatch):
    """The errors name the command or option to use; exact=True without resume is refused as well."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UsageError, match=r"torchrun --nproc-per-node 2 SCRIPT"):
        joined_process_group("tp").__enter__()
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UsageError, match=r"choose ddp, fsdp, tp, fsdp\+tp, or start one process"):
        joined_process_group(None).__enter__()
    with pytest.raises(UsageError, match=r"needs a multiple of 2 processes, but torchrun started 3"):
        joined_process_group("fsdp+tp").__enter__()
    with pytest.raises(UsageError, match=r"exact applies only to a resumed run; add resume=True"):
        RunOptions(exact=True)


def test_rank_shares_concatenate_to_whole_batches():
    """The shares of all ranks keep the row order of one process; too few rows raise InvalidExperimentError."""
    rows = torch.arange(23)
    loader = TensorLoader((rows, rows * 2.0), 5, fixed_order(rows.flip(0)))
    for count in (1, 2, 3):
        shares = [RowsOfRank(loader, rank, count) for rank in range(count)]
        for batches in (
            lambda loader: loader.batches(0),
            lambda loader: loader.shuffled(1).batches(3),
            lambda loader: loader.batches(0, 2),
        ):
            for batch, *parts in zip(batches(loader), *map(batches, shares), strict=True):
                assert all(len(part[0]) for part in parts)
                for tensor, part_tensors in zip(batch, zip(*parts, strict=True), strict=True):
                    assert torch.equal(torch.cat(part_tensors), tensor)
    with pytest.raises(InvalidExperimentError, match="has 3 rows, too few for 4 ranks"):
        list(RowsOfRank(loader, 0, 4).batches(0))
