"""Command that writes docs/data/benchmarks.txt; ``--only NAME`` measures a part, ``--write`` updates it there."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from tests.benchmarks.attach_cost import bare_attach, trainers
from tests.benchmarks.checkpoint_cost import checkpoints, resuming, resuming_together
from tests.benchmarks.compiled_cost import compiled_steps
from tests.benchmarks.console_cost import displays
from tests.benchmarks.digest_cost import at_snapshots, digests
from tests.benchmarks.fire_cost import cost_per_tensor, empty_dispatch, observers_per_dispatch
from tests.benchmarks.gpu_cost import on_a_gpu
from tests.benchmarks.guardian_cost import interventions, save_and_restore
from tests.benchmarks.health_cost import against_full_clones, checked_every_other_step
from tests.benchmarks.hook_cost import (
    counterfactual,
    each_hook,
    full_group,
    groups_of_observers,
    hessian_product,
    observers_at_the_end_of_epochs,
)
from tests.benchmarks.loader_cost import every_batch, first_batches, skipping
from tests.benchmarks.long_record_cost import long_record
from tests.benchmarks.loop_cost import clipping, loop_cost, observers_in_the_loop
from tests.benchmarks.lowbit_cost import casts
from tests.benchmarks.memory_cost import peak_memory
from tests.benchmarks.others.cost import side_by_side
from tests.benchmarks.others.extras import as_they_do_them, watch
from tests.benchmarks.overflow_cost import counting, hypothetical_casts
from tests.benchmarks.ranks_cost import agreements_and_copies
from tests.benchmarks.real_size_cost import real_sizes, real_sizes_on_ranks
from tests.benchmarks.report import data, environment, misses, renewed, table
from tests.benchmarks.rewind_cost import rewinds
from tests.benchmarks.row_cost import bytes_of_rows, known_data, recorded_rows
from tests.benchmarks.rows import Effort, Shown
from tests.benchmarks.sink_cost import file_sinks
from tests.benchmarks.smoothing_cost import fires, smoothing
from tests.benchmarks.tied_cost import hooks_on_the_tied_matrix, loop_without_hooks, start
from tests.benchmarks.tied_memory import extra_memory
from tests.benchmarks.whole_runs import whole_runs

DATA = Path(__file__).parents[2] / "docs" / "data" / "benchmarks.txt"
BENCHMARKS: dict[str, tuple[str, Sequence[Callable[[Effort], Iterator[Shown]]]]] = {
    "others": ("Side by side", (side_by_side, as_they_do_them, watch)),
    "whole": ("What it costs you", (whole_runs,)),
    "loop": ("The loop", (loop_cost,)),
    "attach": ("Custom training loops and trainers", (bare_attach, trainers)),
    "compiled": ("Compiled models", (compiled_steps,)),
    "fire": ("Observers", (empty_dispatch, observers_per_dispatch, cost_per_tensor, observers_in_the_loop)),
    "guardian": ("Interventions", (save_and_restore, interventions)),
    "clip": ("Clipping", (clipping,)),
    "memory": ("Memory", (peak_memory,)),
    "ends": ("Hooks at the end of epochs", (observers_at_the_end_of_epochs,)),
    "groups": ("Groups of hooks", (groups_of_observers, full_group)),
    "curvature": ("Curvature and counterfactuals", (hessian_product, counterfactual)),
    "console": ("Displays", (displays,)),
    "sinks": ("Sinks", (file_sinks,)),
    "smoothing": ("Smoothing and averages of weights", (smoothing, fires)),
    "health": ("Checks of gradients and updates", (checked_every_other_step, against_full_clones)),
    "tied": ("Tied embeddings", (hooks_on_the_tied_matrix, extra_memory, loop_without_hooks, start)),
    "checkpoints": ("Checkpoints", (checkpoints, resuming)),
    "digests": ("Digests of the training state", (digests, at_snapshots)),
    "rows": ("Rows in the record", (recorded_rows, bytes_of_rows, known_data)),
    "rewinds": ("Retrained intervals", (rewinds,)),
    "resume": ("Epochs started in the middle", (first_batches, skipping, every_batch)),
    "lowbit": ("Casts to narrow formats", (casts,)),
    "overflow": ("Overflow of narrow formats", (hypothetical_casts, counting)),
    "ranks": ("Distributed training", (agreements_and_copies, resuming_together)),
    "sizes": ("Models of real sizes", (real_sizes, real_sizes_on_ranks)),
    "record": ("Long records", (long_record,)),
    "gpu": ("On a GPU", (on_a_gpu,)),
    "each": ("Each hook", (each_hook,)),
}


def main(arguments: Sequence[str]) -> None:
    """Run the selected benchmarks."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS), metavar="NAME")
    parser.add_argument("--share", type=float, default=1.0, help="part of the repetitions, for a quick look")
    parser.add_argument("--write", action="store_true", help="put what was measured in its place in the file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    say(environment())
    begin = time.perf_counter()
    rows = {
        title: measured(title, parts, options.share) for title, parts in (BENCHMARKS[name] for name in options.only)
    }
    say(f"\n{misses(rows)}, in {time.perf_counter() - begin:.0f} s.")
    if set(options.only) == set(BENCHMARKS) and options.share >= 1:
        DATA.write_text(data(rows), encoding="utf-8")
        say(f"Written to {DATA}.")
    elif options.write and options.share >= 1:
        order = [title for title, _ in BENCHMARKS.values()]
        DATA.write_text(renewed(DATA.read_text(encoding="utf-8"), rows, order), encoding="utf-8")
        say(f"Renewed in {DATA}.")


def measured(title: str, parts: Sequence[Callable[[Effort], Iterator[Shown]]], share: float) -> list[Shown]:
    """Run some benchmarks and show their rows."""
    rows: list[Shown] = []
    for benchmark in parts:
        for row in benchmark(Effort(share)):
            rows.append(row)
            say(" | ".join(row.cells()))  # some sections take half an hour
    say(f"\n{title}\n{table(rows)}")
    return rows


def say(text: str) -> None:
    """Write a line and flush it."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
