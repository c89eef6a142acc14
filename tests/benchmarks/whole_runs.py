"""What loopscope costs a user: whole commands with it and without it, from their start to their end."""

import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.benchmarks.rows import TIMES, Effort, Row, Unit
from tests.benchmarks.timing import Spread, ratio

EXAMPLES = Path(__file__).parents[2] / "docs/examples"
SCRIPTS = {
    "mlp": "an MLP of 32-128-128-10",
    "ppo": "PPO with two small networks",
    "gpt": "a GPT of 4 × 128",
    "cnn": "a CNN with batch normalisation",
    "gnn": "a graph network",
    "hugging_face": "HF's Trainer",
    "lightning_module": "Lightning's Trainer",
}
WATCH = [sys.executable, "-m", "loopscope", "watch"]
WANDB = (
    "import wandb\nwandb.init(mode='offline', project='benchmark', settings=wandb.Settings(silent=True))\n"
    "wandb.watch({model}, log='all', log_freq=10)\noptimizer = "
)
RUN = "run mod_arithmetic --preset quick --strategy stride --no-console-output --overwrite --epochs 20"
MEGABYTES = Unit("MB", 1e-6, 1)


class Cost(NamedTuple):
    """What a command took: seconds of wall-clock time, seconds of CPU time, peak bytes of memory, bytes of files."""

    wall: float
    cpu: float
    memory: float
    files: float


def whole_runs(effort: Effort) -> Iterator[Row]:
    """Compare unedited scripts with the same under ``loopscope watch``, and an experiment with groups of hooks."""
    names = SCRIPTS if effort.share > 0 else {"gnn": SCRIPTS["gnn"]}
    for name, title in names.items():
        text = _text(name)
        command = [sys.executable, "-c", text]
        arms = {"bare": command, "loopscope watch": [*WATCH, "--", *command]}
        if name in ("mlp", "gpt"):
            arms["loopscope watch --budget none"] = [*WATCH, "--budget", "none", "--", *command]
            arms["wandb.watch and wandb.log, offline"] = [sys.executable, "-c", _with_wandb(text)]
        yield from _rows(title, arms, effort)
    command = [sys.executable, "-m", "loopscope", *RUN.split()]
    groups = {f"--with-hooks {name}": [*command, "--with-hooks", name] for name in ("health", "observers")}
    yield from _rows("loopscope run", {"bare": [*command, "--with-hooks", "none"], **groups}, effort)


def _text(name: str) -> str:
    """Return a script; those of trainers are the examples of the documentation, unedited but for their epochs."""
    own = Path(__file__).parent / "scripts" / f"{name}.py"
    if own.exists():
        return own.read_text("utf-8")
    text = re.sub(r"^.*  # added\n", "", (EXAMPLES / f"{name}.py").read_text("utf-8"), flags=re.M)
    return re.sub(r"epochs=\d+", "epochs=40", text)


def _with_wandb(text: str) -> str:
    """Return a script that reports its loss, weights and gradients to W&B."""
    lines = text.replace("optimizer = ", WANDB.format(model="model"), 1).splitlines()
    for index, line in enumerate(lines):
        if line.strip() == "optimizer.step()":
            indent = line[: len(line) - len(line.lstrip())]
            lines[index] += f"\n{indent}wandb.log({{'loss': loss.item()}})"
    return "\n".join(lines)


def _rows(title: str, arms: Mapping[str, Sequence[str]], effort: Effort) -> Iterator[Row]:
    """Run the commands in turn, and compare each with the first."""
    costs: dict[str, list[Cost]] = {name: [] for name in arms}
    for index in range(effort.times(2)):
        order = list(arms.items())
        for name, command in order if index % 2 else reversed(order):
            costs[name].append(_cost(command))
    bare, *others = costs
    reference = costs[bare]
    for name in others:
        ours = costs[name]
        against = f"{title} alone, {Spread.of([cost.wall for cost in reference]).median:.1f} s"
        wall = ratio([cost.wall for cost in ours], [cost.wall for cost in reference])
        yield Row(f"{name}, time of the command", against, TIMES, wall)
        cpu = ratio([cost.cpu for cost in ours], [cost.cpu for cost in reference])
        yield Row(f"{name}, CPU time", against, TIMES, cpu)
        memory = ratio([cost.memory for cost in ours], [cost.memory for cost in reference])
        yield Row(f"{name}, peak memory", against, TIMES, memory)
        files = [cost.files - before.files for cost, before in zip(ours, reference, strict=True)]
        yield Row(f"{name}, files", against, MEGABYTES, Spread.of(files))


def _cost(command: Sequence[str]) -> Cost:
    """Run a command in an empty folder; raise an error with its output if it fails."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as output:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        begin = time.perf_counter()
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall = time.perf_counter() - begin
        if status:
            output.seek(0)
            raise RuntimeError(f"{' '.join(command)} ended with status {status}:\n{output.read()[-2000:]}")
        files = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        return Cost(wall, usage.ru_utime + usage.ru_stime, _bytes(usage), files)


def _bytes(usage: resource.struct_rusage) -> float:
    """Return the peak resident memory, which the kernel gives in kilobytes."""
    return usage.ru_maxrss * 1024.0
