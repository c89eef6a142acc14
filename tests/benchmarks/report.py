"""Writer of docs/data/benchmarks.txt, the measured tables, and of the page that the site makes of them."""

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import torch

from docs.dates import today
from tests.benchmarks.rows import Shown

SIDE_BY_SIDE = """\
One small model with the same batches and optimizer in other frameworks, without progress bars, logs and checkpoints:
the CPU time of a step minus that of a bare loop's step, ± half the interquartile range. *A callback of all events*
does nothing at each of them. *Three callbacks* read the loss, the learning rate and the norm of all gradients after
every step, and the framework logs them. The last two columns were measured: short trainings with dropout, compared bit
for bit with trainings without the callback. The write uses `.data`, after every step;
[guarantees](guarantees.md#observers-change-nothing) lists the calls in which a single write is not detected.
Composer is excluded, because it pins an older torch (0.32.1: below 2.7.1). The second table lists the costs of further
features, in each framework's own way, on the model of the quick preset.

"""
INTRODUCTIONS = {"Side by side": SIDE_BY_SIDE}
WITHOUT_ROWS = {
    "On a GPU": "Not run: the machine has no GPU. No machine of the project has run these benchmarks so far."
}

METHOD = """
## Method

- The compared runs share one process and one thread, in turn: A B A B. *Measured* is the median over blocks of the
  difference (or ratio) of two neighbours, *Best* the difference (or ratio) of the two fastest blocks, *Noise* the
  interquartile range over blocks. *Result* compares the median with the bar; if the bar is within the noise, measure
  again on a quiet machine. Time is CPU time of the process.
- *Side by side.* A framework iterates over batches in memory. Before it receives a batch, a bare loop (`zero_grad`,
  forward, backward, `optimizer.step`) takes the same step on a separate model: A B A B within one process. A block is
  an epoch, from its first batch to the first of the next, which includes the output between epochs. The first and the
  last epoch of a training are excluded, and the trainings of one framework alternate. loopscope's rows use `epoch_loop`
  with observers and a JSONL file. The cost of a feature is trainings with it minus trainings without it, both relative
  to the bare loop; here a block is the median over an epoch's steps. HF's Trainer computes the norm of all gradients
  anyway, so clipping adds little there. `make bench` installs the frameworks. fastai has a separate
  environment, made by `make fastai`, because it needs torchvision, which must match torch's build: the torchvision of
  PyPI, combined with a CPU-only torch, breaks the import of Lightning and transformers. `wandb.watch` runs offline;
  W&B's own process is not counted.
- *Loop.* `epoch_loop` and a plain hand-written loop train one model in turn, step by step: gathering the batch,
  `zero_grad`, loss, backward, the running loss, `optimizer.step`. A block is an epoch; its value is the median over its
  steps, plus the epoch's end (with the flush of step metrics) divided by the number of steps. There is no evaluation.
  The rows with hooks include the cost of the loop without them. *Own time* excludes the time inside `zero_grad`,
  forward, backward and `optimizer.step`, whose noise hides microseconds. The unit *two plain sweeps* is the time in
  which two list comprehensions read the version and the pointer of every tensor of the training state, twice, at the
  hook's position in the bare step.
- *Visits.* `HookManager.fire` against calling the hooks' `compute`, after every step of a real run. A warm block is
  20 visits; in the first visit after a step, code and data come from memory, not from the cache.
  *For each further tensor*: the growth of the median from one model of small layers to the next, divided by that of
  the number of tensors; equal rows show that the cost is linear. *Shipped observers* come with loopscope and share
  their quick check (docs/decisions/0035); the others are a user's, and each is checked alone.
- *Composition of a visit's cost.* A complete sweep reads the version and data pointer of every tensor of the
  training state, through Python, once as the baseline and once as the check, together with attributes, settings and
  generators: that is most of a warm visit. After a training step the caches contain neither these data nor the code,
  and the same work costs more than twice as much, above all Python functions (docs/decisions/0026). A hook that is due
  only on every n-th step (`step_schedule`) costs the n-th part.
- *Guardian.* `StateCopy.save` and `restore` against `torch._foreach_copy_` of all tensors of the training state into
  buffers and back, each after a separate training step, so that gradients and batch are new. *clone + load_state_dict*
  clones weights and gradients, deep-copies the optimizer's state dict and loads both. *FSDP2* is the same in each of
  three processes, with shards of a model of four times the parameters; the blocks are those of all three.
- *Bytes copied* are counted by a dispatch mode during `HookManager.fire`.
- *Hooks at the end of epochs.* All observers that are called only between epochs, in one run: the time of each visit
  at POST_EPOCH, against an epoch without it.
- *Groups, counterfactuals.* Whole runs of the experiment's strategy `stride` as `loopscope run` makes them, including
  evaluations but without console and metric files; the reference solution is that of one epoch. Groups: CPU time of the
  loop in processes that pause and continue in turn, half a second each, so that a slow minute of the machine affects
  all of them. Counterfactuals: whole runs in turn, wall-clock time. The bar for `full` is the cost of the hooks' passes
  through the model, which `summary.json` counts in samples, at the speed of the steps of six bare runs that alternate
  with it; a Hessian-vector product counts as three forward-backward passes (two, if the graph of the gradient already
  existed), a forward pass as a third of one.
- *Sinks.* `emit` under four loads, each emit written to the operating system before it returns, as the sinks guarantee
  for a killed process (only a flush forces a file onto the disk). Every number of a list or series counts as a scalar.
  In turn, the same numbers go through Lightning's `CSVLogger` with its defaults (it writes every 100 rows; saved at the
  end of a block) and `torch.utils.tensorboard.SummaryWriter.add_scalar` (flushed at the end of a block, its thread
  counted); `make bench` installs both, and without them their rows are omitted.
- *Displays.* Epochs of the quick preset with `training_metrics`, on one model, with a display on a pseudo terminal of
  120x40 that another process reads, and in turn without a display; no evaluation. Half a second passes in about two
  epochs, so most epochs with a display contain a redraw. *Own time* is the time inside the display.
- *Each hook.* From one run of 20 epochs with all hooks and `--profile-hooks`: mean wall-clock time of a call, random
  streams and checks included. Values that the loop computes for hooks (the mean gradient, the norm of every step) are
  not included. `qk_clip`, which commits, has a separate run, and `moe_router` one of a small mixture of experts.
- *Smoothing.* `ModelSmoother.smooth` against one `torch._foreach_lerp_` of the parameters and as many buffers, caches
  emptied before each. A smoothing writes both, so it moves at least 4/3 of the bytes. torch has no operation that
  writes two results, so each block is blended and then copied back from the cache: the copy is the remaining cost.
- *Checks of gradients and updates.* The language model trains in the real loop with `weight_updates` at every other
  step. The cost is the time of its two visits, including the manager's own work, relative to a step without them; a
  second row is the difference between a checked step and its unchecked neighbour, cache effects included. The cost at
  every 100th step is computed from one due visit and 99 idle ones. Full clones: a clone of every parameter before
  the step, and the same norms, maxima and means one at a time, against the checks of the plain class, with a training
  step before each.
- *Tied embeddings.* The quick preset of `tied_lm` in the real loop, with the hook at every other step: the time of its
  visit and of the functions on the two gradients, including the manager's work, relative to a step without it; a
  second row is the difference between a step with the hook and the next one without. Peak memory is that of all tensors
  together, from every allocation and release that torch's profiler records, on a model with a matrix of 20 MB, in
  float32; the loop without hooks needs as much memory at the moment when autograd adds the two gradients. Tokens per
  second: the experiment's loop and a hand-written one, which also draws its windows by hand, train one model in turn on
  the same windows. Start: the CPU time of a process from its beginning to the end of the first optimizer step of the
  first strategy, including the tokenizer's training and the evaluation before that step.
- *Epochs started in the middle.* `next(loader.batches(0, start))`, late and early starts in turn, epochs of 100,010
  batches of 4 rows: the time until the first batch, including drawing the order of the epoch again.
- *Casts to narrow formats.* In a separate process, on two threads, in wall-clock time. The plain pass reads as many
  bytes and writes them into a new tensor, like the cast; the process keeps freed memory (`mallopt`), because new pages
  would dominate the cost. *Scales given* excludes the pass that determines the largest magnitudes.
- *Overflow of narrow formats.* Hypothetical casts: the hook's own time at every other step, relative to the steps
  between, divided by 100. Counting: the difference between a step with counted casts and the next one without, cache
  effects included; *one step in 4* is a quarter of that, not a separate run.
- *Memory.* Each kind of run in its own process: the largest resident memory, and the storages of all tensors that
  Python's garbage collector reaches after a step, both minus those of the bare loop, in copies of the training state.
  The bars allow 5 % for rounding by the allocator, and 1 % for state of the loop in addition to the training state.
- *Checkpoints.* The paper preset's model in the real loop. *Loop blocked* is the CPU time of the training thread. The
  cost is the wall-clock time of six steps, during which a checkpoint is taken (at the first) and written, minus that of
  the six steps before, divided by 100 steps; the row below it is the time of both threads if nothing runs in parallel.
  As in a real run, each checkpoint is of a new step and overwrites the file of a deleted one. Resuming is the CPU time
  of a process up to its first step.
- *Models of real sizes.* Two trainings in turn, step by step, of the same model and batch, both with AdamW and
  clipping: the bare loop, and one with a group of hooks attached. Every hook with an `interval` has the interval 4; the
  cost is that of a mean step if one step in 50 is due, from the median of the ordinary steps and the due ones. Calls of
  hooks are counted from 1,000 on after the fifth step: before, nearly every step would contain full checks of the
  state, which fall due in the calls 1, 2, 3, 4, 8, 16 and so on. The row *first step* contains such checks. The group
  `full` is measured in its first steps only, checks included, since its due steps take minutes. Time is CPU time of the
  process; before the first step and the close, a gigabyte is used and freed, so that most of the time in which the host
  of a virtual machine provides new memory is not counted. Memory is the peak resident memory of a fresh process of nine
  steps, Python and torch included. Where there is a bar, first step and close are medians of five trainings, and memory
  is the median of five pairs of processes. On ranks, two processes share the cores of this machine; times are those of
  the first rank, memory is that of the larger one.
- *Long records.* One training with the group `health` and its own intervals. The time of a command is the CPU time of
  its process, which imports torch first.
- *On a GPU.* These benchmarks, and the tests marked `gpu`, have never run on a GPU; the tests run the same code on the
  CPU, on small models. Wall-clock time up to the point where the device has finished its work. Steps a second: epochs
  of 200 steps of the paper preset. Guardian: as above, in turn with plain copies, shown with their bytes per second.
  Checkpoint: until the loop may continue, against one copy of the state into pinned memory. Hooks: epochs with three
  observers against epochs without, the model run eagerly, compiled, and compiled with CUDA graphs
  (`mode="reduce-overhead"`). A test counts the host's waits in a visit, at most one
  (`tests/contracts/test_on_gpu.py`).
"""


