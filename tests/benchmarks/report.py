"""Writes the table, what it was measured on and how."""

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from tests.benchmarks.rows import COLUMNS, Row

HEADING = """# Benchmarks

What loopscope costs, against the same work written without it. This page is written by `make bench`.

"""

METHOD = """
## How this is measured

- What is compared runs in one process, on one thread, in turn: A B A B. *Measured* is the median over blocks of the
  difference (or ratio) of two neighbours, *Best* the difference (or ratio) of the two fastest blocks, *Noise* the
  interquartile range over blocks. *Result* judges the median; where the bar lies within the noise, measure again on a
  quiet machine. Time is CPU time of the process.
- *Loop.* `epoch_loop` and a loop written bare train one model in turn, step by step: gathering the batch, `zero_grad`,
  loss, backward, the running loss, `optimizer.step`. A block is an epoch, its value the median over its steps, plus the
  epoch's end (where step metrics are flushed) shared out over the steps. There is no evaluation. The rows with hooks
  contain what the loop costs without them. *Own time* leaves out what is inside `zero_grad`, forward, backward and
  `optimizer.step`, whose noise hides microseconds.
- *Fires.* `HookManager.fire` against calling the hooks' `compute`, after every step of a real run. A warm block is
  20 fires; of the first fire after a step, code and data come from memory, not from the cache.
- *Why fires cost what they cost.* A complete sweep reads a version and a data pointer of every tensor of the training
  state, through Python, once as the baseline and once as the check: that is most of a warm fire. After a training step
  the tensors, the generators and the code have left the caches, and the same reads cost about twice as much. What is
  due on every n-th step only (`step_schedule`) costs the n-th part of it.
- *Guardian.* `Snapshot.save` and `restore` against `torch._foreach_copy_` of all tensors of the training state into
  buffers and back, each after a training step of its own, so that gradients and batch are new.
  *clone + load_state_dict* clones weights and gradients, copies the optimizer's state dict deeply and loads both.
- *Bytes copied* are counted by a dispatch mode around a fire.
- *Hooks at the end of epochs.* All observers that fire between epochs only, in one run: the time of each fire at
  POST_EPOCH, against an epoch without it.
- *Groups, counterfactuals.* Whole runs of the experiment's strategy `stride` as `loopscope run` makes them, evaluations
  included, without console and files of metrics, in turn with bare ones; the reference solution is that of one epoch.
  Wall-clock time of the loop. What `full` may cost is what its own passes through the model, which `summary.json`
  counts in samples, cost at the rate of the bare run's steps; a Hessian-vector product counts as three forward-backward
  passes (two, if the graph of the gradient was there), a forward pass as a third.
- *Sinks.* `emit` under four loads, each emit written to the operating system before it returns, as the sinks promise
  for a killed process (only a flush forces a file onto the disk). Of lists and series every number counts as a scalar.
  Beside it the same numbers through Lightning's `CSVLogger` with its defaults (it writes every 100 rows; saved at the
  end of a block) and `torch.utils.tensorboard.SummaryWriter.add_scalar` (flushed at the end of a block, its thread
  counted), in the same turns; both come with `pip install 'loopscope[bench]'`, and rows are left out without them.
- *Displays.* Epochs of the quick preset with `training_metrics`, on one model, with a display on a pseudo terminal of
  120x40 that another process reads, and in turn without any; no evaluation. Half a second passes in about two epochs,
  so most of those with a display contain a drawing. *Own time* is what is spent inside the display.
- *Each hook.* From one run of 20 epochs with all of them and `--profile-hooks`: mean wall-clock time of a call, streams
  and checks included. What the loop computes for hooks (the mean gradient, the norm of every step) is in none of them.
- *Smoothing.* `ModelSmoother.smooth` against one `torch._foreach_lerp_` of the parameters and as many buffers, caches
  emptied before each. A smoothing writes both, so it moves 4/3 of the bytes at least. torch has no operation that
  writes two results, so each block is blended and then copied back from the cache: the copy is the rest of the cost.
- *Checks of gradients and updates.* The language model trains in the real loop with `weight_updates` at every other
  step: the cost is that of its two fires, the manager's own work included, in steps without them; beside it, by how
  much a checked step is longer than its unchecked neighbour, caches and all. At every 100th step it is computed from a
  due fire and 99 idle ones. Full clones: a clone of every parameter before the step, and the same norms, maxima and
  means one at a time; the checks by the plain class, a training step before each.
- *Tied embeddings.* The quick preset of `tied_lm` in the real loop, the hook at every other step: its fire and the
  functions on the two gradients, the manager's work included, in steps without it; beside it, by how much a step with
  the hook is longer than the next one without. Peak memory is that of all tensors together, from each allocation and
  release that torch's profiler notes, on a model with a matrix of 20 MB, in float32; the loop without hooks takes as
  much in the moment when autograd adds the two gradients up. Tokens per second: the experiment's loop and one written
  by hand, windows drawn by hand too, the same in both, take steps of one model in turn. Start: the CPU time of a
  process from its beginning to the end of the first optimizer step of the first strategy, the tokenizer's training and
  the evaluation before that step included.
- *Epochs begun in their middle.* `next(loader.batches(0, start))`, late and early starts in turn, epochs of 100,010
  batches of 4 rows: the time until the batch is there, the order of the epoch drawn anew included.
- *Casts to narrow formats.* In a process of its own, on two threads, in wall-clock time. The plain pass reads as many
  bytes and writes them into a new tensor, as the cast does; memory that is freed stays with the process (`mallopt`), or
  new pages would cost more than anything else. *Scales given* leaves out the pass that finds the largest magnitudes.
- *Overflow of narrow formats.* What if: the hook's own time at every other step, against the steps between, shared out
  over 100. Counting: by how much a step whose casts are counted is longer than the next one, whose are not, caches and
  all; *one step in 4* is a quarter of that, not a run of its own.
- *Memory.* Each kind of run in its own process: the largest resident memory, and the storages of all tensors that
  Python's garbage collector reaches after a step, both less those of the bare loop, in copies of the training state.
  The bars leave 5 % for what the allocator rounds, and 1 % for what the loop keeps beside the training state.
- *Checkpoints.* The paper preset's model in the real loop. *Loop blocked* is the CPU time of the thread that trains.
  The cost is the wall-clock time of six steps, at the first of which a checkpoint is taken and during which it is
  written, less that of the six steps before, shared out over 100; below it what both threads need if nothing runs side
  by side. Resuming is the CPU time of a process up to its first step.
"""


