"""Runs of ``loopscope`` in separate processes that are killed at a chosen moment, and a comparison of their files."""

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from loopscope import experiments, sinks, training_hooks
from loopscope.checkpoints import Checkpointing, checkpoint_folders, open_checkpoint
from loopscope.cli import main
from loopscope.hooks import ExperimentRegistry, HookPoint, HookRegistry, TrainingHook
from torch import Tensor

from tests.framework.runs.small_experiment import Small, SmallSteps, read_json
from tests.support.processes import fork_server

FILLED = (experiments, sinks, training_hooks)
BOTH_SINKS = ("--hook-csv", "--hook-jsonl", "--no-console-output")


# Places at which a process is killed


@dataclass(frozen=True)
class Place:
    """A function of the product, ``module:Class.name``, and the time of the kill: before, after, or half way (half)."""

    target: str
    when: str = "before"


PLACES = {
    "state half written": Place("loopscope.checkpoints.format:_DigestingFile.write", "half"),
    "before a file is forced onto the disk": Place("os:fsync"),
    "after a file was forced onto the disk": Place("os:fsync", "after"),
    "before a checkpoint gets its name": Place("pathlib:Path.rename"),
    "after a checkpoint got its name": Place("pathlib:Path.rename", "after"),
    "an old checkpoint half removed": Place("shutil:rmtree", "half"),
    "an old checkpoint set aside": Place("loopscope.checkpoints.writer:set_aside", "after"),
    "the loop copying its state": Place("loopscope.checkpoints.content:RunState.take"),
    "a row half written": Place("loopscope.sinks.run_file:FileSink._write", "half"),
    "before sinks are flushed": Place("loopscope.sinks.run_file:FileSink.flush"),
    "step metrics on their way to sinks": Place("loopscope.engine.metric_delivery:MetricDelivery._flush_steps"),
    "an intervention before it is rolled back": Place("loopscope.isolation.gate:Isolation._roll_back"),
    "an intervention rolled back": Place("loopscope.isolation.guardian:StateCopy.restore", "after"),
    "a commit before it is applied": Place("loopscope.engine.commits:CommitRecord.apply"),
    "a commit applied": Place("loopscope.engine.commits:CommitRecord.apply", "after"),
    "before an optimizer's step": Place("loopscope.training.train_step:update"),
    "after an optimizer's step": Place("loopscope.loops:update", "after"),
    "an evaluation": Place("loopscope.engine.manager:HookManager.run_isolated"),
    "the start of hooks": Place("loopscope.engine.manager:HookManager.start_hooks", "after"),
    "the configuration half written": Place("loopscope.runs.run_folder:RunFolder.write_record"),
    "sinks resuming": Place("loopscope.engine.metric_delivery:MetricDelivery.start", "after"),
    "a whole file before it gets its name": Place("pathlib:Path.replace"),
    "the end of hooks and sinks": Place("loopscope.engine.manager:HookManager.end", "after"),
    "before the final weights": Place("loopscope.runs.run_folder:RunFolder.write_weights"),
    "between strategies": Place("loopscope.runs.run_folder:RunFolder.write_summary", "after"),
}