def data(rows: Mapping[str, Sequence[Shown]]) -> str:
    """Return the text of docs/data/benchmarks.txt."""
    return environment() + "\n\n" + "\n".join(section(title, part) for title, part in rows.items())


def section(title: str, part: Sequence[Shown], note: str = "") -> str:
    """Return the text of one section; ``note`` is a paragraph before its tables."""
    paragraph = f"{note}\n\n" if note else ""
    return f"## {title}\n\n{paragraph}{table(part) or WITHOUT_ROWS[title]}\n"


def renewed(text: str, rows: Mapping[str, Sequence[Shown]], order: Sequence[str]) -> str:
    """Return the text of the file with some sections measured again.

    ``order`` has the titles of all sections. A section that was measured on another day or in another environment than
    the file states its own.
    """
    begin = text.index("## ")
    note = "" if environment() in text[:begin] else f"This section: {environment()[0].lower()}{environment()[1:]}"
    old = text[begin:].split("## ")[1:]
    parts = {part.partition("\n")[0]: f"## {part.rstrip()}\n" for part in old}
    parts |= {title: section(title, part, note) for title, part in rows.items()}
    return text[:begin] + "\n".join(parts[title] for title in sorted(parts, key=order.index))


def full_page(text: str) -> str:
    """Return the page of the site without its title: the measured tables with introductions, and the method."""
    for title, introduction in INTRODUCTIONS.items():
        text = text.replace(f"## {title}\n", f"## {title}\n\n{introduction.rstrip()}\n")
    return text + METHOD


