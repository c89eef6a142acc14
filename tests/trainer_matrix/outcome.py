"""The outcome of a row: the comparison of its bare training with the one that has hooks, each in a fresh process."""

import json
import multiprocessing
import os
import socket
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.trainer_matrix.one_training import run
from tests.trainer_matrix.row import Row

TIMEOUT = 900
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "WANDB_MODE": "disabled",
}
MOST_NAMES = 3


@dataclass(frozen=True)
class Outcome:
    """The result of a row, of one of these kinds.

    ``equal``, ``refused``, ``differs``, ``fails``, ``hook fails`` and ``not installed``.
    """

    row: Row
    kind: str
    text: str = ""
    steps: int = 0
    hooks: int = 0
    recorded: int = 0
    """The newest step of the records, under ``loopscope watch``."""

    @property
    def is_accepted(self) -> bool:
        """Whether the result is one that the row may have."""
        if self.row.control:
            return self.kind == "differs"
        return self.kind in {"equal", "not installed"}

    @property
    def sentence(self) -> str:
        """The kind and its text."""
        if self.row.control and self.is_accepted:
            return f"differs, as it must: {self.text}"
        return f"{self.kind}: {self.text}" if self.text else self.kind


def outcome(row: Row) -> Outcome:
    """Train a row bare and with hooks, and compare the digests of every step on every rank."""
    if row.absent:
        return Outcome(row, "not installed", ", ".join(row.absent))
    with TemporaryDirectory() as folder:
        bare = trainings(row, Path(folder, "bare"), "bare")
        if errors := [result["error"] for result in bare if result["error"]]:
            return Outcome(row, "fails", f"without hooks: {errors[0]}")
        hooked = trainings(row, Path(folder, "hooks"), "hooks", on_hook_error="raise")
        failures = [result["error"] for result in hooked if result["error"].startswith("HookError")]
        if not failures:
            return compared(row, bare, hooked)
        rest = compared(row, bare, trainings(row, Path(folder, "skip"), "hooks", on_hook_error="skip"))
        return replace(rest, kind="hook fails", text=f"{failures[0]} Without it: {rest.sentence}")


def trainings(row: Row, folder: Path, form: str, **options: str) -> list[dict[str, Any]]:
    """Train a row in one process for each rank, and return their results."""
    port, processes = free_port() if row.ranks > 1 else 0, []
    for rank in range(row.ranks):
        own = folder / str(rank)
        own.mkdir(parents=True)
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(row.ranks), "MASTER_PORT": str(port)}
        inputs = (row.name, own, form, options, place | {"MASTER_ADDR": "127.0.0.1"} if row.ranks > 1 else {})
        processes.append(server().Process(target=run, args=inputs))
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT)
        process.kill()
        process.join()
    return [result_of(folder / str(rank), process.exitcode) for rank, process in enumerate(processes)]


@cache
def server() -> Any:
    """Return the context of a fork server that has imported the libraries and run nothing."""
    os.environ.update(ENVIRONMENT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.trainer_matrix.preloaded"])
    return context


def free_port() -> int:
    """Return a port of this host that is not in use."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def result_of(folder: Path, status: int | None) -> dict[str, Any]:
    """Return the result of a process, or an error with the end of its output if it has written none."""
    try:
        result: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        lines = (folder / "output.txt").read_text(encoding="utf-8", errors="replace").splitlines()
        return {"steps": [], "error": f"exit status {status}: {' '.join(lines[-3:])}", "is_refused": False}
    return result


def compared(row: Row, bare: list[dict[str, Any]], hooked: list[dict[str, Any]]) -> Outcome:
    """Compare the digests of two trainings; the last ones are those after the training."""
    hooks, steps = len({name for result in hooked for name in result.get("hooks", ())}), len(bare[0]["steps"]) - 1
    if errors := [result for result in hooked if result["error"]]:
        reached = len(errors[0]["steps"])
        kind = "refused" if errors[0]["is_refused"] and not reached else "fails"
        text = errors[0]["error"] if not reached else f"after step {reached}: {errors[0]['error']}"
        return Outcome(row, kind, text, steps, hooks)
    for one, other in zip(bare, hooked, strict=True):
        if difference := first_difference(one["steps"], other["steps"]):
            return Outcome(row, "differs", difference, steps, hooks)
    if not steps or not hooks:
        return Outcome(row, "fails", "no step was taken" if not steps else "no hook has reported", steps, hooks)
    return Outcome(row, "equal", "", steps, hooks)


def first_difference(bare: list[dict[str, str]], hooked: list[dict[str, str]]) -> str:
    """Describe the first step at which digests differ; return an empty text if all are equal."""
    for step, (one, other) in enumerate(zip(bare, hooked, strict=False), start=1):
        names = [name for name in one | other if one.get(name) != other.get(name)]
        if names:
            place = "after the training" if step == len(bare) else f"at step {step}"
            more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
            return f"{place}: {', '.join(names[:MOST_NAMES])}{more}"
    return "" if len(bare) == len(hooked) else f"{len(hooked) - 1} steps instead of {len(bare) - 1}"