@dataclass(frozen=True)
class Kill:
    """SIGKILL when a place is reached for the ``count``-th time in a process."""

    place: str
    count: int = 1


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _half_of_bytes(function: Callable[..., Any], file: Any, data: Any, /, **options: Any) -> None:
    function(file, data[: len(data) // 2], **options)
    if hasattr(file, "flush"):
        file.flush()


def _half_of_a_folder(function: Callable[..., Any], path: Path, **options: Any) -> None:
    for file in sorted(path.iterdir())[:1] if path.is_dir() else ():
        file.unlink()


HALVES = {"write": _half_of_bytes, "_write": _half_of_bytes, "rmtree": _half_of_a_folder}


def watch(place: str, counts: dict[str, int], kill: Kill | None) -> None:
    """Count the calls of a place, and kill the process at the call that ``kill`` selects."""
    module, _, path = PLACES[place].target.partition(":")
    *owners, name = path.split(".")
    owner = import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    function, when = getattr(owner, name), PLACES[place].when

    def watched(*arguments: Any, **options: Any) -> Any:
        counts[place] = counts.get(place, 0) + 1
        dies = kill == Kill(place, counts[place])
        if dies and when != "after":
            if when == "half":
                HALVES[name](function, *arguments, **options)
            _die()
        try:
            return function(*arguments, **options)
        finally:
            if dies:
                _die()

    setattr(owner, name, watched)


# The command in its process


class Stumbling(TrainingHook):
    """Counts its steps, and raises at one of them."""

    name = "stumbling"
    hook_points = {HookPoint.POST_STEP}

    def __init__(self, *, at: int = 1_000) -> None:
        self.at = at
        self.steps = 0

    def compute(self, ctx: Any) -> dict[str, float]:
        self.steps += 1
        if ctx.step == self.at:
            raise ValueError("stumbled")
        return {"steps": self.steps}

    def reset(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]

    def describe_metrics(self) -> list[Any]:
        return []


def patiently(take: Callable[..., None]) -> Callable[..., None]:
    """Let the loop wait for a slow disk, so that all runs write the same checkpoints."""

    def patient(checkpointing: Checkpointing, *, wait: bool) -> None:
        checkpointing.writer.wait()
        take(checkpointing, wait=wait)

    return patient


def _child(words: Sequence[str], log: Path, kill: Kill | None, counted: Path) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # SIGINT is ignored if the tests run in the background
    for entry in (Small, SmallSteps):
        ExperimentRegistry.register(entry)
    HookRegistry.register(Stumbling)
    with log.open("a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    counts: dict[str, int] = {}
    for place in PLACES:
        watch(place, counts, kill)
    Checkpointing.take = patiently(Checkpointing.take)
    status = main(words)
    counted.write_text(json.dumps(counts))
    sys.exit(status)


def start(words: Sequence[str], log: Path, kill: Kill | None = None) -> multiprocessing.Process:
    """Start ``loopscope WORDS`` in a new process and process group, with its output in ``log``.

    The process is forked from a server that has imported everything.
    """
    process = fork_server().Process(target=_child, args=([*words], log, kill, log.with_suffix(".counts")), daemon=True)
    process.start()
    return process


def run(words: Sequence[str], log: Path, kill: Kill | None = None) -> int:
    """Run ``loopscope WORDS`` to its end and return its exit status, -9 after a kill."""
    process = start(words, log, kill)
    process.join(300)
    status = process.exitcode
    assert status is not None, f"{words} did not end; its output: {log.read_text()}"
    return status


# Files of a finished run


@dataclass
class Outcome:
    """Files and values of a finished run, by name, in a form that compares bit for bit."""

    files: dict[str, bytes] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def differing_entries(self, other: "Outcome") -> list[str]:
        """Return the names of the files and values that differ."""
        pairs = ((self.files, other.files), (self.values, other.values))
        return [name for a, b in pairs for name in {**a, **b} if a.get(name, "nothing") != b.get(name, "nothing")]


OWN_TIMES = ("run.lock", "files.json")
"""Files with the times of a run; the manifest has those of the other files, and digests of a summary with times."""


def outcome(folder: Path) -> Outcome:
    """Read everything below ``folder`` that two equal runs have in common.

    Only the newest checkpoint counts, and leftovers of incomplete ones. A process that is killed right after its last
    checkpoint leaves one older checkpoint more, and one that is killed at its very end leaves its lock.
    """
    result = Outcome()
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name == "summary.json":
            result.values |= dict(leaves(_numbers(read_json(path)), name))
        elif path.name == "experiment_config.json":
            content = read_json(path)
            result.values |= dict(leaves({key: content[key] for key in ("hooks", "treatments", "data")}, name))
        elif path.parent.name == "checkpoints":
            if path == next(checkpoint_folders(path.parent), None):
                result.values |= dict(leaves(open_checkpoint(path).content(), name))
            elif path.suffix:
                result.files[name] = b"left by a crash"
        elif path.parent.parent.name != "checkpoints" and path.is_file() and path.name not in OWN_TIMES:
            result.files[name] = path.read_bytes()
    return result


def _numbers(summary: dict[str, Any]) -> dict[str, Any]:
    """Return a summary without its times, its memory and its folder, which differ between equal runs."""
    costs = ("seconds", "steps_per_second", "step_time", "peak_memory")
    return {key: value for key, value in summary.items() if key not in (*costs, "output_dir")}


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield nested values in a form that is equal only for equal types, shapes and bytes."""
    if isinstance(value, Mapping):
        yield f"{path} {{}}", [str(key) for key in value]
        for key, item in value.items():
            yield from leaves(item, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        yield f"{path} []", (type(value).__name__, len(value))
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}/{index}")
    elif isinstance(value, Tensor):
        bits = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        yield path, (str(value.dtype), tuple(value.shape), bits)
    else:
        yield path, (type(value).__name__, value.hex() if isinstance(value, float) else value)


@dataclass(frozen=True)
class Case:
    """A command, its outcome without a kill, and the ``counts`` of calls of each place."""

    words: Sequence[str]
    expected: Outcome
    counts: Mapping[str, int]

    @classmethod
    def of(cls, words: Sequence[str], folder: Path) -> "Case":
        """Run the command without a kill in ``folder``."""
        words, log = [*words, *BOTH_SINKS], folder.with_suffix(".log")
        assert run(["run", *words, "--output-dir", str(folder)], log) == 0, log.read_text()
        return cls(words, outcome(folder), read_json(log.with_suffix(".counts")))

    def killed(self, folder: Path, kills: Sequence[Kill], *, by_folder: bool = False) -> int:
        """Run the command, kill it at each of ``kills`` and resume it, to its end; return the number of kills.

        With ``by_folder`` it is resumed by ``loopscope resume RUN``, else by the command with ``--resume``.
        """
        log = folder.with_suffix(".log")
        for died, kill in enumerate([*kills, None]):
            words = ["run", *self.words, "--output-dir", str(folder), *["--resume"] * bool(died)]
            configs = sorted(folder.glob("*/*/experiment_config.json"))
            if by_folder and configs:
                words = ["resume", str(configs[-1].parent)]
            status = run(words, log, kill)
            if status == 0:
                return died
            assert status == -signal.SIGKILL, log.read_text()
        raise AssertionError(f"{words} does not end.")