def environment() -> str:
    """Return the date and the environment of the measurements, as a sentence."""
    return (
        f"Measured on {today()} on {processor()}, {os.cpu_count()} cores, with Python {platform.python_version()}, "
        f"torch {torch.__version__}, {torch.get_num_threads()} thread."
    )


def processor() -> str:
    """Return the name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def table(rows: Iterable[Shown]) -> str:
    """Return rows as Markdown tables, one for each run of rows with the same columns, numbers to the right."""
    return "\n\n".join(_table(list(alike)) for _, alike in groupby(rows, type))


def _table(rows: Sequence[Shown]) -> str:
    kind = type(rows[0])
    cells = [kind.columns, *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(_padded(row, widths, kind.to_the_right)) + " |" for row in cells]
    rule = ["-" * (width - 1) + (":" if index in kind.to_the_right else "-") for index, width in enumerate(widths)]
    return "\n".join([lines[0], "| " + " | ".join(rule) + " |", *lines[1:]])


def _padded(row: Sequence[str], widths: Sequence[int], numbers: range) -> list[str]:
    sized = enumerate(zip(row, widths, strict=True))
    return [text.rjust(width) if index in numbers else text.ljust(width) for index, (text, width) in sized]


def misses(rows: Mapping[str, Sequence[Shown]]) -> str:
    """Return the number of bars met, and the missed ones, as text."""
    judged = [row for part in rows.values() for row in part if row.result]
    missed = [row.figure for row in judged if row.result == "miss"]
    return f"{len(judged) - len(missed)} of {len(judged)} bars met" + (
        f"; missed: {', '.join(missed)}" if missed else ""
    )