def page(rows: Mapping[str, Sequence[Row]]) -> str:
    """Return the text of docs/benchmarks.md."""
    tables = [f"## {title}\n\n{table(part)}\n" for title, part in rows.items()]
    return HEADING + environment() + "\n\n" + "\n".join(tables) + METHOD


def environment() -> str:
    """Say what the numbers were measured on."""
    return (
        f"Measured on {processor()}, {os.cpu_count()} cores, with Python {platform.python_version()}, "
        f"torch {torch.__version__}, {torch.get_num_threads()} thread."
    )


def processor() -> str:
    """Return the name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def table(rows: Iterable[Row]) -> str:
    """Return rows as a Markdown table, numbers to the right."""
    cells = [COLUMNS, *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(_padded(row, widths)) + " |" for row in cells]
    rule = ["-" * width if index not in NUMBERS else "-" * (width - 1) + ":" for index, width in enumerate(widths)]
    return "\n".join([lines[0], "| " + " | ".join(rule) + " |", *lines[1:]])


NUMBERS = range(2, 6)


def _padded(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    sized = enumerate(zip(row, widths, strict=True))
    return [text.rjust(width) if index in NUMBERS else text.ljust(width) for index, (text, width) in sized]


def misses(rows: Mapping[str, Sequence[Row]]) -> str:
    """Say how many bars were met."""
    judged = [row for part in rows.values() for row in part if row.result]
    missed = [row.figure for row in judged if row.result == "miss"]
    return f"{len(judged) - len(missed)} of {len(judged)} bars met" + (
        f"; missed: {', '.join(missed)}" if missed else ""
    )
